# SPDX-License-Identifier: Apache-2.0
"""When the rollout actor has its engine prove itself, and that requests wait for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ngrpo.rollout import engine_probe
from ngrpo.trainers.openrlhf.rollout_actor import EngineProof
from tests.fast.run import run_with


class Engine:
    def __init__(self, error: str | None = None) -> None:
        self.asked, self._error = 0, error

    async def collective_rpc(self, method: str) -> list[Any]:
        assert method == "perturbation_probe"
        self.asked += 1
        await asyncio.sleep(0)
        if self._error is not None:
            raise RuntimeError(self._error)
        return [None]


@pytest.mark.parametrize(("strict", "asked"), [(False, 1), (True, 2)])
def test_once_at_the_start_and_if_strict_after_each_sync(
    strict: bool, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(monkeypatch, strict=strict)
    engine = Engine()

    async def use() -> None:
        proof = EngineProof(engine, perturbed=True)
        await asyncio.gather(*(proof.passed() for _ in range(3)))
        assert engine.asked == 1
        proof.weights_synced()
        assert engine.asked == 1, "not at the end of the sync, when a KV cache may be asleep"
        await asyncio.gather(*(proof.passed() for _ in range(3)))

    asyncio.run(use())
    assert engine.asked == asked


def test_every_request_gets_the_error() -> None:
    async def use() -> list[Any]:
        proof = EngineProof(Engine("does not feed"), perturbed=True)
        return await asyncio.gather(*(proof.passed() for _ in range(2)), return_exceptions=True)

    assert [str(error) for error in asyncio.run(use())] == ["does not feed"] * 2


def test_an_unperturbed_engine_is_not_asked() -> None:
    engine = Engine()
    asyncio.run(EngineProof(engine, perturbed=False).passed())
    assert engine.asked == 0


def test_no_request_runs_after_a_proof_that_failed() -> None:
    """The engine lives on in its caller's process, and has to refuse the next request as it did the first one."""
    failures = iter(["first", "second"])

    def collective_rpc(method: str) -> list[Any]:
        raise RuntimeError(next(failures))

    model = SimpleNamespace(dtype="torch.float32")
    configuration = {"perturbation": {"name": "neighbor"}}
    core: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(
            additional_config=configuration, model_config=model, load_config=SimpleNamespace(load_format="auto")
        ),
        scheduler=SimpleNamespace(has_requests=lambda: False),
        collective_rpc=collective_rpc,
    )
    with pytest.raises(RuntimeError, match="first"):
        engine_probe.engine_started(core)
    with pytest.raises(RuntimeError, match="second"):
        engine_probe.before_request(core)
