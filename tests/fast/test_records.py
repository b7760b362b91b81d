# SPDX-License-Identifier: Apache-2.0
"""Where a record that has been picked up ends: with the answer, although the worker had computed more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ngrpo.rollout import async_scheduling, take_trajectories
from ngrpo.rollout.records import check_installed, confirm
from perturbations import FinishedTrajectory, ReplayRecord

PROMPT, COMPUTED = 3, 6


def sent() -> dict[str, bytes]:
    """What a worker hands over: three prompt tokens, six computed ones, two of them perturbed, one past the answer."""
    positions = np.array([4, 8], np.int32)
    ids, weights = np.array([[5, 7], [5, 9]], np.int32), np.full((2, 2), 0.5, np.float32)
    record = ReplayRecord(11, PROMPT, PROMPT + COMPUTED, positions, ids, weights, None, np.ones(2, bool))
    return FinishedTrajectory(record, np.arange(COMPUTED, dtype=np.float32)).pack()


class FrontEnd:
    """vLLM's OutputProcessor, as far as a pick-up reads it."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}
        vars(self)[async_scheduling.LENGTHS] = {}

    def finish(self, name: str, tokens: int) -> None:
        state = SimpleNamespace(request_id=name, detokenizer=SimpleNamespace(num_output_tokens=lambda: tokens))
        async_scheduling.keep_length(lambda front, state: None)(self, state)


def engine(front: FrontEnd, taken: dict[str, Any]) -> Any:
    def collective_rpc(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return ["{}"] if method == "perturbation_fingerprint" else [taken]

    return SimpleNamespace(llm_engine=SimpleNamespace(output_processor=front, collective_rpc=collective_rpc))


def test_a_record_is_cut_to_the_answer() -> None:
    front = FrontEnd()
    front.finish("0-aaaaaaaa", 5)
    front.finish("1-bbbbbbbb", COMPUTED)
    found = take_trajectories(engine(front, {"0-aaaaaaaa": sent(), "1-bbbbbbbb": sent(), "2-cccccccc": sent()}))
    record, log_probs = found["0"]
    assert (record.prompt_tokens, record.num_tokens, record.positions.tolist()) == (PROMPT, PROMPT + 5, [4])
    assert log_probs.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    for name in ("1", "2"):  # one that computed no more, and one whose end nobody told of
        record, log_probs = found[name]
        assert (record.num_tokens, record.positions.tolist(), len(log_probs)) == (PROMPT + COMPUTED, [4, 8], COMPUTED)


def test_lengths_that_nobody_asks_for_do_not_pile_up(monkeypatch: Any) -> None:
    monkeypatch.setattr(async_scheduling, "_LENGTHS_KEPT", 3)
    front = FrontEnd()
    for i in range(10):
        front.finish(f"{i}-aaaaaaaa", i)
    (lengths,) = (value for value in vars(front).values() if value)
    assert lengths == {f"{i}-aaaaaaaa": i for i in (7, 8, 9)}
    take_trajectories(engine(front, {"9-aaaaaaaa": sent()}))
    assert "9-aaaaaaaa" not in lengths


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("'Worker' object has no attribute 'perturbation_fingerprint'", "worker 0 runs unperturbed"),
        ("EngineCore encountered an issue: out of memory", "^EngineCore encountered an issue: out of memory$"),
    ],
)
def test_another_failure_is_not_told_as_an_engine_without_a_perturbation(message: str, said: str) -> None:
    async def collective_rpc(method: str) -> list[Any]:
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match=said):
        asyncio.run(confirm(SimpleNamespace(collective_rpc=collective_rpc), "any"))


def test_one_node_without_the_plugin_is_named() -> None:
    check_installed(["right", "right"], "right")
    with pytest.raises(RuntimeError, match=r"worker 1 runs unperturbed: .*pip install ngrpo"):
        check_installed(["right", ""], "right")
    with pytest.raises(RuntimeError, match=r"worker 1 runs another perturbation .* on the same version"):
        check_installed(["right", "other"], "right")
