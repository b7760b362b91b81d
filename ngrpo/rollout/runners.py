# SPDX-License-Identifier: Apache-2.0
"""vLLM's two model runners, V1 and V2 (0.26 to 0.31): where the perturber takes part in a step.

Three bound methods of one runner are wrapped: requests come and go, the inputs are laid out, tokens are drawn. V2 keeps
a request's parameters in persistent slots, on the device and on the host, so that nothing here waits for the device.
Which perturber acts is looked up at each step, since it can be replaced.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ngrpo.machine.upstream.types import RunnerV1, RunnerV2, SamplerV1, SamplerV2, SamplingMetadata, SchedulerOutput
from ngrpo.rollout.attach import AttachedPerturbation
from ngrpo.rollout.sample_tokens import GREEDY_BELOW
from perturbations.errors import UsageError, require


def _with_requests(original: Callable[..., Any], perturbation: AttachedPerturbation) -> Callable[..., Any]:
    """The method by which a runner learns which requests come and go."""

    def update(scheduler_output: SchedulerOutput) -> Any:
        result = original(scheduler_output)
        perturbation.requests.update(scheduler_output)
        return result

    return update


# --- V1: v1/worker/gpu_model_runner.py --------------------------------------------------------------------------


def attach_v1(runner: RunnerV1, perturbation: AttachedPerturbation) -> None:
    """Wraps the methods of a V1 runner."""
    preprocess: Callable[..., Any] = runner._preprocess

    def _preprocess(*args: object, **kwargs: object) -> Any:
        batch, count = runner.input_batch, runner.input_batch.num_reqs
        perturbation.perturber.begin(
            batch.req_ids[:count],
            batch.num_computed_tokens_cpu[:count].astype(np.int64),
            np.diff(runner.query_start_loc.np[: count + 1]).astype(np.int64),
            runner.discard_request_mask.np[:count],
        )
        return preprocess(*args, **kwargs)

    runner._update_states = _with_requests(runner._update_states, perturbation)
    runner._preprocess = _preprocess
    runner.sampler.sample = _sample_v1(runner.sampler, perturbation)


def _sample_v1(sampler: SamplerV1, perturbation: AttachedPerturbation) -> Callable[..., Any]:
    original: Callable[..., Any] = sampler.sample
    # vLLM makes new metadata only when the batch changes, and so are temperatures gathered only then.
    seen: tuple[SamplingMetadata | None, Tensor] = (None, torch.empty(0))

    def sample(logits: Tensor, metadata: SamplingMetadata, logprobs_mode_override: str | None = None) -> Any:
        nonlocal seen
        perturber = perturbation.perturber
        if not perturber.busy:  # vLLM's own dummy runs
            perturber.rehearse(logits)
            return original(logits, metadata, logprobs_mode_override)
        greedy, asked = None, metadata.temperature
        if not metadata.all_random:
            greedy = logits.argmax(dim=-1)
            if not metadata.all_greedy:
                greedy = torch.where(require(asked, "temperature") < GREEDY_BELOW, greedy, -1)
        if seen[0] is not metadata:
            ones = logits.new_ones(len(logits))
            seen = metadata, ones if asked is None else torch.where(asked < GREEDY_BELOW, 1.0, asked)
        temperature = seen[1]
        scaled = logits if metadata.all_greedy else logits.div_(temperature.unsqueeze(-1))
        factor = None if metadata.all_greedy else perturber.temperature_factor(scaled, temperature, greedy)
        if factor is not None:
            scaled, temperature = scaled.div_(factor.unsqueeze(-1)), temperature * factor
        drawable, processors = scaled, metadata.logitsprocs.argmax_invariant
        filters = metadata.top_k is not None or metadata.top_p is not None
        # vLLM's own min-p where no request of the batch asks for it would cost a copy of the logits.
        filters = filters or any(getattr(processor, "min_p_count", 1) > 0 for processor in processors)
        if filters and not metadata.all_greedy:  # the scaled logits stay as they are: perturbations see those
            from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

            drawable = scaled.clone()
            for processor in processors:
                drawable = processor.apply(drawable)
            drawable = apply_top_k_top_p(drawable, metadata.top_k, metadata.top_p)
        tokens = perturber.finish(scaled, temperature, drawable, greedy)
        # vLLM's sampler returns tokens and what its two processed log-probability modes need.
        mode = logprobs_mode_override or sampler.logprobs_mode
        if metadata.max_num_logprobs is None and not getattr(metadata, "logprob_token_ids", None):
            return tokens, None
        if mode == "processed_logits":
            return tokens, drawable
        return tokens, sampler.compute_logprobs(drawable) if mode == "processed_logprobs" else None

    return sample


# --- V2: v1/worker/gpu/model_runner.py --------------------------------------------------------------------------


def attach_v2(runner: RunnerV2, perturbation: AttachedPerturbation) -> None:
    """Wraps the methods of a V2 runner; ``UsageError`` for a model that brings a sampler of its own."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    if type(runner.sampler) is not Sampler:
        model, own = type(runner.get_model()).__name__, type(runner.sampler).__name__
        fix = "Set VLLM_USE_V2_MODEL_RUNNER=0, in all runs that are compared, or use another model"
        raise UsageError(
            f"perturbation: {model} brings a sampler of its own ({own}), which draws tokens unseen. {fix}."
        )
    inputs: Callable[..., Any] = runner.prepare_inputs

    def prepare_inputs(*args: object, **kwargs: object) -> Any:
        batch = inputs(*args, **kwargs)
        # Exact and not merely V2's upper bound, since speculative decoding is refused.
        starts, counts = batch.num_computed_tokens_np.astype(np.int64), batch.num_scheduled_tokens.astype(np.int64)
        perturbation.perturber.begin(batch.req_ids, starts, counts, starts + counts < batch.prefill_len_np)
        return batch

    # A request that was preempted comes back as a new one; the store still has it, and its records with it.
    runner.add_requests = _with_requests(runner.add_requests, perturbation)
    runner.prepare_inputs = prepare_inputs
    runner.sampler.sample = _sample_v2(runner.sampler, perturbation)


def _sample_v2(sampler: SamplerV2, perturbation: AttachedPerturbation) -> Callable[..., Any]:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    original, states = sampler.sample, sampler.sampling_states
    min_p = states.apply_min_p
    # Releases differ in what else they pass along.
    names = list(inspect.signature(original).parameters)
    slots_at, slots_np_at = names.index("expanded_idx_mapping") - 1, names.index("idx_mapping_np") - 1
    # vLLM 0.26 applies the parameters in-place and in the logits' own dtype, later releases in a float32 copy.
    copies = hasattr(sampler, "needs_logits_processing")

    def apply_min_p(logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping_np: np.ndarray) -> None:
        """Left to ``sample``: perturbations and sampling schedules see the logits before that."""
        if not perturbation.perturber.busy:
            min_p(logits, expanded_idx_mapping, idx_mapping_np)

    def sample(logits: Tensor, *rows: Any, **kwargs: object) -> tuple[Tensor, Tensor]:
        perturber = perturbation.perturber
        if not perturber.busy:  # vLLM's own dummy runs
            perturber.rehearse(logits)
            return original(logits, *rows, **kwargs)
        slots, slots_np = rows[slots_at], rows[slots_np_at]
        given_logits = logits if copies else logits.float()
        # Where no request changes them, these are the model's own, in its dtype: the draw reads them as they are.
        scaled = sampler.apply_sampling_params(given_logits, *rows, skip_top_k_top_p=True)
        slot_temperature = states.temperature.gpu[slots]
        temperature, greedy = slot_temperature, None
        if states.any_greedy(slots_np):
            cold = slot_temperature == 0.0
            temperature, greedy = torch.where(cold, 1.0, slot_temperature), torch.where(cold, scaled.argmax(dim=-1), -1)
        factor = perturber.temperature_factor(scaled, temperature, greedy)
        if factor is not None:
            scaled, temperature = scaled / factor.unsqueeze(-1), temperature * factor
        drawable = scaled
        if states.min_p.np[slots_np].any():
            drawable = scaled.clone()
            min_p(drawable, slots, slots_np)
        top_k, top_p = states.get_top_k_top_p(slots, slots_np)
        if top_k is not None or top_p is not None:
            # vLLM filters in-place where it can.
            drawable = apply_top_k_top_p(drawable.clone() if drawable is scaled else drawable, top_k, top_p)
        return perturber.finish(scaled, temperature, drawable, greedy), drawable

    states.apply_min_p = apply_min_p
    return sample
