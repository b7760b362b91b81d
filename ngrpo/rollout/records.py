# SPDX-License-Identifier: Apache-2.0
"""Picking up the records of finished requests from an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ngrpo.rollout.request_names import external_id
from ngrpo.rollout.sampling_mask import SamplingMask
from ngrpo.rollout.settings import LENGTHS
from perturbations import registry
from perturbations.replay import ReplayRecord

if TYPE_CHECKING:
    from vllm import LLM

    from perturbations.neighbors import Drift

_MISSING = (
    "this engine has no perturbation: build it with additional_config={'perturbation': {'name': 'neighbor'}} in an"
    " environment where ngrpo is installed (pip install ngrpo), so that vLLM finds its plugin; VLLM_PLUGINS, if set,"
    " must name ngrpo_perturbation."
)


def take_records(llm: LLM, request_ids: Sequence[str] | None = None) -> dict[str, ReplayRecord]:
    """Hands over the records of finished requests; each is handed over once.

    Args:
        llm: a ``vllm.LLM`` with a perturbation.
        request_ids: ``RequestOutput.request_id`` of the requests wanted; None for all that have finished.

    Returns:
        ``request_id`` to record. With ``SamplingParams(n=…)`` above 1 the key of sample i is ``"{i}_{request_id}"``,
        as vLLM itself numbers them.

    Raises:
        RuntimeError: where the engine has no perturbation installed.
    """
    return {name: record for name, (record, _) in take_trajectories(llm, request_ids).items()}


def take_trajectories(llm: LLM, request_ids: Sequence[str] | None = None) -> dict[str, tuple[ReplayRecord, np.ndarray]]:
    """As :func:`take_records`, with log π of each generated token at temperature, before top-k, top-p and min-p.

    In an engine that records sampling masks it is log π among the tokens that these left.

    Returns:
        Key to record and (generated,) float32.
    """
    front = llm.llm_engine.output_processor
    unfinished = list(front.request_states)
    wanted = None if request_ids is None else list(request_ids)
    return of_answers(front, _ask(llm, "take", wanted, unfinished))


def of_answers(front: object, taken: Mapping[str, Sequence[bytes]]) -> dict[str, tuple[ReplayRecord, np.ndarray]]:
    """Records and log-probabilities that end where their answers do.

    Args:
        front: the engine's ``output_processor``, which knows how long an answer is; a worker may have computed more.
        taken: internal request id to what a worker sent.

    Returns:
        Key, as of :func:`take_records`, to record and (generated,) float32.
    """
    lengths = vars(front).get(LENGTHS, {})
    return {external_id(name): parse(pair, lengths.pop(name, None)) for name, pair in taken.items()}


def of_all_workers(answers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the workers of an engine handed over: tensor-parallel ranks all the same, data-parallel ones their own."""
    return {name: parts for taken in answers for name, parts in taken.items()}


def parse(pair: Sequence[bytes], generated: int | None = None) -> tuple[ReplayRecord, np.ndarray]:
    """The record and log-probabilities of one trajectory, from what a worker sent.

    Args:
        pair: both as bytes.
        generated: tokens of the answer, where the worker may have computed more; None for all of them.
    """
    record, log_probs = ReplayRecord.from_bytes(pair[0]), np.frombuffer(pair[1], dtype=np.float32)
    if generated is None:
        return record, log_probs
    return record.truncate(record.prompt_tokens + generated), log_probs[:generated]


def sampling_mask(taken: Sequence[bytes]) -> SamplingMask | None:
    """Which tokens sampling left in one trajectory, from what a worker sent; None where that was not recorded."""
    return SamplingMask.from_bytes(taken[2]) if taken[2] else None


def drop_records(llm: LLM, request_ids: Sequence[str]) -> None:
    """Forgets the records of aborted requests, by ``RequestOutput.request_id``."""
    _ask(llm, "drop", list(request_ids))


def set_perturbation(llm: LLM, name: str, **options: object) -> None:
    """Gives a running engine another perturbation, between requests: to compare perturbations without loading twice.

    Args:
        llm: a ``vllm.LLM`` built with a perturbation.
        name: as in :func:`perturbations.create`; rate 0 is allowed here and draws as the engine does.
        options: as in :func:`perturbations.create`.

    Raises:
        ValueError: for a bad spec.
        RuntimeError: where the engine has no perturbation installed.
    """
    _ask(llm, "replace", registry.create(name, **options).spec())


def model_runner(llm: LLM) -> str:
    """Which of vLLM's model runners an engine has, perturbed or not: ``V1`` or ``V2``."""
    return llm.llm_engine.collective_rpc("perturbation_runner")[0]


def neighbor_drift(llm: LLM) -> Drift | None:
    """How many neighbor sets the latest weight sync of an engine changed.

    Args:
        llm: a ``vllm.LLM`` with a perturbation.

    Returns:
        Counts over tokens that were used as anchors; None before the first sync, and for perturbations without
        neighbors.

    Raises:
        RuntimeError: where the engine has no perturbation installed.
    """
    from perturbations.neighbors import Drift

    counts = _ask(llm, "drift")
    return None if counts is None else Drift(*counts)


def _ask(llm: LLM, what: str, *args: object) -> Any:
    """The first worker's answer, once every worker is known to have a perturbation."""
    try:
        fingerprints = llm.llm_engine.collective_rpc("perturbation_fingerprint")
    except Exception as error:
        # What vLLM raises where workers lack a method depends on the process that they are in; it names the method.
        if "perturbation_fingerprint" not in str(error):
            raise
        fingerprints = [""]
    check_installed(fingerprints)
    return llm.llm_engine.collective_rpc(f"perturbation_{what}", args=args)[0]


def check_installed(fingerprints: Sequence[str], expected: str | None = None) -> None:
    """Raises ``RuntimeError`` unless every worker of an engine runs the same, expected perturbation.

    Args:
        fingerprints: one per worker, empty where a worker has none.
        expected: the spec's fingerprint, or None for any.
    """
    for rank, seen in enumerate(fingerprints):
        if not seen:
            raise RuntimeError(f"vLLM worker {rank} runs unperturbed: {_MISSING}")
        if expected is not None and seen != expected:
            raise RuntimeError(
                f"vLLM worker {rank} runs another perturbation than this run asked for: {seen} instead of {expected}."
                " Are all nodes on the same version of ngrpo?"
            )
