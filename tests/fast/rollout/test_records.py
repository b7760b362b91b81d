# SPDX-License-Identifier: Apache-2.0
"""Records are picked up in batches, and end with their answers, although the worker had computed more."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ngrpo.rollout import records, take_trajectories
from ngrpo.rollout.records import check_installed
from ngrpo.trainers.common.sample_records import PickUps
from perturbations import FinishedTrajectory, ReplayRecord

PROMPT = 3
COMPUTED = 6


def handed_over() -> dict[str, bytes]:
    """Three prompt tokens, six computed ones, inputs 4 and 8 perturbed, of which 8 may be past the response."""
    record = ReplayRecord(
        seed=11,
        prompt_tokens=PROMPT,
        num_tokens=PROMPT + COMPUTED,
        positions=np.array([4, 8], np.int32),
        ids=np.array([[5, 7], [5, 9]], np.int32),
        weights=np.full((2, 2), 0.5, np.float32),
        sigma=None,
        agreed=np.ones(2, bool),
    )
    return FinishedTrajectory(record, np.arange(COMPUTED, dtype=np.float32)).pack()


class FrontEnd:
    """vLLM's OutputProcessor, as far as a pick-up reads it."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}
        vars(self)[records.LENGTHS] = {}

    def finish(self, name: str, tokens: int) -> None:
        state = SimpleNamespace(request_id=name, detokenizer=SimpleNamespace(num_output_tokens=lambda: tokens))
        records.keep_length(lambda front, state: None)(self, state)


def engine(front: FrontEnd, trajectories: dict[str, Any]) -> Any:
    """An engine of one worker, which hands over ``trajectories``."""

    def collective_rpc(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return ["{}"] if method == "perturbation_fingerprint" else [trajectories]

    return SimpleNamespace(llm_engine=SimpleNamespace(output_processor=front, collective_rpc=collective_rpc))


def test_a_record_is_cut_to_the_response() -> None:
    front = FrontEnd()
    front.finish("0-aaaaaaaa", 5)

    record, log_probs = take_trajectories(engine(front, {"0-aaaaaaaa": handed_over()}))["0"]

    assert record.prompt_tokens == PROMPT
    assert record.num_tokens == PROMPT + 5
    assert record.positions.tolist() == [4]
    assert log_probs.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_record_that_computed_no_more_than_the_response_is_complete() -> None:
    """Request 1 ended where its worker did; nobody told of the end of request 2."""
    front = FrontEnd()
    front.finish("1-bbbbbbbb", COMPUTED)
    trajectories = take_trajectories(engine(front, {"1-bbbbbbbb": handed_over(), "2-cccccccc": handed_over()}))
    for name in ("1", "2"):
        record, log_probs = trajectories[name]
        assert record.num_tokens == PROMPT + COMPUTED
        assert record.positions.tolist() == [4, 8]
        assert len(log_probs) == COMPUTED


def test_a_length_is_told_once_and_few_wait_for_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_LENGTHS_KEPT", 2)
    front = FrontEnd()
    for tokens, name in enumerate("abc", start=1):
        front.finish(name, tokens)
    assert [records.taken_length(front, name) for name in "abc"] == [None, 2, 3], "the oldest makes room"
    assert records.taken_length(front, "b") is None


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (AttributeError("no attribute 'perturbation_fingerprint'"), RuntimeError, "vLLM worker 0 runs unperturbed"),
        (TimeoutError("RPC call to perturbation_fingerprint timed out."), TimeoutError, "timed out"),
        (MemoryError("no room for the KV cache"), MemoryError, "no room"),
    ],
)
def test_only_a_worker_without_the_method_runs_unperturbed(
    error: Exception, kind: type[Exception], message: str
) -> None:
    def collective_rpc(method: str) -> Any:
        raise error

    llm = SimpleNamespace(llm_engine=SimpleNamespace(output_processor=FrontEnd(), collective_rpc=collective_rpc))
    with pytest.raises(kind, match=message):
        take_trajectories(llm)


def test_one_node_without_the_plugin_is_named() -> None:
    check_installed(["right", "right"], "right")
    with pytest.raises(RuntimeError, match=r"worker 1 runs unperturbed: .*pip install ngrpo"):
        check_installed(["right", ""], "right")
    with pytest.raises(RuntimeError, match=r"worker 1 runs another perturbation .* on the same version"):
        check_installed(["right", "other"], "right")


# --- in batches ---------------------------------------------------------------------------------------------


class Engine:
    """Answers a call after a while, as an engine does that is busy with a step; two ranks hold half of all each.

    Args:
        missing: the requests whose records are gone.
        fails: the number of calls that raise.
    """

    def __init__(self, missing: tuple[str, ...] = (), fails: int = 0) -> None:
        self.calls: list[list[str]] = []
        self.output_processor = FrontEnd()
        self._missing = missing
        self._fails = fails

    async def collective_rpc(self, method: str, args: Any) -> Any:
        names, end = args
        assert method == "perturbation_take"
        assert end is None
        self.calls.append(names)
        await asyncio.sleep(0.01)
        if len(self.calls) <= self._fails:
            raise ValueError("no such method")
        held = [(f"{name}-12345678", (name.encode(), b"", b"")) for name in names if name not in self._missing]
        return [dict(held[0::2]), dict(held[1::2])]


async def take_all(engine: Engine, names: list[str]) -> list[Any]:
    """The trajectories or errors of these requests, which all wait at once."""
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
        assert (await pick_ups.take("c"))[0] == b"c"
        assert len(engine.calls) == 3

    asyncio.run(run())


def test_one_record_that_is_gone_does_not_take_the_others_with_it() -> None:
    a, b, c = asyncio.run(take_all(Engine(missing=("b",)), ["a", "b", "c"]))
    assert a[0] == b"a"
    assert c[0] == b"c"
    assert isinstance(b, RuntimeError)
    assert "request b is gone" in str(b)


def test_an_error_reaches_all_that_waited_for_the_call() -> None:
    errors = asyncio.run(take_all(Engine(fails=1), ["a", "b"]))
    assert [type(error) for error in errors] == [ValueError, ValueError]


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


class AbortedEngine:
    """An engine with a front end that knows one request that runs, with two samples, and none that has finished."""

    def __init__(self) -> None:
        ids = {"runs": ["0_runs-a", "1_runs-a"]}
        self.output_processor = SimpleNamespace(external_req_ids=ids, request_states={}, parent_requests={})
        self.vllm_config = SimpleNamespace(additional_config={"perturbation": {"name": "neighbor"}})
        self.dropped: list[Any] = []

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> None:
        assert method == "perturbation_drop"
        self.dropped += args


def test_an_abort_drops_the_records_of_what_still_runs() -> None:
    """Whoever leaves `generate()` at a response's last output aborts a request that has finished."""
    engine = AbortedEngine()
    abort = records.drop_aborted(lambda engine, names: None)
    abort(engine, ["finished"])
    assert not engine.dropped
    abort(engine, ["finished", "runs"])
    assert engine.dropped == [["runs", "0_runs-a", "1_runs-a"]]


def test_an_asynchronous_engine_takes_one_name_or_several() -> None:
    async def original(engine: Any, names: list[str]) -> None:
        return None

    class Asynchronous(AbortedEngine):
        async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> None:  # type: ignore[override]
            super().collective_rpc(method, args)

    abort = records.drop_aborted_async(original)
    for names in ("runs", ["runs"]):
        engine = Asynchronous()
        asyncio.run(abort(engine, names))
        assert engine.dropped == [["runs", "0_runs-a", "1_runs-a"]]
