# SPDX-License-Identifier: Apache-2.0
"""vLLM's V1 model runner (``v1/worker/gpu_model_runner.py``, 0.26 to 0.31): where the perturber takes part in a step.

Three bound methods of one runner are wrapped: ``_update_states`` (requests come and go), ``_preprocess`` (the inputs
are laid out) and the sampler's ``sample`` (tokens are drawn).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ngrpo.rollout.sample_tokens import GREEDY_BELOW
from perturbations.errors import require

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from ngrpo.rollout.attach import AttachedPerturbation


def attach(runner: GPUModelRunner, perturbation: AttachedPerturbation) -> None:
    """Wraps the methods of a runner. Which perturber acts is looked up at each step, since it can be replaced."""
    runner._update_states = with_requests(runner._update_states, perturbation)
    runner._preprocess = _preprocess(runner._preprocess, runner, perturbation)
    runner.sampler.sample = _sample(runner.sampler.sample, runner.sampler, perturbation)


def with_requests(original: Callable[..., Any], perturbation: AttachedPerturbation) -> Callable[..., Any]:
    """The method by which a runner, this one or V2's, learns which requests come and go."""

    def update(scheduler_output: SchedulerOutput) -> Any:
        result = original(scheduler_output)
        perturbation.requests.update(scheduler_output)
        return result

    return update


def _preprocess(
    original: Callable[..., Any], runner: GPUModelRunner, perturbation: AttachedPerturbation
) -> Callable[..., Any]:
    def preprocess(scheduler_output: SchedulerOutput, *args: object, **kwargs: object) -> Any:
        batch, count = runner.input_batch, runner.input_batch.num_reqs
        perturbation.perturber.begin(
            batch.req_ids[:count],
            batch.num_computed_tokens_cpu[:count].astype(np.int64),
            np.diff(runner.query_start_loc.np[: count + 1]).astype(np.int64),
            runner.discard_request_mask.np[:count],
        )
        return original(scheduler_output, *args, **kwargs)

    return preprocess


def _sample(original: Callable[..., Any], sampler: Sampler, perturbation: AttachedPerturbation) -> Callable[..., Any]:
    # vLLM makes new metadata only when the batch changes, and so are temperatures gathered only then.
    seen: tuple[SamplingMetadata | None, Tensor] = (None, torch.empty(0))

    def sample(logits: Tensor, metadata: SamplingMetadata, logprobs_mode_override: str | None = None) -> Any:
        nonlocal seen
        perturber = perturbation.perturber
        if not perturber.busy:  # vLLM's own dummy runs
            perturber.rehearse(logits)
            return original(logits, metadata, logprobs_mode_override)
        greedy = None
        if not metadata.all_random:
            greedy = logits.argmax(dim=-1)
            if not metadata.all_greedy:
                greedy = torch.where(require(metadata.temperature, "temperature") < GREEDY_BELOW, greedy, -1)
        if seen[0] is not metadata:
            seen = (metadata, _temperature(metadata, logits))
        temperature = seen[1]
        scaled = logits if metadata.all_greedy else logits.div_(temperature.unsqueeze(-1))
        factor = None if metadata.all_greedy else perturber.temperature_factor(scaled, temperature, greedy)
        if factor is not None:
            scaled, temperature = scaled.div_(factor.unsqueeze(-1)), temperature * factor
        drawable = _filtered(scaled, metadata)
        tokens = perturber.finish(scaled, temperature, drawable, greedy)
        return tokens, _processed(sampler, metadata, logprobs_mode_override, drawable)

    return sample


def _temperature(metadata: SamplingMetadata, logits: Tensor) -> Tensor:
    """(B,) float32, 1 for greedy rows."""
    temperature = metadata.temperature
    return (
        logits.new_ones(len(logits))
        if temperature is None
        else torch.where(temperature < GREEDY_BELOW, 1.0, temperature)
    )


def _filtered(scaled: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Logits after min-p, top-k and top-p. The scaled logits themselves stay as they are: perturbations see those."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    processors = metadata.logitsprocs.argmax_invariant
    unfiltered = metadata.top_k is None and metadata.top_p is None
    if metadata.all_greedy or (unfiltered and not any(_in_use(p) for p in processors)):
        return scaled
    drawable = scaled.clone()
    for processor in processors:
        drawable = processor.apply(drawable)
    return apply_top_k_top_p(drawable, metadata.top_k, metadata.top_p)


def _in_use(processor: object) -> bool:
    """False for vLLM's own min-p where no request of the batch asks for it, which saves a copy of the logits."""
    return getattr(processor, "min_p_count", 1) > 0


def _processed(sampler: Sampler, metadata: SamplingMetadata, override: str | None, drawable: Tensor) -> Tensor | None:
    """What vLLM's sampler returns beside the tokens, for its two processed log-probability modes."""
    mode = override or sampler.logprobs_mode
    if metadata.max_num_logprobs is None and not getattr(metadata, "logprob_token_ids", None):
        return None
    if mode == "processed_logits":
        return drawable
    return sampler.compute_logprobs(drawable) if mode == "processed_logprobs" else None
