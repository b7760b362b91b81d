# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's models: ``PolicyModelActor`` and ``ReferenceModelActor`` replay the rollout's inputs in their forwards.

Also the parameters that a perturbation adds to a model.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ngrpo.config.run import current_run
from ngrpo.machine.models import lora
from ngrpo.machine.storage.parameters_file import attach
from ngrpo.machine.upstream.patch import around
from ngrpo.machine.upstream.types import DeepspeedStrategy
from ngrpo.trainers.common import policy_loss, sample_records
from ngrpo.trainers.common.log_probs import Densities, corrected, densities, no_overrides
from ngrpo.trainers.common.replay_check import check_replay
from perturbations import Perturbation
from perturbations.errors import require
from perturbations.parameters import attached, freeze
from perturbations.replay.routing import RoutingScope, routers
from perturbations.replay.scope import LastHidden, ReplayScope, ReplayStats


def policy_model_actor(plain: type) -> type:
    """A subclass of `PolicyModelActor`: its log-probabilities, PPO's old ones, are those of the replayed history."""

    class ReplayingPolicyActor(_Replaying, plain):  # type: ignore[misc, valid-type]
        is_policy, model_attribute = True, "actor"

        def init_model_from_pretrained(self, *args: object, **kwargs: object) -> None:
            super().init_model_from_pretrained(*args, **kwargs)
            if current_run().replay_routing:
                routers(model_of(self.actor))  # a model without replayable routers is an error now
            noise = current_run().policy_noise
            if noise is not None:
                # A model without weights for the noise is an error now: a dry run may not have seen the model.
                noise.selected(lora.base_parameters(model_of(self.actor)))

        def set_policy_noise(self, scale: float, sync: int) -> None:
            """The noise of the next weight sync."""
            self.trainer.policy_noise = (scale, sync)

    return ReplayingPolicyActor


def reference_model_actor(plain: type) -> type:
    """A subclass of `ReferenceModelActor`: the same history, through its own embedding."""

    class ReplayingReferenceActor(_Replaying, plain):  # type: ignore[misc, valid-type]
        is_policy, model_attribute = False, "model"

    return ReplayingReferenceActor


class _Replaying:
    """A model actor with a forward that replays; a run without a feature skips its line."""

    is_policy: bool
    model_attribute: str
    _is_checked = False
    _kept: tuple[tuple[str, Tensor], ...] = ()

    def forward(
        self, sequences: Tensor, action_mask: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        run, model = current_run(), getattr(self, self.model_attribute)
        side_inputs = kwargs.get("mm_train_inputs_list")
        if run.perturbation is not None and not self._is_checked:
            check_replay(model_of(model), self.unperturbed_log_probs)
            self._is_checked = True
        entropies, hidden = [], None
        with ExitStack() as stack:
            if run.credit is not None and self.is_policy:
                entropies = stack.enter_context(_kept_entropies(model))
            if run.advantage is not None and run.advantage.needs == "hidden" and self.is_policy:
                head = model_of(model).get_output_embeddings()
                hidden = LastHidden(head, f"advantage {run.advantage.name}")
                stack.enter_context(hidden())
            replay = replayed(model, side_inputs, require(attention_mask, "attention_mask"), measure=False)
            _, action_densities = stack.enter_context(replay)
            log_probs = super().forward(sequences, action_mask, attention_mask, **kwargs)  # type: ignore[misc]
            if action_densities is not None and self.is_policy:
                self._kept = (*self._kept, ("token_log_probs", action_densities.token_log_probs(log_probs)))
            if hidden is not None:
                masks = require(action_mask, "action_mask"), require(attention_mask, "attention_mask")
                means = mean_hidden(hidden, *masks, packed=getattr(model, "packing_samples", False))
                self._kept = (*self._kept, ("mean_hidden", means))
        self._kept = (*self._kept, *(("token_entropies", part) for part in entropies))
        return log_probs

    def unperturbed_log_probs(
        self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor, experts: Sequence[np.ndarray | None] = ()
    ) -> Any:
        """log π without perturbed inputs or an override, by OpenRLHF's own forward; ``experts``: of each sample."""
        with ExitStack() as stack:
            stack.enter_context(no_overrides())
            if any(each is not None for each in experts):
                model = model_of(getattr(self, self.model_attribute))
                stack.enter_context(RoutingScope(model)(experts, attention_mask))
            return super().forward(sequences, action_mask, attention_mask)  # type: ignore[misc]

    def hand_over(self, what: str) -> list[Tensor]:
        """What the forwards since the last call kept.

        The tokens' own log π (with a density), entropies (for a credit), or mean hidden states (for an advantage).
        """
        kept, self._kept = self._kept, tuple(entry for entry in self._kept if entry[0] != what)
        return [part for name, part in kept if name == what]


@contextmanager
def replayed(
    actor: Any,
    side_inputs: Sequence[Any] | None,
    mask: Tensor,
    advantages: Tensor | None = None,
    *,
    measure: bool = True,
    look_up: int = 0,
) -> Iterator[tuple[ReplayStats | None, Densities | None]]:
    """The forward of OpenRLHF's ``Actor`` in this context is over the rollout's inputs, experts and sets of tokens.

    Args:
        actor: its model is replayed.
        side_inputs: of the samples of the batch.
        mask: the attention mask, a tensor (B, T).
        advantages: as of :class:`Densities`.
        measure, look_up: as of :class:`ReplayScope`.
    """
    run, stats, found = current_run(), None, None
    with ExitStack() as stack:
        if run.sampling.correct_mask:
            stack.enter_context(corrected(side_inputs, mask))
        if run.replay_routing:
            stack.enter_context(RoutingScope(model_of(actor))(sample_records.routed(side_inputs, len(mask)), mask))
        if run.perturbation is not None:
            scope = replay_scope(actor, run.perturbation, measure, look_up)
            stats = stack.enter_context(scope(sample_records.records(side_inputs, len(mask)), mask))
            found = stack.enter_context(densities(scope, actor.temperature, advantages))
        yield stats, found


def replay_scope(actor: Any, perturbation: Perturbation, measure: bool = True, look_up: int = 0) -> ReplayScope:
    """The scope for the model of OpenRLHF's ``Actor``; arguments of :class:`ReplayScope`."""
    model = model_of(actor)
    hidden = None
    if perturbation.reads_hidden:
        hidden = LastHidden(model.get_output_embeddings(), f"perturbation {perturbation.name}")
    return ReplayScope(model.get_input_embeddings(), measure, attached(model), perturbation, look_up, hidden=hidden)


def kept_by_actors(maker: Any, what: str, own: Sequence[Tensor]) -> list[Tensor]:
    """What the actors kept of each batch, as of :meth:`hand_over`: tensors with the first dimensions of ``own``."""
    import ray

    args = maker.strategy.args
    copies = args.ds.ring_attn_size * args.ds.tensor_parallel_size  # actors that were given the same batches
    by_actor = ray.get(maker.actor_model_group.async_run_method(method_name="hand_over", what=what)[::copies])
    batches = [batch for of_actor in by_actor for batch in of_actor]
    if [part.shape[: own[0].dim()] for part in batches] != [part.shape for part in own]:
        counts = f"the actors kept {len(batches)} batches, {len(own)} were made"
        raise RuntimeError(f"{what}: {counts}: their order is not that of OpenRLHF 0.11.2's async_run_method_batch.")
    return batches


@contextmanager
def _kept_entropies(model: Any) -> Iterator[list[Tensor]]:
    """The entropies of the forwards of OpenRLHF's ``Actor`` in this context, (B, A) each."""
    original, entropies = model.forward, []

    def forward(*inputs: object, **options: object) -> Any:
        log_probs, output = original(*inputs, return_output=True, return_entropy=True, **options)
        entropies.append(output.entropy[:, -log_probs.shape[1] :].float().cpu())
        return log_probs

    model.forward = forward
    try:
        yield entropies
    finally:
        del model.forward


def mean_hidden(hidden: LastHidden, action_mask: Tensor, attention_mask: Tensor, *, packed: bool) -> Tensor:
    """The mean last hidden state over each response's trained tokens, (B, D) float32 on the CPU."""
    shape = (1, int(attention_mask.sum())) if packed else tuple(attention_mask.shape)
    # The rows that chose the tokens; the tokens' own are the next ones.
    rows, sample = policy_loss.rows_of_tokens(action_mask, attention_mask, shape)
    of_response = [rows[sample == i] + 1 for i in range(len(action_mask))]
    return torch.stack([hidden.at(own, math.prod(shape)).float().mean(0).cpu() for own in of_response]).detach()


def model_of(actor: Any) -> Any:
    """The Hugging Face model under OpenRLHF's ``Actor`` and DeepSpeed's engine."""
    model = actor.model
    while hasattr(model, "module"):
        model = model.module
    return model


@around
def merge_mm_train_inputs(
    original: Callable[..., Any], mm_train_inputs_list: Sequence[Any], device: torch.device
) -> Any:
    """`merge_mm_train_inputs`, meant for images: a multimodal model's forward does not get our entries."""

    def theirs(entry: Any) -> Any:
        if isinstance(entry, list):
            return [theirs(one) for one in entry]
        return {name: value for name, value in (entry or {}).items() if name not in sample_records.OURS} or None

    return original([theirs(entry) for entry in mm_train_inputs_list], device)


# ---- parameters of a perturbation --------------------------------------------------------------------------------


@around
def actor_init(
    original: Callable[..., None], self: Any, pretrain_or_model: str | nn.Module, *args: object, **kwargs: object
) -> None:
    """`Actor.__init__`: the perturbation's parameters join the model before DeepSpeed and the optimizer see it.

    So ZeRO, gradient clipping, checkpoints and weight sync treat them as the policy's. The reference model has the
    parameters of its own folder, or the ones that training starts from.
    """

    original(self, pretrain_or_model, *args, **kwargs)
    if isinstance(pretrain_or_model, str):
        perturbation = require(current_run().perturbation, "--perturbation")
        attach(self.model, perturbation, pretrain_or_model)
        freeze(self.model, perturbation)


@around
def get_model_parameters(
    original: Callable[..., Any], self: DeepspeedStrategy, model: nn.Module, *args: object, **kwargs: object
) -> Any:
    """`DeepspeedStrategy._get_model_parameters`: parameters with their own learning rate get their own group."""
    raw, groups = original(self, model, *args, **kwargs)
    module = attached(raw)
    if module is None:
        return raw, groups
    perturbation = require(current_run().perturbation, "--perturbation")
    rates = {id(p): perturbation.learning_rate(name) for name, p in module.named_parameters() if p.requires_grad}
    if all(rate is None for rate in rates.values()):
        return raw, groups
    if not all(isinstance(group, dict) for group in groups):
        subject = f"perturbation {perturbation.name!r} has its own learning rates"
        raise ValueError(f"{subject}, which need --actor.optim adam. Use it, or set them to none.")
    return raw, separate(groups, rates)


def separate(groups: list[dict[str, Any]], rates: dict[int, float | None]) -> list[dict[str, Any]]:
    """An optimizer's parameter groups without the parameters that have a rate, by ``id``; then one group per rate."""
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


@around
def moving_average(original: Callable[..., None], *args: object) -> None:
    """`DeepspeedStrategy.moving_average` on a CPU: the actor's last argument is "cuda" (`--train.enable_ema`)."""
    original(*args[:-1], "cpu")
