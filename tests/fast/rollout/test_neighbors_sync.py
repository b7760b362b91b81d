# SPDX-License-Identifier: Apache-2.0
"""Neighbor sets at a weight sync of OpenRLHF: when a GPU computes them again, and their drift in the run's log."""

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ngrpo.rollout.attach import AttachedPerturbation, follow_weights
from ngrpo.trainers.common.sample_records import EngineCheck
from ngrpo.trainers.openrlhf.rollout_actor import rollout_actor
from ngrpo.trainers.openrlhf.trainer import trainer
from perturbations import ExactIndex, create
from perturbations.embeddings import matrix_embeddings
from tests.support.run import run_with


class Attached(AttachedPerturbation):
    """The part that follows weight syncs, on a plain matrix."""

    _routed = None

    def __init__(self, embedding: torch.Tensor) -> None:
        self.embeddings = matrix_embeddings(embedding)
        self.perturbation = create("neighbor", metric="l2")
        self.module = None
        self._prepares = True
        self._runner = SimpleNamespace(reload_weights=self.load, get_model=lambda: self._runner)
        self._runner.load_weights = self.load
        self._matrix = embedding
        self.forgotten = 0
        self.perturber = SimpleNamespace(weights_changed=self.forget)

    def forget(self) -> None:
        """Captured steps read the old weights."""
        self.forgotten += 1

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for _, rows in weights:
            self._matrix.copy_(rows)

    def nearest(self) -> list[int]:
        return self.embeddings.index("l2", "input").query(torch.tensor([0]), 2)[0][0].tolist()


START = torch.tensor([[0.0], [1.0], [3.0], [10.0], [12.0]])
MOVED = torch.tensor([[0.0], [20.0], [3.0], [10.0], [12.0]])


@pytest.fixture
def searched_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each search for neighbors."""
    rows: list[int] = []
    search = ExactIndex.search

    def counted_search(self: ExactIndex, tokens: Any, k: int) -> Any:
        rows.append(len(tokens))
        return search(self, tokens, k)

    monkeypatch.setattr(ExactIndex, "search", counted_search)
    return rows


def test_on_a_gpu_the_table_is_computed_at_the_end_of_a_sync(searched_rows: list[int]) -> None:
    """Not after each parameter, of which OpenRLHF sends hundreds; and never while requests are running."""
    attached = Attached(START.clone())
    runner = attached._runner
    follow_weights(runner, attached)
    attached.prepare()
    assert sum(searched_rows) == 5
    assert attached.nearest() == [1, 2]
    assert sum(searched_rows) == 5

    for _ in range(3):
        runner.load_weights([("embed_tokens.weight", MOVED)])
    assert sum(searched_rows) == 5
    assert attached.forgotten == 3
    attached.prepare()  # OpenRLHF's last parameter
    assert sum(searched_rows) == 10
    assert attached.nearest() == [2, 3]
    assert sum(searched_rows) == 10

    runner.reload_weights([("embed_tokens.weight", START)])
    assert sum(searched_rows) == 15
    assert attached.nearest() == [1, 2]
    assert sum(searched_rows) == 15


def test_on_a_cpu_rows_are_computed_as_they_are_needed(searched_rows: list[int]) -> None:
    attached = Attached(START.clone())
    attached._prepares = False
    runner = attached._runner
    follow_weights(runner, attached)
    runner.reload_weights([("embed_tokens.weight", MOVED)])
    assert sum(searched_rows) == 0
    assert attached.nearest() == [2, 3]
    assert sum(searched_rows) == 1


@pytest.mark.parametrize("method", ["update_weight", "update_weight_cuda_ipc"])
def test_openrlhf_s_last_parameter_ends_a_sync(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenRLHF 0.11.2 sends parameters one by one and marks the last with ``empty_cache``."""
    sent: list[Any] = []

    class Plain:
        async def update_weight(self, *args: Any, empty_cache: bool = False) -> None:
            sent.append((*args, empty_cache))

        update_weight_cuda_ipc = update_weight

    class Engine:
        async def collective_rpc(self, name: str) -> None:
            sent.append(name)

    actor = rollout_actor(Plain)
    actor = actor.__new__(actor)
    actor.llm = Engine()
    run_with(monkeypatch, perturbation={"name": "neighbor"})
    actor.engine_check = EngineCheck(actor.llm, perturbed=False)
    for name, last in (("a", False), ("b", True)):
        asyncio.run(getattr(actor, method)(name, torch.float32, empty_cache=last))
    assert sent == [("a", torch.float32, False), ("b", torch.float32, True), "perturbation_prepare"]


def test_the_drift_of_all_engines_joins_the_status_of_the_step_after_its_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """(2 + 1) of (4 + 6) tokens changed by the sync, (3 + 3) of (5 + 7) since the start; the third reports nothing."""
    run_with(monkeypatch, perturbation={"name": "neighbor"})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda found: found))
    counts = ((5, 3, 4, 2), (7, 3, 6, 1), None)
    remote = [SimpleNamespace(remote=lambda found=found: found) for found in counts]

    class Plain:
        experience_maker = SimpleNamespace(step_measures={"perturbation/rate": 0.1})
        vllm_engines = ()

        def train_step(self, samples: Any, global_step: int) -> tuple[dict[str, float], int]:
            self.vllm_engines = [SimpleNamespace(perturbation_drift=call) for call in remote]  # after update and sync
            return {"reward": 1.0}, global_step + 1

    drift = {
        "perturbation/neighbors_changed": pytest.approx(0.3),
        "perturbation/neighbors_changed_since_start": pytest.approx(0.5),
    }
    assert trainer(Plain)().train_step(None, 4) == ({"reward": 1.0, "perturbation/rate": 0.1} | drift, 5)
