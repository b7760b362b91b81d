# SPDX-License-Identifier: Apache-2.0
"""Records are picked up from an engine in batches."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ngrpo.rollout.async_scheduling import LENGTHS, keep_length, taken_length
from ngrpo.trainers.common.engine_records import PickUps


class Engine:
    """Answers a call after a while, as an engine does that is busy with a step."""

    def __init__(self, missing: tuple[str, ...] = (), fails: int = 0) -> None:
        self.calls: list[list[str]] = []
        self.output_processor = SimpleNamespace(**{LENGTHS: {}})
        self._missing, self._fails = missing, fails

    async def collective_rpc(self, method: str, args: Any) -> Any:
        assert method == "perturbation_take" and args[1] is None
        self.calls.append(args[0])
        await asyncio.sleep(0.01)
        if len(self.calls) <= self._fails:
            raise ValueError("no such method")
        return [{f"{name}-12345678": (name.encode(), b"", b"") for name in args[0] if name not in self._missing}]


async def taken(engine: Engine, names: list[str]) -> list[Any]:
    pick_ups = PickUps(engine)
    return await asyncio.gather(*(pick_ups.take(name) for name in names), return_exceptions=True)


def test_what_is_asked_for_during_a_call_goes_with_the_next() -> None:
    async def run() -> None:
        engine = Engine()
        pick_ups = PickUps(engine)
        first = [asyncio.create_task(pick_ups.take(f"a{i}")) for i in range(3)]
        await asyncio.sleep(0.005)
        later = [asyncio.create_task(pick_ups.take(f"b{i}")) for i in range(100)]
        answers = await asyncio.gather(*first, *later)
        assert [answer[0].decode() for answer in answers] == engine.calls[0] + engine.calls[1]
        assert [len(call) for call in engine.calls] == [3, 100]
        assert (await pick_ups.take("c"))[0] == b"c" and len(engine.calls) == 3

    asyncio.run(run())


def test_the_lengths_of_answers_go_with_their_records() -> None:
    """vLLM's front end keeps them for callers that have no output at hand; one that has must leave none behind."""
    engine, names = Engine(), ["a", "b", "of another caller"]
    finish = keep_length(lambda front, state: None)
    for name in names:
        detokenizer = SimpleNamespace(num_output_tokens=lambda: 5)
        finish(engine.output_processor, SimpleNamespace(request_id=f"{name}-12345678", detokenizer=detokenizer))
    asyncio.run(taken(engine, names[:2]))
    assert [taken_length(engine.output_processor, f"{name}-12345678") for name in names] == [None, None, 5]


def test_one_record_that_is_gone_does_not_take_the_others_with_it() -> None:
    answers = asyncio.run(taken(Engine(missing=("b",)), ["a", "b", "c"]))
    assert answers[0][0] == b"a" and answers[2][0] == b"c"
    assert isinstance(answers[1], RuntimeError) and "request b is gone" in str(answers[1])


def test_each_data_parallel_rank_hands_over_its_own() -> None:
    class Ranks(Engine):
        async def collective_rpc(self, method: str, args: Any) -> Any:
            (all_of_them,) = await super().collective_rpc(method, args)
            return [dict(list(all_of_them.items())[rank::2]) for rank in range(2)]

    assert [answer[0] for answer in asyncio.run(taken(Ranks(), ["a", "b", "c"]))] == [b"a", b"b", b"c"]


def test_an_error_reaches_all_that_waited_for_the_call() -> None:
    answers = asyncio.run(taken(Engine(fails=1), ["a", "b"]))
    assert [type(answer) for answer in answers] == [ValueError, ValueError]


def test_a_cancelled_trajectory_does_not_hold_up_the_others() -> None:
    async def run() -> None:
        pick_ups = PickUps(Engine())
        tasks = [asyncio.create_task(pick_ups.take(name)) for name in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        assert [(await tasks[i])[0] for i in (0, 2)] == [b"a", b"c"]
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]

    asyncio.run(run())
