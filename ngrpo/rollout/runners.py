# SPDX-License-Identifier: Apache-2.0
"""vLLM's two model runners, V1 and V2 (0.26 to 0.33): where the perturber takes part in a step.

Three methods of a runner are wrapped: the one that takes in which requests come and go, the one that lays out the
inputs of a forward, and the one that draws the tokens. In V2 ``sample``, which computes the logits, and the sampler's
``apply_min_p`` are wrapped too. The wrappers look up the perturber at each step, since it can be replaced.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ngrpo.machine.upstream.sampling import logit_changes
from ngrpo.machine.upstream.types import (
    InputBatchV2,
    RunnerV1,
    RunnerV2,
    SamplerV1,
    SamplerV2,
    SamplingMetadata,
    SchedulerOutput,
)
from ngrpo.rollout.attach import AttachedPerturbation
from ngrpo.rollout.output_layer import OutputLayer
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.sample_tokens import GREEDY_BELOW
from perturbations.errors import UsageError, require

_NO_LOGPROBS = -1  # vLLM's NO_LOGPROBS, of a request that wants none
_TO_THE_END = np.iinfo(np.int64).max  # more tokens than any request draws


def _with_requests(original: Callable[..., Any], perturbation: AttachedPerturbation) -> Callable[..., Any]:
    """Wraps the method by which a runner learns which requests come and go."""

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
        batch = runner.input_batch
        count = batch.num_reqs
        perturbation.perturber.begin(
            names=batch.req_ids[:count],
            starts=batch.num_computed_tokens_cpu[:count].astype(np.int64),
            counts=np.diff(runner.query_start_loc.np[: count + 1]).astype(np.int64),
            discard=runner.discard_request_mask.np[:count],
        )
        return preprocess(*args, **kwargs)

    runner._update_states = _with_requests(runner._update_states, perturbation)
    runner._preprocess = _preprocess
    runner.sampler.sample = _sample_v1(runner.sampler, perturbation)


class _SamplingV1(NamedTuple):
    """How the rows of a batch are sampled; vLLM makes new metadata only when the batch changes.

    Attributes:
        metadata: vLLM's.
        temperature: (B,) float32, 1 for greedy rows.
        filters: whether top-k, top-p or min-p may exclude tokens of a row.
    """

    metadata: SamplingMetadata
    temperature: Tensor
    filters: bool

    @classmethod
    def of(cls, metadata: SamplingMetadata, logits: Tensor) -> "_SamplingV1":
        """Reads vLLM's metadata of a batch with logits (B, V)."""
        temperature = metadata.temperature
        if temperature is None:
            temperature = logits.new_ones(len(logits), dtype=torch.float32)
        # vLLM's min-p processor is always in the list. To apply it where no request has a min-p would cost a copy of
        # the logits; a processor that does not count such requests is taken to filter.
        processors = metadata.logitsprocs.argmax_invariant
        filters = (
            metadata.top_k is not None
            or metadata.top_p is not None
            or any(getattr(processor, "min_p_count", 1) > 0 for processor in processors)
        )
        return cls(
            metadata=metadata,
            temperature=torch.where(temperature < GREEDY_BELOW, 1.0, temperature),
            filters=filters and not metadata.all_greedy,
        )


def _sample_v1(sampler: SamplerV1, perturbation: AttachedPerturbation) -> Callable[..., Any]:
    """The perturber in the place of ``Sampler.sample``."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    original: Callable[..., Any] = sampler.sample
    sampling: _SamplingV1 | None = None

    def sample(logits: Tensor, metadata: SamplingMetadata, logprobs_mode_override: str | None = None) -> Any:
        nonlocal sampling
        perturber = perturbation.perturber
        if not perturber.busy:  # a dummy run, by which vLLM warms up and measures its memory
            perturber.rehearse(logits)
            return original(logits, metadata, logprobs_mode_override)
        if sampling is None or sampling.metadata is not metadata:
            sampling = _SamplingV1.of(metadata, logits)
        greedy = None
        if not metadata.all_random:
            greedy = logits.argmax(dim=-1)
            if not metadata.all_greedy:
                greedy = torch.where(require(metadata.temperature, "temperature") < GREEDY_BELOW, greedy, -1)
        temperature = sampling.temperature
        scaled = logits if metadata.all_greedy else logits.div_(temperature.unsqueeze(-1))
        factor = None if metadata.all_greedy else perturber.temperature_factor(scaled, temperature, greedy)
        if factor is not None:
            scaled = scaled.div_(factor.unsqueeze(-1))
            temperature = temperature * factor
        drawable = None
        if sampling.filters:
            drawable = scaled.clone()  # perturbations see the logits before the filters
            for processor in metadata.logitsprocs.argmax_invariant:
                drawable = processor.apply(drawable)
            drawable = apply_top_k_top_p(drawable, metadata.top_k, metadata.top_p)
        tokens = perturber.finish(scaled, temperature, drawable, greedy)
        # vLLM's sampler returns the tokens, and what its two modes of processed log-probabilities report.
        if metadata.max_num_logprobs is None and not getattr(metadata, "logprob_token_ids", None):
            return tokens, None
        mode = logprobs_mode_override or sampler.logprobs_mode
        processed = scaled if drawable is None else drawable
        if mode == "processed_logits":
            return tokens, processed
        if mode == "processed_logprobs":
            return tokens, sampler.compute_logprobs(processed)
        return tokens, None

    return sample


# --- V2: v1/worker/gpu/model_runner.py --------------------------------------------------------------------------


def attach_v2(runner: RunnerV2, perturbation: AttachedPerturbation) -> None:
    """Wraps the methods of a V2 runner; ``UsageError`` for a model that brings a sampler of its own."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    if type(runner.sampler) is not Sampler:
        model = type(runner.get_model()).__name__
        sampler = type(runner.sampler).__name__
        raise UsageError(
            f"perturbation: {model} brings a sampler of its own ({sampler}), which draws tokens unseen."
            f" Set VLLM_USE_V2_MODEL_RUNNER=0, in all runs that are compared, or use another model."
        )
    original_inputs: Callable[..., Any] = runner.prepare_inputs

    def prepare_inputs(*args: object, **kwargs: object) -> Any:
        batch = original_inputs(*args, **kwargs)
        # V2 calls this number an upper bound. It is exact here, since speculative decoding is refused.
        starts = batch.num_computed_tokens_np.astype(np.int64)
        counts = batch.num_scheduled_tokens.astype(np.int64)
        perturbation.perturber.begin(
            names=batch.req_ids,
            starts=starts,
            counts=counts,
            discard=starts + counts < batch.prefill_len_np,
        )
        return batch

    # V2 adds a preempted request again as a new one; the store still has it, and its records with it.
    runner.add_requests = _with_requests(runner.add_requests, perturbation)
    runner.prepare_inputs = prepare_inputs
    runner.sampler.sample = _sample_v2(runner.sampler, perturbation)
    if perturbation.output_layer is not None:
        logits_changed_until = np.full(runner.max_num_reqs, _TO_THE_END)
        runner.sampler.add_request = _noting_changed_logits(runner.sampler.add_request, logits_changed_until)
        runner.sample = _leave_logits_to_graph(runner, perturbation, perturbation.output_layer, logits_changed_until)


def _noting_changed_logits(original: Callable[..., Any], logits_changed_until: np.ndarray) -> Callable[..., Any]:
    """Wraps ``Sampler.add_request``: notes for how many tokens of a request its parameters change the logits.

    OpenRLHF asks for ``min_tokens=1`` in every rollout. vLLM then takes the request's logits for changed as long as it
    runs, although they are so for its first token alone.

    Args:
        original: called first.
        logits_changed_until: by slot, how many tokens a request draws from changed logits before its parameters change
            them no more, (S,) int64; ``_TO_THE_END`` where something other than ``min_tokens`` changes them.
    """
    signature = inspect.signature(original)

    def add_request(*arguments: object, **named: object) -> None:
        original(*arguments, **named)
        values: dict[str, Any] = signature.bind(*arguments, **named).arguments
        params = values["sampling_params"]
        is_filtered = params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0
        is_changed = is_filtered or params.temperature != 1.0 or logit_changes(params).keys() - {"min_tokens"}
        logits_changed_until[values["req_idx"]] = _TO_THE_END if is_changed else params.min_tokens

    return add_request


class _LogitsV2(NamedTuple):
    """Whether a batch draws from the logits as the model computes them.

    Attributes:
        perturber: that samples.
        composition: of the perturber's batch.
        are_unchanged: whether all rows draw from the model's own logits.
        may_become_unchanged: whether a row has tokens to draw after which its parameters change its logits no more.
    """

    perturber: RolloutPerturber
    composition: int
    are_unchanged: bool
    may_become_unchanged: bool

    @classmethod
    def of(
        cls, sampler: SamplerV2, slots_np: np.ndarray, logits_changed_until: np.ndarray, perturber: RolloutPerturber
    ) -> "_LogitsV2":
        """Reads the slots of a batch's rows, (B,). ``logits_changed_until``: as in :func:`_noting_changed_logits`."""
        changed_until = logits_changed_until[slots_np]
        is_past_changes = changed_until <= perturber.drawn_tokens
        may_become_unchanged = (changed_until < _TO_THE_END) & ~is_past_changes
        return cls(
            perturber=perturber,
            composition=perturber.composition,
            are_unchanged=draws_from_unchanged_logits(sampler, slots_np, is_past_changes),
            may_become_unchanged=bool(may_become_unchanged.any()),
        )

    def holds_for(self, perturber: RolloutPerturber) -> bool:
        """Whether the perturber's next step draws from such logits too."""
        same_batch = self.perturber is perturber and self.composition == perturber.composition
        return same_batch and not self.may_become_unchanged


def _leave_logits_to_graph(
    runner: RunnerV2, perturbation: AttachedPerturbation, output_layer: OutputLayer, logits_changed_until: np.ndarray
) -> Callable[..., Any]:
    """Wraps ``GPUModelRunner.sample``, which computes the logits and samples.

    The step's graph computes the logits where nothing reads or changes them before the draw. ``logits_changed_until``
    is as in :func:`_noting_changed_logits`.
    """
    original: Callable[..., Any] = runner.sample
    sampler = require(runner.sampler, "the sampler of the last pipeline rank")
    logits: _LogitsV2 | None = None

    def sample(hidden_states: Tensor, input_batch: InputBatchV2, grammar_output: object) -> Any:
        nonlocal logits
        perturber = perturbation.perturber
        if grammar_output is not None or not perturber.computes_logits(input_batch.num_reqs):
            return original(hidden_states, input_batch, grammar_output)
        # Cached until the batch changes, unless a row still has changed tokens to draw.
        if logits is None or not logits.holds_for(perturber):
            logits = _LogitsV2.of(sampler, input_batch.idx_mapping_np, logits_changed_until, perturber)
        if not logits.are_unchanged:
            return original(hidden_states, input_batch, grammar_output)
        with output_layer.left_to_graph():
            return original(hidden_states, input_batch, grammar_output)

    return sample


def draws_from_unchanged_logits(sampler: SamplerV2, slots_np: np.ndarray, is_past_changes: np.ndarray) -> bool:
    """Whether the tokens of these slots, (B,), are drawn from the logits as the model computes them.

    They are not where a request is greedy, where its sampling parameters change or filter the logits (a temperature
    other than 1 too), and where vLLM reports log-probabilities, NaNs or the tokens that sampling left.

    ``is_past_changes``: the rows whose parameters change no logits any more, since ``min_tokens`` are drawn, (B,) bool.
    """
    if not hasattr(sampler, "needs_logits_processing"):  # vLLM 0.26 applies all parameters in each step
        return False
    if sampler.compute_nans or getattr(sampler, "return_sampling_mask", False):
        return False
    states = sampler.sampling_states
    reports_log_probs = (
        states.max_num_logprobs(slots_np) != _NO_LOGPROBS
        or sampler.logprob_token_ids_state.max_num_token_ids(slots_np) > 0
    )
    is_processed = sampler.needs_logits_processing[slots_np] & ~is_past_changes
    return not (reports_log_probs or states.any_greedy(slots_np) or bool(is_processed.any()))


class _SamplingV2(NamedTuple):
    """How the rows of a batch are sampled.

    V2 keeps the parameters of a request in a persistent slot, on the device and on the host. They are read once for
    each composition of the batch, and without waiting for the device.

    Attributes:
        perturber: that samples.
        composition: of the perturber's batch.
        temperature: (B,) float32, 1 for greedy rows.
        is_greedy: the greedy rows, (B,) bool; None where there are none.
        min_p: whether any row has a min-p.
        top_k: (B,); None where no row has one.
        top_p: (B,); None where no row has one.
    """

    perturber: RolloutPerturber
    composition: int
    temperature: Tensor
    is_greedy: Tensor | None
    min_p: bool
    top_k: Tensor | None
    top_p: Tensor | None

    @classmethod
    def of(cls, sampler: SamplerV2, slots: Tensor, slots_np: np.ndarray, perturber: RolloutPerturber) -> "_SamplingV2":
        """Reads the slots of a batch's rows, (B,), which vLLM has on the device and on the host."""
        states = sampler.sampling_states
        temperature = states.temperature.gpu[slots]
        is_greedy = None
        if states.any_greedy(slots_np):
            is_greedy = temperature == 0.0
            temperature = torch.where(is_greedy, 1.0, temperature)
        # Read as temperature and min-p are: the parameters of get_top_k_top_p differ between releases.
        has_top_k = bool((states.top_k.np[slots_np] != states.vocab_size).any())
        has_top_p = bool((states.top_p.np[slots_np] != 1.0).any())
        return cls(
            perturber=perturber,
            composition=perturber.composition,
            temperature=temperature,
            is_greedy=is_greedy,
            min_p=bool(states.min_p.np[slots_np].any()),
            top_k=states.top_k.gpu[slots] if has_top_k else None,
            top_p=states.top_p.gpu[slots] if has_top_p else None,
        )


def _sample_v2(sampler: SamplerV2, perturbation: AttachedPerturbation) -> Callable[..., Any]:
    """The perturber in the place of ``Sampler.sample``."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    original = sampler.sample
    states = sampler.sampling_states
    original_min_p = states.apply_min_p
    # Releases differ in the arguments after the logits, which are handed on as they are.
    names_after_logits = list(inspect.signature(original).parameters)[1:]
    place_of_slots = names_after_logits.index("expanded_idx_mapping")
    place_of_slots_np = names_after_logits.index("idx_mapping_np")
    # vLLM 0.26 applies the parameters in place and in the dtype of the logits, later releases in a float32 copy.
    applies_in_copy = hasattr(sampler, "needs_logits_processing")
    sampling: _SamplingV2 | None = None

    def apply_min_p(logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping_np: np.ndarray) -> None:
        """Does nothing in a step of requests, where ``sample`` filters by min-p after perturbation and schedule."""
        if not perturbation.perturber.busy:
            original_min_p(logits, expanded_idx_mapping, idx_mapping_np)

    def sample(logits: Tensor, *arguments: Any, **kwargs: object) -> tuple[Tensor, Tensor]:
        nonlocal sampling
        perturber = perturbation.perturber
        if not perturber.busy:  # a dummy run, by which vLLM warms up and measures its memory
            perturber.rehearse(logits)
            return original(logits, *arguments, **kwargs)
        slots = arguments[place_of_slots]
        slots_np = arguments[place_of_slots_np]
        # A request keeps its parameters and its slot while it runs.
        if sampling is None or sampling.perturber is not perturber or sampling.composition != perturber.composition:
            sampling = _SamplingV2.of(sampler, slots, slots_np, perturber)
        output_layer = perturbation.output_layer
        output_hidden = None if output_layer is None else output_layer.take()
        if output_hidden is not None:
            return perturber.finish(logits, sampling.temperature, None, None, output_hidden), logits
        # Where no request changes its logits, these are the model's own, in its dtype: the draw reads them as they are.
        changeable = logits if applies_in_copy else logits.float()
        scaled = sampler.apply_sampling_params(changeable, *arguments, skip_top_k_top_p=True)
        greedy = None if sampling.is_greedy is None else torch.where(sampling.is_greedy, scaled.argmax(dim=-1), -1)
        temperature = sampling.temperature
        factor = perturber.temperature_factor(scaled, temperature, greedy)
        if factor is not None:
            scaled = scaled / factor.unsqueeze(-1)
            temperature = temperature * factor
        drawable = None
        if sampling.min_p:
            drawable = scaled.clone()
            original_min_p(drawable, slots, slots_np)
        if sampling.top_k is not None or sampling.top_p is not None:
            if drawable is None:  # vLLM filters in place where it can
                drawable = scaled.clone()
            drawable = apply_top_k_top_p(drawable, sampling.top_k, sampling.top_p)
        return perturber.finish(scaled, temperature, drawable, greedy), scaled if drawable is None else drawable

    states.apply_min_p = apply_min_p
    return sample
