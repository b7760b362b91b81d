# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner (``v1/worker/gpu/model_runner.py``, 0.26 to 0.31): where the perturber takes part in a step.

As in :mod:`ngrpo.rollout.runner_v1`, bound methods are wrapped: ``add_requests`` (requests come and go),
``prepare_inputs`` (the inputs are laid out) and the sampler's ``sample`` (tokens are drawn). V2 keeps a request's
parameters in persistent slots, on the device and on the host, so that nothing here waits for the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ngrpo.rollout.runner_v1 import with_requests
from perturbations.errors import UsageError

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from ngrpo.rollout.attach import AttachedPerturbation


def attach(runner: GPUModelRunner, perturbation: AttachedPerturbation) -> None:
    """Wraps the methods of a runner. Which perturber acts is looked up at each step, since it can be replaced.

    Raises:
        UsageError: for a model that brings a sampler of its own.
    """
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    if type(runner.sampler) is not Sampler:
        raise UsageError(
            f"perturbation: {type(runner.get_model()).__name__} brings a sampler of its own"
            f" ({type(runner.sampler).__name__}), which draws tokens unseen. Set VLLM_USE_V2_MODEL_RUNNER=0, for all"
            " that is compared, or use another model."
        )
    # A request that was preempted comes back as a new one; the store still has it, and its records with it.
    runner.add_requests = with_requests(runner.add_requests, perturbation)
    runner.prepare_inputs = _prepare_inputs(runner.prepare_inputs, perturbation)
    runner.sampler.sample = _sample(runner.sampler, perturbation)


def _prepare_inputs(original: Callable[..., Any], perturbation: AttachedPerturbation) -> Callable[..., Any]:
    def prepare_inputs(*args: object, **kwargs: object) -> Any:
        batch = original(*args, **kwargs)
        # Exact and not merely V2's upper bound, since speculative decoding is refused.
        starts, counts = batch.num_computed_tokens_np.astype(np.int64), batch.num_scheduled_tokens.astype(np.int64)
        perturbation.perturber.begin(batch.req_ids, starts, counts, starts + counts < batch.prefill_len_np)
        return batch

    return prepare_inputs


def _sample(sampler: Sampler, perturbation: AttachedPerturbation) -> Callable[..., Any]:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    original, states = sampler.sample, sampler.sampling_states
    min_p = states.apply_min_p
    # Releases differ in what else they pass along.
    names = list(inspect.signature(original).parameters)
    slots_at, slots_np_at = names.index("expanded_idx_mapping") - 1, names.index("idx_mapping_np") - 1
    # vLLM 0.26 applies the parameters in place and in the logits' own dtype, later releases in a float32 copy.
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
            # vLLM filters in place where it can.
            drawable = apply_top_k_top_p(drawable.clone() if drawable is scaled else drawable, top_k, top_p)
        return perturber.finish(scaled, temperature, drawable, greedy), drawable

    states.apply_min_p = apply_min_p
    return sample
