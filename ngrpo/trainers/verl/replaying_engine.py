# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP engine with forwards that replay, and its worker.

The workers of a perturbed run import this module, which registers the engine in verl's `EngineRegistry`. A batch is
replayed if the trainer put the perturbation's spec into it.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nested._internal.nested_tensor import NestedTensor
from transformers.modeling_outputs import CausalLMOutput
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import build_attention_mask_from_nested

from ngrpo.rollout.settings import KEY
from ngrpo.trainers.common.log_probs import Densities, MaskCorrection, sampling_masks
from ngrpo.trainers.common.sample_records import check_lengths
from perturbations import FinishedTrajectory, registry
from perturbations.errors import UsageError, require
from perturbations.replay.sampling_mask import SamplingMask
from perturbations.replay.scope import ReplayScope

TOKEN_LOG_PROBS = "perturbation_token_log_probs"
"""An output of forward-only passes: the tokens' own log-probabilities, which a density replaces."""
CORRECT_MASK = "perturbation_correct_mask"
"""The name in a batch of whether log-probabilities are over the tokens that sampling left."""
Loss = Callable[..., tuple[Tensor, dict[str, object]]]


def trajectories(batch: TensorDict) -> list[FinishedTrajectory | None]:
    """The trajectory of each sample of a batch; None for verl's padding.

    Raises ``RuntimeError`` for a sample without one, or with other tokens than the rollout's.
    """
    names = of_each_sample(batch, "uid")
    extra_fields = of_each_sample(batch, "extra_fields")
    prompt_lengths = batch["prompts"].offsets().diff().tolist()
    response_lengths = batch["responses"].offsets().diff().tolist()
    result: list[FinishedTrajectory | None] = []
    for name, fields, prompt, response in zip(names, extra_fields, prompt_lengths, response_lengths):
        if str(name).startswith("pad"):  # verl's samples that only fill a batch; other names are UUIDs
            result.append(None)
            continue
        packed = (fields or {}).get(KEY)
        if packed is None:
            raise RuntimeError(
                f"sample {name} has no replay record, so the model would be trained on inputs that the rollout did not"
                " see. A custom agent loop must pass on the extra_fields of what generate() returns."
            )
        trajectory = FinishedTrajectory.unpack(packed)
        check_lengths(trajectory.record, prompt, response, f"sample {name}")
        result.append(trajectory)
    return result


def _masks(trajectory_by_sample: Sequence[FinishedTrajectory | None]) -> list[SamplingMask]:
    """The sampling mask of each sample; an empty one for verl's padding. RuntimeError for a sample without one."""
    real = [trajectory for trajectory in trajectory_by_sample if trajectory is not None]
    masks = iter(sampling_masks(real, len(real)) if real else ())
    return [SamplingMask.of(0, {}) if trajectory is None else next(masks) for trajectory in trajectory_by_sample]


def of_each_sample(batch: TensorDict, field: str) -> list[Any]:
    """A field of a batch as a list; verl gives one value where all samples have the same."""
    value = tu.get(batch, field)
    return value if isinstance(value, list) else [value] * len(batch)


class ReplayingEngine(FSDPEngineWithLMHead):
    """A forward of samples with records replays them, for old, reference and new log-probabilities alike."""

    # Of the current forward. `_densities` is None without a density, `_mask_correction` without correct_mask.
    _densities: Densities | None = None
    _mask_correction: MaskCorrection | None = None

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Loss | None, forward_only: bool
    ) -> tuple[Tensor, dict[str, dict]]:
        """As verl's, with the tokens' own log-probabilities in the output without a loss, and measures with one."""
        spec = tu.get_non_tensor_data(micro_batch, key=KEY, default=None)
        if spec is None:
            return super().forward_step(micro_batch, loss_function, forward_only)
        if self.use_ulysses_sp or self.pad_to_length:
            raise UsageError("a replay needs whole sequences: ulysses_sequence_parallel_size=1, pad_to_length=False.")
        trajectory_by_sample = trajectories(micro_batch)
        records = [None if trajectory is None else trajectory.record for trajectory in trajectory_by_sample]
        perturbation = registry.create(**spec)
        embedding = self.module.get_input_embeddings()
        scope = ReplayScope(embedding, perturbation=perturbation, device=torch.device(get_device_id()))
        # The mask cuts the record of a response that was cut to verl's response length.
        mask = build_attention_mask_from_nested(micro_batch["input_ids"])
        if tu.get_non_tensor_data(micro_batch, key=CORRECT_MASK, default=False):
            self._mask_correction = MaskCorrection(_masks(trajectory_by_sample), mask)
        with scope(records, mask) as stats:
            if perturbation.has_density:
                advantages = None if forward_only else _advantages(micro_batch)
                self._densities = Densities(scope, float(micro_batch["temperature"]), advantages)
            try:
                loss, output = super().forward_step(micro_batch, self._scored(loss_function), forward_only)
                if self._densities is not None and self._densities.is_untaken:
                    raise RuntimeError(f"the density of {perturbation.name!r} reached no policy loss.")
            finally:
                self._densities = None
                self._mask_correction = None
        if not forward_only:
            output["metrics"][f"{KEY}/replayed"] = float(stats.count())
            output["metrics"][f"{KEY}/shift_sum"] = float(stats.shift_sum())
            output["model_output"].pop(TOKEN_LOG_PROBS)
        return loss, output

    def prepare_model_outputs(
        self, output: CausalLMOutput, output_args: object, micro_batch: TensorDict, **kwargs: object
    ) -> dict[str, Tensor]:
        """As verl's, and with the tokens' own log-probabilities as :data:`TOKEN_LOG_PROBS`.

        With a mask correction, log-probabilities are over the tokens that sampling left. With a density, ``log_probs``
        has those of the actions at perturbed positions (:class:`Densities`).
        """
        result = super().prepare_model_outputs(output, output_args, micro_batch, **kwargs)
        if tu.get_non_tensor_data(micro_batch, key=KEY, default=None) is None:
            return result
        token_log_probs = result["log_probs"]
        if self._mask_correction is None and self._densities is None:
            result[TOKEN_LOG_PROBS] = token_log_probs.detach()
            return result
        # A copy, since verl's cross entropy may write its gradient over the logits that it was given; in float32,
        # since verl's autocast leaves them in bfloat16, where log Σ exp has steps of 0.06.
        logits = require(output.logits, "the logits of the forward").float() / float(micro_batch["temperature"])
        values = token_log_probs.values()
        offsets = token_log_probs.offsets()
        is_packed = logits.shape[:2] == (1, len(values))
        inside = torch.ones_like(values[None], dtype=torch.bool) if is_packed else _inside(offsets)
        # The row of a token chose the next one. The last row of a sample gets another sample's token as its label,
        # which nothing reads.
        next_tokens = micro_batch["input_ids"].values().roll(-1)
        labels = next_tokens.new_zeros(inside.shape).masked_scatter(inside, next_tokens)
        rows = values.new_zeros(inside.shape).masked_scatter(inside, values)
        if self._mask_correction is not None:
            rows = self._mask_correction.override(logits, labels, rows)
        result[TOKEN_LOG_PROBS] = torch.nested.nested_tensor_from_jagged(rows[inside].detach(), offsets)
        if self._densities is not None:
            # A density may look embeddings up. FSDP2 has taken a tied matrix apart by now; backward does so again.
            sharded = isinstance(self.module, FSDPModule)
            if sharded:
                self.module.unshard()
            rows = self._densities.override(logits, labels, rows)
            if sharded and not torch.is_grad_enabled():
                self.module.reshard()
        result["log_probs"] = torch.nested.nested_tensor_from_jagged(rows[inside], offsets)
        return result

    def _scored(self, loss_function: Loss | None) -> Loss | None:
        """The loss, with the part of a density that only counts in the policy loss."""
        densities = self._densities
        if loss_function is None or densities is None:
            return loss_function

        def loss(
            model_output: dict[str, NestedTensor], data: TensorDict, dp_group: object = None
        ) -> tuple[Tensor, dict[str, object]]:
            nested = model_output["log_probs"]
            offsets = nested.offsets()
            inside = _inside(offsets)
            padded = nested.values().new_zeros(inside.shape).masked_scatter(inside, nested.values())
            # verl has a token's log-probability one entry before the token, and `Densities` has it at the token.
            by_token = torch.nn.functional.pad(padded[:, :-1], (1, 0))
            scored_by_token = densities.for_policy_loss(by_token)
            values = torch.nn.functional.pad(scored_by_token[:, 1:], (0, 1))[inside]
            scored_output = {**model_output, "log_probs": torch.nested.nested_tensor_from_jagged(values, offsets)}
            return loss_function(model_output=scored_output, data=data, dp_group=dp_group)

        return loss


def _inside(offsets: Tensor) -> Tensor:
    """(B, T), True where a row of a right-padded batch has a token."""
    lengths = offsets.diff()
    return torch.arange(int(lengths.max()), device=offsets.device) < lengths.unsqueeze(1)


def _advantages(micro_batch: TensorDict) -> Tensor:
    """Advantages at the position of their token, (B, T), 0 in the prompt."""
    offsets = micro_batch["input_ids"].offsets()
    advantages = torch.zeros(_inside(offsets).shape)
    lengths = offsets.diff().tolist()
    for row, (end, of_response) in enumerate(zip(lengths, micro_batch["advantages"].unbind())):
        advantages[row, end - len(of_response) : end] = of_response.float().cpu()
    return advantages


class ReplayingCPUEngine(ReplayingEngine):
    """The engine without an accelerator. verl 0.9.1 registers its own for CUDA and NPU only."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        # A reference model is offloaded by verl: from the CPU to the CPU, through pinned memory, which needs a GPU.
        config = self.engine_config
        self.engine_config = dataclasses.replace(config, forward_only=False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config = config


EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cuda", "nvidia")(ReplayingEngine)
EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cpu")(ReplayingCPUEngine)


class ReplayingTrainingWorker(TrainingWorker):
    """verl's worker of one model; without an accelerator its process group is gloo's."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        if get_device_name() == "cpu" and not torch.distributed.is_initialized():
            # verl 0.9.1 asks for "cpu:gloo,cpu:gloo", which torch refuses. Address and rank are in the environment.
            torch.distributed.init_process_group("gloo", init_method=os.environ.get("DIST_INIT_METHOD"))
        super().__init__(*args, **kwargs)


class PerturbedWorker(ActorRolloutRefWorker):
    """verl's worker. In its process this module is imported, and with it the engine registered."""

    actor_worker_cls = ReplayingTrainingWorker
    ref_worker_cls = ReplayingTrainingWorker
