# SPDX-License-Identifier: Apache-2.0
"""An engine's front end: records of finished requests are picked up, and those of aborted ones are dropped."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ngrpo.machine.upstream.patch import around
from ngrpo.machine.upstream.types import LLM, AsyncLLM, LLMEngine
from ngrpo.rollout.requests import external_id
from ngrpo.rollout.settings import read
from perturbations import FinishedTrajectory, ReplayRecord, registry
from perturbations.neighbors import Drift

# Where vLLM's front end keeps the number of tokens of each finished response, until its record is taken.
LENGTHS = "perturbation_lengths"
# Responses of an engine without a reader of records, about 150 MB of them; no batch is this large.
_LENGTHS_KEPT = 1 << 20


def take_records(llm: LLM, request_ids: Sequence[str] | None = None) -> dict[str, ReplayRecord]:
    """Hands over the records of finished requests, each once; RuntimeError for an engine without a perturbation.

    ``request_ids``: ``RequestOutput.request_id`` of those wanted, which are the keys of the result; None for all. With
    ``SamplingParams(n=…)`` above 1 the key of sample i is ``"{i}_{request_id}"``, as vLLM itself numbers them.
    """
    return {name: trajectory.record for name, trajectory in take_finished(llm, request_ids).items()}


def take_trajectories(llm: LLM, request_ids: Sequence[str] | None = None) -> dict[str, tuple[ReplayRecord, np.ndarray]]:
    """As :func:`take_records`, each record with log π of its generated tokens, (generated,) float32.

    At temperature, before top-k, top-p and min-p; in an engine that records sampling masks, among the tokens left.
    """
    taken = take_finished(llm, request_ids)
    return {name: (trajectory.record, trajectory.log_probs) for name, trajectory in taken.items()}


def take_finished(llm: LLM, request_ids: Sequence[str] | None = None) -> dict[str, FinishedTrajectory]:
    """As :func:`take_records`, with everything that the engine records."""
    front = llm.llm_engine.output_processor
    names = None if request_ids is None else list(request_ids)
    return of_answers(front, _ask(llm, "take", names, list(front.request_states)))


def of_answers(front: object, taken: Mapping[str, Mapping[str, bytes]]) -> dict[str, FinishedTrajectory]:
    """Trajectories that end where their responses do, by key as of :func:`take_records`.

    ``front``: the engine's ``output_processor``; ``taken``: internal request id to what a worker sent.
    """
    return {
        external_id(name): cut_to_response(FinishedTrajectory.unpack(parts), taken_length(front, name))
        for name, parts in taken.items()
    }


def of_all_workers(answers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the workers of an engine handed over: tensor-parallel ranks all the same, data-parallel ones their own."""
    return {name: parts for answer in answers for name, parts in answer.items()}


def drop_records(llm: LLM, request_ids: Sequence[str]) -> None:
    """Forgets the records of aborted requests, by ``RequestOutput.request_id``."""
    _ask(llm, "drop", list(request_ids))


def set_perturbation(llm: LLM, name: str, **options: object) -> None:
    """Gives a running engine another perturbation between requests; RuntimeError where it was built without one.

    ``name`` and ``options``: as of :func:`perturbations.create`; rate 0 is allowed here and draws as the engine does.
    """
    _ask(llm, "replace", registry.create(name, **options).spec())


def model_runner(llm: LLM) -> str:
    """Which of vLLM's model runners an engine has, perturbed or not: ``V1`` or ``V2``."""
    return llm.llm_engine.collective_rpc("perturbation_runner")[0]


def neighbor_drift(llm: LLM) -> Drift | None:
    """How many neighbor sets of an engine's anchors the latest weight sync changed.

    None before the first sync, and for perturbations without neighbors; RuntimeError without a perturbation.
    """
    counts = _ask(llm, "drift")
    return None if counts is None else Drift(*counts)


def _ask(llm: LLM, what: str, *args: object) -> Any:
    """The first worker's result, once every worker is known to have a perturbation."""
    with _workers_without_hooks():
        check_installed(llm.llm_engine.collective_rpc("perturbation_fingerprint"))
    return llm.llm_engine.collective_rpc(f"perturbation_{what}", args=args)[0]


async def confirm(engine: AsyncLLM, expected: str) -> None:
    """Raises RuntimeError unless every worker of an asynchronous engine has the expected `settings.fingerprint`."""
    with _workers_without_hooks():
        check_installed(await engine.collective_rpc("perturbation_fingerprint"), expected)


@contextmanager
def _workers_without_hooks() -> Iterator[None]:
    """Reports workers without the method as unperturbed: vLLM's error names the method."""
    try:
        yield
    except Exception as error:
        if "perturbation_fingerprint" not in str(error):
            raise
        check_installed([""])


def check_installed(fingerprints: Sequence[str], expected: str | None = None) -> None:
    """Raises RuntimeError unless every worker of an engine runs the same, expected perturbation; None for any."""
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
    if read(self.vllm_config.additional_config) is not None:
        vars(self.output_processor)[LENGTHS] = {}


@around
def keep_length(original: Callable[..., None], self: Any, req_state: Any, *args: object, **kwargs: object) -> None:
    """vLLM's ``OutputProcessor._finish_request``, which keeps how many tokens a response has, until it is taken."""
    original(self, req_state, *args, **kwargs)
    lengths = vars(self).get(LENGTHS)
    if lengths is not None and req_state.detokenizer is not None:
        lengths[req_state.request_id] = req_state.detokenizer.num_output_tokens()
        if len(lengths) > _LENGTHS_KEPT:
            del lengths[next(iter(lengths))]


def taken_length(front: Any, name: str) -> int | None:
    """How many tokens a finished response has, by its internal id; the engine's ``output_processor`` tells it once."""
    return vars(front).get(LENGTHS, {}).pop(name, None)


def cut_to_response(trajectory: FinishedTrajectory, generated: int | None) -> FinishedTrajectory:
    """A turn's trajectory without the tokens beyond the response's ``generated`` ones; None for all."""
    return trajectory if generated is None else trajectory.truncate(trajectory.record.prompt_tokens + generated)


# --- aborted requests ----------------------------------------------------------------------------------------------


@around
def drop_aborted(
    original: Callable[..., None], self: LLMEngine, request_ids: Iterable[str], *args: object, **kwargs: object
) -> None:
    """A caller's abort. (Requests that end at a stop string are aborted further inside; they keep their records.)"""
    names = list(request_ids)
    dropped = _with_internal_ids(self, names)
    original(self, names, *args, **kwargs)
    if dropped and read(self.vllm_config.additional_config) is not None:
        self.collective_rpc("perturbation_drop", args=(dropped,))


@around
async def drop_aborted_async(
    original: Callable[..., Any], self: AsyncLLM, request_id: str | Iterable[str], *args: object, **kwargs: object
) -> None:
    names = [request_id] if isinstance(request_id, str) else list(request_id)
    dropped = _with_internal_ids(self, names)
    await original(self, names, *args, **kwargs)
    if dropped and read(self.vllm_config.additional_config) is not None:
        await self.collective_rpc("perturbation_drop", args=(dropped,))


def _with_internal_ids(engine: LLMEngine | AsyncLLM, names: list[str]) -> list[str]:
    """Those unfinished, and their internal ids, which an abort forgets: a parent's samples have its name.

    Whoever leaves `generate()` at a response's last output aborts one that has finished: its record stays.
    """
    front = engine.output_processor
    ids, internal = front.external_req_ids, (front.request_states, front.parent_requests)
    names = [name for name in names if name in ids or any(name in known for known in internal)]
    return [*names, *(each for name in names for each in ids.get(name, ()))]
