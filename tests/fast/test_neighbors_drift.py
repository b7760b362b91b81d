# SPDX-License-Identifier: Apache-2.0
"""The drift on its way to the run's log."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ngrpo.trainers.openrlhf.trainer import neighbor_drift, trainer
from tests.fast.run import run_with


def actor(counts: Any) -> Any:
    return SimpleNamespace(perturbation_drift=SimpleNamespace(remote=lambda: counts))


@pytest.fixture
def local_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda found: found))


def test_engines_add_up(local_ray: None) -> None:
    """(2 + 1) of (4 + 6) tokens changed by the sync, (3 + 3) of (5 + 7) since the start; the third knows nothing."""
    engines = [actor((5, 3, 4, 2)), actor((7, 3, 6, 1)), actor(None)]
    assert neighbor_drift(engines) == {
        "perturbation/neighbors_changed": pytest.approx(0.3),
        "perturbation/neighbors_changed_since_start": pytest.approx(0.5),
    }
    assert neighbor_drift([actor((2, 1, 0, 0))]) == {"perturbation/neighbors_changed_since_start": 0.5}
    assert neighbor_drift([actor(None)]) == {} and neighbor_drift(None) == {}


def test_it_joins_the_status_of_the_step_after_its_weight_sync(
    local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(monkeypatch, perturbation={"name": "neighbor"})

    class Plain:
        experience_maker = SimpleNamespace(step_measures={"perturbation/rate": 0.1})
        vllm_engines = ()

        def train_step(self, samples: Any, global_step: int) -> tuple[dict[str, float], int]:
            self.vllm_engines = [actor((2, 1, 2, 2))]  # after update and sync
            return {"reward": 1.0}, global_step + 1

    status = {"reward": 1.0, "perturbation/rate": 0.1}
    drift = {"perturbation/neighbors_changed": 1.0, "perturbation/neighbors_changed_since_start": 0.5}
    assert trainer(Plain)().train_step(None, 4) == (status | drift, 5)
