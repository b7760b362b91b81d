# SPDX-License-Identifier: Apache-2.0
"""An engine's front end: records of finished requests are picked up, and those of aborted ones are dropped.

The functions that take an ``original`` are rows of `ngrpo.patches`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ngrpo.machine.upstream.patch import around
from ngrpo.machine.upstream.types import LLM, AsyncLLM, LLMEngine
from ngrpo.rollout import settings
from ngrpo.rollout.requests import external_id
from perturbations import FinishedTrajectory, ReplayRecord, registry
from perturbations.neighbors import Drift

# The attribute in which vLLM's front end keeps how many tokens each finished response has, until its record is taken.
LENGTHS = "perturbation_lengths"
# Where nobody takes the records, the oldest lengths are dropped from this many on, about 150 MB. No batch is as large.
_LENGTHS_KEPT = 1 << 20


def take_records(llm: LLM, request_ids: Sequence[str] | None = None) -> dict[str, ReplayRecord]:
    """Hands over the records of finished requests, each once; RuntimeError for an engine without a perturbation.

    ``request_ids``: ``RequestOutput.request_id`` of the requests whose records are wanted, which are the keys of the
    result; None for all. With ``SamplingParams(n=…)`` above 1 the key of sample i is ``"{i}_{request_id}"``, as vLLM
    itself numbers them.
    """
    return {name: trajectory.record for name, trajectory in take_finished(llm, request_ids).items()}


def take_trajectories(llm: LLM, request_ids: Sequence[str] | None = None) -> dict[str, tuple[ReplayRecord, np.ndarray]]:
    """As :func:`take_records`, each record with log π of its generated tokens, (generated,) float32.

    log π is at the temperature of the draw and before top-k, top-p and min-p. In an engine that records sampling masks
    it is over the tokens left, unless ``full_log_probs`` is set.
    """
    trajectories = take_finished(llm, request_ids)
    return {name: (trajectory.record, trajectory.log_probs) for name, trajectory in trajectories.items()}


def take_finished(llm: LLM, request_ids: Sequence[str] | None = None) -> dict[str, FinishedTrajectory]:
    """As :func:`take_records`, with everything that the engine records."""
    output_processor = llm.llm_engine.output_processor
    names = None if request_ids is None else list(request_ids)
    unfinished = list(output_processor.request_states)
    return trajectories_of(output_processor, _call(llm, "take", names, unfinished))


def trajectories_of(
    output_processor: object, packed: Mapping[str, Mapping[str, bytes]]
) -> dict[str, FinishedTrajectory]:
    """Trajectories that end where their responses do, by key as in :func:`take_records`.

    ``output_processor``: of the engine's front end; ``packed``: internal request id to what a worker handed over.
    """
    trajectories: dict[str, FinishedTrajectory] = {}
    for name, parts in packed.items():
        trajectory = FinishedTrajectory.unpack(parts)
        trajectories[external_id(name)] = cut_to_response(trajectory, taken_length(output_processor, name))
    return trajectories


def of_all_workers(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the workers of an engine handed over: tensor-parallel ranks all the same, data-parallel ones their own."""
    merged: dict[str, Any] = {}
    for packed in results:
        merged.update(packed)
    return merged


def drop_records(llm: LLM, request_ids: Sequence[str]) -> None:
    """Forgets the records of aborted requests, by ``RequestOutput.request_id``."""
    _call(llm, "drop", list(request_ids))


def set_perturbation(llm: LLM, name: str, **options: object) -> None:
    """Gives a running engine another perturbation between requests; RuntimeError where it was built without one.

    ``name`` and ``options``: as in :func:`perturbations.create`. Rate 0 is allowed: nothing is perturbed then, and
    tokens are drawn from the perturbed engine's streams.
    """
    _call(llm, "replace", registry.create(name, **options).spec())


def model_runner(llm: LLM) -> str:
    """Which of vLLM's model runners an engine has, perturbed or not: ``V1`` or ``V2``."""
    return llm.llm_engine.collective_rpc("perturbation_runner")[0]


def neighbor_drift(llm: LLM) -> Drift | None:
    """How many neighbor sets of an engine's anchors the latest weight sync changed.

    None before the first sync, and for perturbations without neighbors; RuntimeError without a perturbation.
    """
    counts = _call(llm, "drift")
    return None if counts is None else Drift(*counts)


def _call(llm: LLM, procedure: str, *args: object) -> Any:
    """The first worker's result of a procedure of `plugin.with_procedures`; RuntimeError unless all workers perturb."""
    with _workers_without_hooks():
        check_installed(llm.llm_engine.collective_rpc("perturbation_fingerprint"))
    return llm.llm_engine.collective_rpc(f"perturbation_{procedure}", args=args)[0]


async def confirm(engine: AsyncLLM, expected: str) -> None:
    """Raises RuntimeError unless every worker of an asynchronous engine has the expected `settings.fingerprint`."""
    with _workers_without_hooks():
        check_installed(await engine.collective_rpc("perturbation_fingerprint"), expected)


@contextmanager
def _workers_without_hooks() -> Iterator[None]:
    """Reports workers without the method ``perturbation_fingerprint`` as unperturbed: vLLM's error names the method."""
    try:
        yield
    except Exception as error:
        # vLLM's error of a time-out names the method too.
        if "perturbation_fingerprint" not in str(error) or "timed out" in str(error):
            raise
        check_installed([""])


def check_installed(fingerprints: Sequence[str], expected: str | None = None) -> None:
    """Raises RuntimeError unless every worker of an engine perturbs, and has the fingerprint ``expected`` if given."""
    for rank, fingerprint in enumerate(fingerprints):
        if not fingerprint:
            raise RuntimeError(
                f"vLLM worker {rank} runs unperturbed: this engine has no perturbation, or has 'none'. Build it with"
                " additional_config={'perturbation': {'name': 'neighbor'}} where ngrpo is installed (pip install"
                " ngrpo), so that vLLM finds its plugin; VLLM_PLUGINS, if set, must name ngrpo_perturbation."
            )
        if expected is not None and fingerprint != expected:
            raise RuntimeError(
                f"vLLM worker {rank} runs another perturbation than this run: {fingerprint} instead"
                f" of {expected}. Are all nodes on the same version of ngrpo?"
            )


# --- responses that end before what was computed does ----------------------------------------------------------------


@around
def with_lengths(original: Callable[..., None], self: LLMEngine | AsyncLLM, *args: object, **kwargs: object) -> None:
    """An engine's ``__init__``: where it perturbs, its front end keeps the lengths of its responses."""
    original(self, *args, **kwargs)
    if settings.read(self.vllm_config.additional_config) is not None:
        vars(self.output_processor)[LENGTHS] = {}


@around
def keep_length(original: Callable[..., None], self: Any, req_state: Any, *args: object, **kwargs: object) -> None:
    """vLLM's ``OutputProcessor._finish_request``, which also keeps how many tokens a finished response has."""
    original(self, req_state, *args, **kwargs)
    lengths = vars(self).get(LENGTHS)
    if lengths is not None and req_state.detokenizer is not None:
        lengths[req_state.request_id] = req_state.detokenizer.num_output_tokens()
        if len(lengths) > _LENGTHS_KEPT:
            oldest = next(iter(lengths))
            del lengths[oldest]


def taken_length(output_processor: Any, name: str) -> int | None:
    """How many tokens a finished response has, by its internal id; the engine's front end forgets it with that."""
    return vars(output_processor).get(LENGTHS, {}).pop(name, None)


def cut_to_response(trajectory: FinishedTrajectory, generated: int | None) -> FinishedTrajectory:
    """A turn's trajectory without the tokens that a worker computed after the response's end.

    ``generated``: tokens of the response; None for all that the trajectory has.
    """
    if generated is None:
        return trajectory
    return trajectory.truncate(trajectory.record.prompt_tokens + generated)


# --- aborted requests ----------------------------------------------------------------------------------------------


@around
def drop_aborted(
    original: Callable[..., None], self: LLMEngine, request_ids: Iterable[str], *args: object, **kwargs: object
) -> None:
    """vLLM's ``LLMEngine.abort_request``, by which a caller aborts requests: their records are dropped.

    Requests that end at a stop string are aborted further inside, and keep their records.
    """
    names = list(request_ids)
    dropped = _with_internal_ids(self, names)
    original(self, names, *args, **kwargs)
    if dropped and settings.read(self.vllm_config.additional_config) is not None:
        self.collective_rpc("perturbation_drop", args=(dropped,))


@around
async def drop_aborted_async(
    original: Callable[..., Any], self: AsyncLLM, request_id: str | Iterable[str], *args: object, **kwargs: object
) -> None:
    """vLLM's ``AsyncLLM.abort``, as :func:`drop_aborted`."""
    names = [request_id] if isinstance(request_id, str) else list(request_id)
    dropped = _with_internal_ids(self, names)
    await original(self, names, *args, **kwargs)
    if dropped and settings.read(self.vllm_config.additional_config) is not None:
        await self.collective_rpc("perturbation_drop", args=(dropped,))


def _with_internal_ids(engine: LLMEngine | AsyncLLM, names: list[str]) -> list[str]:
    """The unfinished ones of these requests, and their internal ids, which the front end forgets with an abort.

    A caller that leaves `generate()` at a response's last output aborts a request that has finished: its record stays.
    """
    front_end = engine.output_processor
    external_ids = front_end.external_req_ids
    unfinished: list[str] = []
    for name in names:
        # The samples of one request have the name of their parent.
        is_internal = name in front_end.request_states or name in front_end.parent_requests
        if is_internal or name in external_ids:
            unfinished.append(name)
    for name in list(unfinished):
        unfinished.extend(external_ids.get(name, ()))
    return unfinished
