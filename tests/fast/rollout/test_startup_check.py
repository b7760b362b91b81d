# SPDX-License-Identifier: Apache-2.0
"""When the rollout actor has its engine check itself, and that requests wait for it."""

import asyncio
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from ngrpo.rollout import startup_check
from ngrpo.trainers.common.sample_records import EngineCheck
from ngrpo.trainers.openrlhf.rollout_actor import rollout_actor
from tests.support.run import run_with


class Engine:
    asked = 0

    async def collective_rpc(self, method: str) -> list[Any]:
        assert method == "perturbation_check"
        self.asked += 1
        await asyncio.sleep(0)
        return [None]


@pytest.mark.parametrize(("strict", "asked"), [(False, 1), (True, 2)])
def test_once_at_the_start_and_if_strict_after_each_sync(strict: bool, asked: int) -> None:
    engine = Engine()

    async def use() -> None:
        check = EngineCheck(engine, perturbed=True, again=strict)
        await asyncio.gather(*(check.passed() for _ in range(3)))
        assert engine.asked == 1
        check.weights_synced()
        assert engine.asked == 1, "not at the end of the sync, when a KV cache may be asleep"
        await asyncio.gather(*(check.passed() for _ in range(3)))

    asyncio.run(use())
    assert engine.asked == asked


class PauseState(IntEnum):
    """vLLM's, of a scheduler."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


class Scheduler:
    """As vLLM's, which counts no requests that a pause holds back."""

    def __init__(self, waiting: int = 0, state: PauseState = PauseState.UNPAUSED, finished: int = 0) -> None:
        self.waiting = waiting
        self.pause_state = state
        self.finished = finished

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def has_unfinished_requests(self) -> bool:
        return self.pause_state == PauseState.UNPAUSED and self.waiting > 0

    def has_finished_requests(self) -> bool:
        return self.finished > 0

    def has_requests(self) -> bool:
        return self.has_unfinished_requests() or self.has_finished_requests()


def core_with(scheduler: Scheduler, sleeping: bool = False) -> Any:
    """An engine's core as far as it is asked whether it can be checked; ``states``: its scheduler's in each check."""
    model = SimpleNamespace(dtype="torch.float32", max_model_len=32, architectures=None, get_vocab_size=lambda: 32)
    config = SimpleNamespace(
        additional_config={"perturbation": {"name": "neighbor"}},
        model_config=model,
        load_config=SimpleNamespace(load_format="auto"),
    )
    core = SimpleNamespace(vllm_config=config, scheduler=scheduler, states=[])
    core.model_executor = SimpleNamespace(is_sleeping=sleeping)
    core.collective_rpc = lambda method: [core.states.append(scheduler.pause_state)]
    return core


@pytest.fixture(autouse=True)
def _no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_check, "check_texts", lambda *_, **__: None)


@pytest.mark.parametrize("state", PauseState)
def test_a_paused_engine_is_checked_and_paused_again(state: PauseState) -> None:
    """As in a run that is strict and reproducible: it pauses its engines until a batch is complete.

    An engine in its caller's process takes no step after its last request, so its workers hear of no finished ones.
    """
    core = core_with(Scheduler(state=state, finished=2))
    startup_check.check_when_idle(core)
    assert core.states == [PauseState.UNPAUSED]
    assert core.scheduler.pause_state == state
    startup_check.check_before_request(core)
    assert len(core.states) == 1, "nothing is due any more"


@pytest.mark.parametrize("state", PauseState)
def test_requests_that_a_pause_holds_back_make_an_engine_busy(state: PauseState) -> None:
    core = core_with(Scheduler(waiting=1, state=state))
    startup_check.check_when_idle(core)
    startup_check.check_before_request(core)
    assert not core.states
    assert core.scheduler.pause_state == state
    core.scheduler.waiting = 0
    startup_check.check_before_request(core)
    assert len(core.states) == 1


def test_the_pause_of_a_sleeping_engine_is_not_lifted() -> None:
    core = core_with(Scheduler(state=PauseState.PAUSED_NEW), sleeping=True)
    startup_check.check_when_idle(core)
    startup_check.check_before_request(core)
    assert not core.states
    core.model_executor.is_sleeping = False
    startup_check.check_before_request(core)
    assert len(core.states) == 1


@pytest.mark.parametrize(("waiting", "steps_first"), [(0, True), (1, False)])
def test_workers_hear_of_finished_requests_before_a_perturbation_is_replaced(waiting: int, steps_first: bool) -> None:
    """The step that tells them would lose the tokens of requests that are running."""
    core = core_with(Scheduler(waiting=waiting, finished=2))
    calls = []

    def step() -> tuple[dict[int, Any], bool]:
        core.scheduler.finished = 0
        calls.append("step")
        return {}, False

    core.step_fn = step
    core.post_step = lambda executed: None
    core.batch_queue = None
    startup_check.with_calls_of_core(lambda self, method: calls.append(method))(core, "perturbation_replace")
    assert calls == [*(["step"] if steps_first else []), "perturbation_replace"]


def test_no_request_runs_after_a_proof_that_failed() -> None:
    """The engine lives on in its caller's process, and has to refuse the next request as it did the first one."""
    failures = iter(["first", "second"])

    def collective_rpc(method: str) -> list[Any]:
        raise RuntimeError(next(failures))

    core = core_with(Scheduler())
    core.collective_rpc = collective_rpc
    start = startup_check.checked_core(startup_check.perturbed_core(lambda self, config: None))
    with pytest.raises(RuntimeError, match="first"):
        start(core, core.vllm_config)
    with pytest.raises(RuntimeError, match="second"):
        startup_check.check_before_request(core)


def test_a_core_whose_start_was_not_patched_is_checked_before_its_loop() -> None:
    core = core_with(Scheduler())
    startup_check.perturbed_core(lambda self, config: None)(core, core.vllm_config)
    checks_before_loop: list[int] = []
    loop = startup_check.checked_loop(lambda self: checks_before_loop.append(len(self.states)))
    loop(core)
    loop(core)
    assert checks_before_loop == [1, 1], "it is checked once"

    deferred = core_with(Scheduler())
    deferred.vllm_config.additional_config["deferred_check"] = True
    startup_check.perturbed_core(lambda self, config: None)(deferred, deferred.vllm_config)
    loop(deferred)
    assert checks_before_loop[-1] == 0
    startup_check.check_before_request(deferred)
    assert len(deferred.states) == 1


@pytest.mark.parametrize(("strict", "asked"), [(False, 1), (True, 2)])
def test_an_actors_engine_has_its_own_seed_and_check(strict: bool, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    calls: list[str] = []

    async def noted(method: str, *_: Any, **__: Any) -> list[None]:
        calls.append(method)
        return [None]

    async def confirmed(*_: Any) -> None:
        return None

    class Plain:
        executor = None
        llm = SimpleNamespace(collective_rpc=noted)

        async def __init__(self, **kwargs: Any) -> None:
            seeds.append(kwargs["additional_config"]["perturbation"]["seed"])

    monkeypatch.setattr("ngrpo.rollout.records.confirm", confirmed)
    run_with(monkeypatch, perturbation={"name": "gumbel"}, strict=strict)
    for seed in (1, 2, 1):
        actor = object.__new__(rollout_actor(Plain))
        asyncio.run(actor.__init__(seed=seed))
    assert seeds[0] == seeds[2] != seeds[1]
    calls.clear()
    actor.engine_check.weights_synced()
    asyncio.run(actor.engine_check.passed())
    assert calls.count("perturbation_check") == asked - 1


def test_the_first_perturbation_of_a_plain_engine_is_checked() -> None:
    core = core_with(Scheduler())
    core.batch_queue = None
    replace = startup_check.with_calls_of_core(lambda self, method: None)
    startup_check.check_before_request(core)
    assert not core.states
    replace(core, "perturbation_replace")
    core.vllm_config.load_config.load_format = "dummy"
    startup_check.check_before_request(core)
    assert not core.states, "random weights tell nothing"
    core.vllm_config.load_config.load_format = "auto"
    startup_check.check_before_request(core)
    assert core.states
    core.states.clear()
    replace(core, "perturbation_replace")
    startup_check.check_before_request(core)
    assert not core.states, "it has passed"
