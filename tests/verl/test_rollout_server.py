# SPDX-License-Identifier: Apache-2.0
"""verl's agent loops and server with perturbations: seeds of equal rows, and records of requests with one id.

Needs an environment with verl: `make test-verl`.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl", reason="needs verl: make test-verl")
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from ngrpo.rollout.check_texts import record_of
from ngrpo.trainers.verl import rollout_server
from perturbations import FinishedTrajectory, registry, seeds

KEY = rollout_server.KEY


class Manager(rollout_server.PerturbedAgentLoopManager):
    """The manager without workers."""

    def __init__(self) -> None:
        self._copies = seeds.RoundCounts()


def batch_of(texts: list[str], step: int, validate: bool = False) -> Any:
    """Rows without numbers of their own, as verl's dataset gives them where the data has none."""
    messages = np.empty(len(texts), dtype=object)
    messages[:] = [[{"role": "user", "content": text}] for text in texts]
    batch = tu.get_tensordict({"raw_prompt": messages, "index": np.zeros(len(texts), dtype=object)})
    tu.assign_non_tensor_data(batch, "global_steps", step)
    if validate:
        tu.assign_non_tensor_data(batch, "validate", True)
    return batch


def test_equal_rows_have_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """AIME's files have each problem 32 times, for Mean@32. Without a number all copies had the same draws."""
    dispatched: list[list[int]] = []
    monkeypatch.setattr(
        AgentLoopManagerTQ,
        "generate_sequences",
        lambda self, prompts: dispatched.append(prompts[rollout_server._COPY].tolist()),
    )
    manager = Manager()
    manager.generate_sequences(batch_of(["a", "b", "a", "a"], step=1))
    manager.generate_sequences(batch_of(["a"], step=1))  # a refill of the same step
    manager.generate_sequences(batch_of(["a", "a"], step=1, validate=True))
    manager.generate_sequences(batch_of(["a", "b"], step=2))
    assert dispatched == [[0, 0, 1, 2], [3], [0, 1], [0, 0]]


def test_equal_rows_have_seeds_of_their_own() -> None:
    spec = registry.create("neighbor").spec()
    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": {"engine_kwargs": {"vllm": {"additional_config": {KEY: spec}}}}}}
    )
    trajectory = {"step": 5, "sample_index": 0, "validate": False}

    def seed(copy: int) -> object:
        return rollout_server.request_arguments(config, trajectory, "single_turn_agent", 0, copy)["seed"]

    assert len({seed(0), seed(1), seed(2)}) == 3
    assert seed(1) == seed(1)


class Records:
    """The place of `PickUps`: a request's record by its id, of the tokens in its prompt."""

    def __init__(self) -> None:
        self.of_request: dict[str, bytes] = {}

    async def take(self, name: str) -> bytes:
        await asyncio.sleep(0)
        return self.of_request.pop(name)


def test_requests_with_one_id_get_their_own_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``rollout.full_determinism=True`` verl calls every request ``det-0``."""
    records = Records()

    async def generate(self: object, prompt_ids: list[int], params: object, request_id: str) -> SimpleNamespace:
        record = record_of({len(prompt_ids): 5}, prompt_tokens=len(prompt_ids), num_tokens=len(prompt_ids) + 2)
        log_probs = np.full(2, -float(len(prompt_ids)), dtype=np.float32)
        records.of_request[request_id] = FinishedTrajectory(record=record, log_probs=log_probs).pack()
        await asyncio.sleep(0)
        return SimpleNamespace(stop_reason="completed", token_ids=[1, 2], extra_fields={})

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    server = object.__new__(rollout_server.PerturbedHttpServer)
    server._pick_ups = records  # type: ignore[assignment]

    async def both() -> list[Any]:
        return await asyncio.gather(*(server.generate([7] * length, {}, "det-0") for length in (3, 4)))

    outputs = asyncio.run(asyncio.wait_for(both(), timeout=10))
    packed = [FinishedTrajectory.unpack(output.extra_fields[KEY]) for output in outputs]
    assert [trajectory.record.prompt_tokens for trajectory in packed] == [3, 4]
    assert [float(trajectory.log_probs[-1]) for trajectory in packed] == [-3.0, -4.0]
