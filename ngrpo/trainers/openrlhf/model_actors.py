# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's models: ``PolicyModelActor`` and ``ReferenceModelActor`` replay the rollout's inputs in their forwards.

The module also adds a perturbation's own parameters to a model, and gives them their learning rates.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ngrpo.config.run import current_run
from ngrpo.machine.models import lora
from ngrpo.machine.progress import announce
from ngrpo.machine.storage.parameters_file import attach
from ngrpo.machine.upstream.patch import around
from ngrpo.machine.upstream.types import DeepspeedStrategy, Upstream
from ngrpo.trainers.common import policy_loss, sample_records
from ngrpo.trainers.common.log_probs import Densities, corrected, densities, no_overrides
from ngrpo.trainers.common.replay_check import check_replay
from ngrpo.trainers.common.score_centering import ScoreCentering
from perturbations import Perturbation
from perturbations.errors import require
from perturbations.parameters import attached, freeze
from perturbations.replay.routing import RoutingScope, routers
from perturbations.replay.scope import LastHidden, ReplayScope, ReplayStats
from perturbations.replay.trajectory import FinishedTrajectory


def policy_model_actor(plain: type) -> type:
    """The subclass of `PolicyModelActor`: its log-probabilities, PPO's old ones, are those of the replayed history."""
    return type(plain.__name__, (ReplayingPolicyActor, plain), {})


def reference_model_actor(plain: type) -> type:
    """The subclass of `ReferenceModelActor`: the same history, through its own embedding."""
    return type(plain.__name__, (ReplayingReferenceActor, plain), {})


class _Replaying(Upstream):
    """A model actor with a forward that replays; a run without a feature skips its line.

    Attributes:
        is_policy: whether it is the policy's actor, which keeps values of its forwards for the experience maker.
        model_attribute: the attribute in which OpenRLHF's actor keeps its ``Actor``.
    """

    is_policy: bool
    model_attribute: str
    _is_checked = False
    # What the forwards kept: the kind of value, and the values of one batch.
    _kept: tuple[tuple[str, Tensor], ...] = ()

    def forward(
        self, sequences: Tensor, action_mask: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        run = current_run()
        model = getattr(self, self.model_attribute)
        side_inputs = kwargs.get("mm_train_inputs_list")
        if run.perturbation is not None and not self._is_checked:
            announce("start-up check of the replay")
            check_replay(model_of(model), self.unperturbed_log_probs)
            self._is_checked = True
        entropies: list[Tensor] = []
        hidden = None
        with ExitStack() as stack:
            if run.credit is not None and self.is_policy:
                entropies = stack.enter_context(_kept_entropies(model))
            if run.advantage is not None and run.advantage.needs == "hidden" and self.is_policy:
                head = model_of(model).get_output_embeddings()
                hidden = LastHidden(head, f"advantage {run.advantage.name}")
                stack.enter_context(hidden())
            replay = replayed(model, side_inputs, require(attention_mask, "attention_mask"), measure=False)
            _, action_densities = stack.enter_context(replay)
            log_probs = super().forward(sequences, action_mask, attention_mask, **kwargs)
            if action_densities is not None and self.is_policy:
                self._keep("token_log_probs", action_densities.token_log_probs(log_probs))
            if hidden is not None:
                means = mean_hidden(
                    hidden,
                    require(action_mask, "action_mask"),
                    require(attention_mask, "attention_mask"),
                    packed=getattr(model, "packing_samples", False),
                )
                self._keep("mean_hidden", means)
        for of_batch in entropies:
            self._keep("token_entropies", of_batch)
        return log_probs

    def unperturbed_log_probs(
        self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor, experts: Sequence[np.ndarray | None] = ()
    ) -> Any:
        """log π without perturbed inputs or an override, by OpenRLHF's own forward; ``experts``: of each sample."""
        with ExitStack() as stack:
            stack.enter_context(no_overrides())
            if any(of_sample is not None for of_sample in experts):
                model = model_of(getattr(self, self.model_attribute))
                stack.enter_context(RoutingScope(model)(experts, attention_mask))
            return super().forward(sequences, action_mask, attention_mask)

    def hand_over(self, what: str) -> list[Tensor]:
        """What the forwards since the last call kept, a tensor for each batch.

        Args:
            what: ``token_log_probs``, the tokens' own log π (with a density); ``token_entropies`` (for a credit); or
                ``mean_hidden``, mean hidden states (for an advantage).
        """
        handed_over = [values for kind, values in self._kept if kind == what]
        self._kept = tuple((kind, values) for kind, values in self._kept if kind != what)
        return handed_over

    def _keep(self, what: str, values: Tensor) -> None:
        self._kept = (*self._kept, (what, values))


class SyncNoise(NamedTuple):
    """The policy noise of a weight sync: the training step that it is drawn for, and its σ, None before a first one."""

    step: int
    sigma: float | None


class ReplayingPolicyActor(_Replaying):
    """What goes in front of `PolicyModelActor`."""

    is_policy = True
    model_attribute = "actor"

    def init_model_from_pretrained(self, *args: object, **kwargs: object) -> None:
        super().init_model_from_pretrained(*args, **kwargs)
        if current_run().replay_routing:
            routers(model_of(self.actor))  # a model without replayable routers is an error now
        noise = current_run().policy_noise
        if noise is not None:
            # A model without weights for the noise is an error now: a dry run may not have seen the model.
            noise.selected(lora.base_parameters(model_of(self.actor)))

    def drop_rollouts(self) -> None:
        """Empties the buffer of a step in which the policy is not trained."""
        self.trainer.replay_buffer.clear()

    def set_policy_noise(self, scale: float, step: int) -> None:
        """Sets σ of the next weight sync, and the training step that its noise is drawn for.

        Syncs for one step have the same noise, such as those around an evaluation.
        """
        self.trainer.policy_noise = SyncNoise(step=step, sigma=scale)


class ReplayingReferenceActor(_Replaying):
    """What goes in front of `ReferenceModelActor`."""

    is_policy = False
    model_attribute = "model"


@contextmanager
def replayed(
    actor: Any,
    side_inputs: Sequence[Any] | None,
    mask: Tensor,
    advantages: Tensor | None = None,
    *,
    measure: bool = True,
    look_up: int = 0,
    centering: ScoreCentering | None = None,
) -> Iterator[tuple[ReplayStats | None, Densities | None]]:
    """The forward of OpenRLHF's ``Actor`` in this context is over the rollout's inputs, experts and sets of tokens.

    Each sample's bytes are unpacked here, once for all that reads them.

    Args:
        actor: its model is replayed.
        side_inputs: of the samples of the batch.
        mask: the attention mask, a tensor (B, T).
        advantages: as in :class:`Densities`.
        measure, look_up: as in :class:`ReplayScope`.
        centering: of the loss that follows; None for a forward without one.

    Yields:
        Measures of the replay, and the densities of the forward; None in a run without them.
    """
    run = current_run()
    stats = None
    action_densities = None
    trajectories: list[FinishedTrajectory | None] = []
    if run.perturbation is not None or run.has_side_records:
        trajectories = sample_records.unpack(side_inputs)
    with ExitStack() as stack:
        if run.sampling.correct_mask:
            stack.enter_context(corrected(trajectories, mask))
        if centering is not None:
            requests = sample_records.requested_draws(side_inputs, len(mask))
            stack.enter_context(centering.watching(trajectories, requests))
        if run.replay_routing:
            experts = sample_records.routed(trajectories, len(mask))
            stack.enter_context(RoutingScope(model_of(actor))(experts, mask))
        if run.perturbation is not None:
            scope = replay_scope(actor, run.perturbation, measure, look_up)
            records = sample_records.records(trajectories, len(mask))
            stats = stack.enter_context(scope(records, mask))
            action_densities = stack.enter_context(densities(scope, actor.temperature, advantages))
        yield stats, action_densities


def replay_scope(actor: Any, perturbation: Perturbation, measure: bool = True, look_up: int = 0) -> ReplayScope:
    """The scope for the model of OpenRLHF's ``Actor``; arguments of :class:`ReplayScope`."""
    model = model_of(actor)
    hidden = None
    if perturbation.reads_hidden:
        hidden = LastHidden(model.get_output_embeddings(), f"perturbation {perturbation.name}")
    return ReplayScope(model.get_input_embeddings(), measure, attached(model), perturbation, look_up, hidden=hidden)


def kept_by_actors(maker: Any, what: str, like: Sequence[Tensor]) -> list[Tensor]:
    """What the actors kept of each batch of a step, as in :meth:`_Replaying.hand_over`.

    Args:
        maker: OpenRLHF's experience maker.
        what: the kind of value.
        like: a tensor for each batch, which the first dimensions of the kept one must have.
    """
    import ray

    args = maker.strategy.args
    # So many actors in a row were given the same batches.
    copies = args.ds.ring_attn_size * args.ds.tensor_parallel_size
    references = maker.actor_model_group.async_run_method(method_name="hand_over", what=what)
    batches = [batch for of_actor in ray.get(references[::copies]) for batch in of_actor]
    dimensions = like[0].dim()
    if [batch.shape[:dimensions] for batch in batches] != [tensor.shape for tensor in like]:
        raise RuntimeError(
            f"{what}: the actors kept {len(batches)} batches, {len(like)} were made: their order is not that of"
            " OpenRLHF 0.11.2's async_run_method_batch."
        )
    return batches


@contextmanager
def _kept_entropies(model: Any) -> Iterator[list[Tensor]]:
    """The entropies of the forwards of OpenRLHF's ``Actor`` in this context, (B, A) each."""
    original = model.forward
    entropies: list[Tensor] = []

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
    rows, samples = policy_loss.rows_of_tokens(action_mask, attention_mask, shape)
    means = []
    for sample in range(len(action_mask)):
        states = hidden.at(rows[samples == sample] + 1, math.prod(shape))
        means.append(states.float().mean(0).cpu())
    return torch.stack(means).detach()


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

    def without_ours(entry: Any) -> Any:
        if isinstance(entry, list):
            return [without_ours(nested) for nested in entry]
        if entry is None:
            return None
        return {name: value for name, value in entry.items() if name not in sample_records.OURS} or None

    return original([without_ours(entry) for entry in mm_train_inputs_list], device)


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
    rates: dict[int, float | None] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            rates[id(parameter)] = perturbation.learning_rate(name)
    if all(rate is None for rate in rates.values()):
        return raw, groups
    if not all(isinstance(group, dict) for group in groups):
        raise ValueError(
            f"perturbation {perturbation.name!r} has its own learning rates, which need --actor.optim adam. Use it, or"
            " set them to none."
        )
    return raw, separate(groups, rates)


def separate(groups: list[dict[str, Any]], rates: dict[int, float | None]) -> list[dict[str, Any]]:
    """An optimizer's parameter groups without the parameters that have a rate, by ``id``; then one group per rate."""
    remaining: list[dict[str, Any]] = []
    by_rate: dict[float, dict[str, Any]] = {}
    for group in groups:
        without_rate = []
        for parameter in group["params"]:
            rate = rates.get(id(parameter))
            if rate is None:
                without_rate.append(parameter)
                continue
            if rate not in by_rate:
                by_rate[rate] = {**group, "params": [], "lr": rate}
            by_rate[rate]["params"].append(parameter)
        # A group that was empty before stays.
        if without_rate or not group["params"]:
            remaining.append({**group, "params": without_rate})
    return remaining + list(by_rate.values())
