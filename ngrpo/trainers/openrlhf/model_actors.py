# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's actor and reference with replay: every forward sees what the rollout saw.

Each function takes a class or method of OpenRLHF 0.11.2 and returns what takes its place: a row of
`patches.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ngrpo.config.run import current_run
from ngrpo.machine.storage.parameters_file import attach
from ngrpo.trainers.openrlhf import side_inputs
from ngrpo.trainers.openrlhf.density_loss import Densities, densities
from ngrpo.trainers.openrlhf.loss import nothing_replaced, policy_loss
from ngrpo.trainers.openrlhf.metrics import QUOTIENTS
from ngrpo.trainers.openrlhf.replay_probe import prove
from perturbations.base import Perturbation
from perturbations.errors import present
from perturbations.parameters import attached, freeze
from perturbations.replay.last_hidden import LastHidden
from perturbations.replay.scope import ReplayScope

if TYPE_CHECKING:
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.utils.deepspeed.deepspeed import DeepspeedStrategy

    from ngrpo.trainers.openrlhf.objects import ActorTrainer

_LOOK_UP = 32  # inputs whose nearest token is looked up: of 20 steps the share is known to 0.02


def with_parameters(original: Callable[..., None]) -> Callable[..., None]:
    """`Actor.__init__`: the perturbation's parameters join the model before DeepSpeed and the optimizer see it.

    So ZeRO, gradient clipping, checkpoints and weight sync take them for the policy's. What the perturbation freezes
    gets no gradient from then on. The reference model has the
    parameters that its own folder came with, or the ones that training starts from.
    """

    def __init__(self: Any, pretrain_or_model: str | nn.Module, *args: object, **kwargs: object) -> None:
        original(self, pretrain_or_model, *args, **kwargs)
        if isinstance(pretrain_or_model, str):
            perturbation = present(current_run().perturbation, "--perturbation")
            attach(self.model, perturbation, pretrain_or_model)
            freeze(self.model, perturbation)

    return __init__


def with_learning_rates(original: Callable[..., Any]) -> Callable[..., Any]:
    """`DeepspeedStrategy._get_model_parameters`: parameters with a learning rate of their own get their own group."""

    def _get_model_parameters(self: DeepspeedStrategy, model: nn.Module, *args: object, **kwargs: object) -> Any:
        raw, groups = original(self, model, *args, **kwargs)
        module = attached(raw)
        if module is None:
            return raw, groups
        perturbation = present(current_run().perturbation, "--perturbation")
        rates = {id(p): perturbation.learning_rate(name) for name, p in module.named_parameters() if p.requires_grad}
        if all(rate is None for rate in rates.values()):
            return raw, groups
        if not all(isinstance(group, dict) for group in groups):
            raise ValueError(
                f"perturbation {perturbation.name!r} has learning rates of its own, which need --actor.optim adam. Use"
                " it, or set them to none."
            )
        return raw, separate(groups, rates)

    return _get_model_parameters


def separate(groups: list[dict[str, Any]], rates: dict[int, float | None]) -> list[dict[str, Any]]:
    """Moves parameters into groups by learning rate.

    Args:
        groups: an optimizer's parameter groups.
        rates: learning rate by ``id`` of a parameter, None for the optimizer's.

    Returns:
        The groups without the parameters that have a rate, then one group with ``lr`` for each rate.
    """
    remaining, by_rate = [], {}
    for group in groups:
        for parameter in group["params"]:
            rate = rates.get(id(parameter))
            if rate is not None:
                by_rate.setdefault(rate, {**group, "params": [], "lr": rate})["params"].append(parameter)
        rest = [p for p in group["params"] if rates.get(id(p)) is None]
        if rest or not group["params"]:
            remaining.append({**group, "params": rest})
    return remaining + list(by_rate.values())


def model_of(actor: Any) -> Any:
    """The Hugging Face model under OpenRLHF's ``Actor`` and DeepSpeed's engine."""
    model = actor.model
    while hasattr(model, "module"):
        model = model.module
    return model


def replay_scope(actor: Any, perturbation: Perturbation, measure: bool = True, look_up: int = 0) -> ReplayScope:
    """The scope for the model of OpenRLHF's ``Actor``; arguments of :class:`ReplayScope`."""
    model = model_of(actor)
    hidden = LastHidden(model.get_output_embeddings()) if perturbation.reads_hidden else None
    embedding = model.get_input_embeddings()
    return ReplayScope(embedding, measure, attached(model), perturbation, look_up, hidden=hidden)


def replaying_actor(plain: type) -> type:
    """`PolicyModelActor`: its log-probabilities (the "old" ones of PPO) are those of the replayed history."""
    return _replaying_forward(plain, "actor")


def replaying_reference(plain: type) -> type:
    """`ReferenceModelActor`: the same history, through its own embedding."""
    return _replaying_forward(plain, "model")


def _replaying_forward(plain: type, attribute: str) -> type:
    """A subclass whose ``forward`` replays; ``attribute`` holds the model."""

    class ReplayingModelActor(plain):  # type: ignore[misc, valid-type]
        def forward(
            self,
            sequences: Tensor,
            action_mask: Tensor | None = None,
            attention_mask: Tensor | None = None,
            **kwargs: Any,
        ) -> Any:
            records = side_inputs.records(kwargs.get("mm_train_inputs_list"), len(sequences))
            model, perturbation = getattr(self, attribute), present(current_run().perturbation, "--perturbation")
            if not getattr(self, "_proven", False):
                prove(model_of(model), self.unperturbed_log_probs)
                self._proven = True
            scope = replay_scope(model, perturbation, measure=False)
            with scope(records, attention_mask), densities(scope, model.temperature) as ours:
                log_probs = super().forward(sequences, action_mask, attention_mask, **kwargs)
                if ours is not None and attribute == "actor":
                    self._tokens = [*getattr(self, "_tokens", ()), ours.token_log_probs(log_probs)]
            return log_probs

        def unperturbed_log_probs(self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor) -> Any:
            """log π of texts that nothing is replayed in, as OpenRLHF's own forward takes it."""
            with nothing_replaced():
                return super().forward(sequences, action_mask, attention_mask)

        def token_log_probs(self) -> list[Any]:
            """The tokens' own log π of each forward since the last call, kept where a perturbation has a density."""
            tokens, self._tokens = getattr(self, "_tokens", []), []
            return tokens

    return ReplayingModelActor


def replaying_training_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """`ActorPPOTrainer.training_step`: the forward that is differentiated replays too.

    The scope covers the backward as well, so that a checkpointed forward that runs again sees the same inputs.
    """

    def training_step(
        self: ActorTrainer, experience: Experience, kl_ctl: float, step: int, *args: object
    ) -> dict[str, Any]:
        records = side_inputs.records(experience.mm_train_inputs, len(experience.sequences))
        # A pass over the vocabulary is worth its time once per step of training, not in every micro-batch.
        perturbation = present(current_run().perturbation, "--perturbation")
        scope = replay_scope(self.actor, perturbation, look_up=_LOOK_UP if step == 0 else 0)
        replay = scope(records, experience.attention_mask)
        advantages = experience.advantages if perturbation.has_density else None
        in_log_probs = densities(scope, self.actor.temperature, advantages)
        with policy_loss(self, _RatioProbe) as ratios, replay as stats, in_log_probs as ratios.densities:
            result = original(self, experience, kl_ctl, step, *args)
        result["metrics"]["perturbation/ratio_mean"] = ratios.mean
        result["weights"]["perturbation/ratio_mean"] = "token"
        # Sums per sample, which OpenRLHF averages over samples: a quotient of two of them is a mean over positions,
        # however the positions fall into micro-batches (see metrics.add_measures).
        sums = {
            "shift": (stats.shift_sum(), stats.count()),
            "left_anchor": (int(sum(stats.left_anchor)), int(sum(stats.looked_at))),
        }
        for name, parts in sums.items():
            for key, value in zip(QUOTIENTS[f"perturbation/{name}"], parts):
                result["metrics"][key] = torch.tensor(value / len(experience.sequences))
                result["weights"][key] = "sample"
        return result

    return training_step


class _RatioProbe:
    """Calls the policy loss and notes the mean of the PPO ratio π_new / π_old over the generated tokens.

    What a density adds for the policy loss alone is added here, so that the KL term does not see it. The log-ratio is
    clamped to ±20, as OpenRLHF's loss does, so that the mean is finite.
    """

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self._loss_fn = loss_fn
        self.densities: Densities | None = None
        self.mean = torch.tensor(1.0)

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, *args: object, action_mask: Tensor, **kwargs: Any
    ) -> Any:
        with torch.no_grad():
            ratio = (log_probs - old_log_probs).float().clamp(-20.0, 20.0).exp()
            self.mean = (ratio * action_mask).sum() / action_mask.sum().clamp_min(1)
        if self.densities is not None:
            log_probs = self.densities.for_policy_loss(log_probs)
        return self._loss_fn(log_probs, old_log_probs, *args, action_mask=action_mask, **kwargs)
