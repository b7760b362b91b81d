"""`reproducible`: what makes the same seed give the same rollouts from run to run.

That whole runs then repeat is shown in tests/pipeline/test_compare.py.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ngrpo import flags
from ngrpo.rollout import settings
from ngrpo.trainer import reproducible
from ngrpo.trainer.launch import SPEC
from perturbations import create


@pytest.fixture(params=[True, False])
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv(SPEC, json.dumps({"name": "none", "reproducible": request.param}))
    return request.param


def strategy(seed: int = 3) -> Any:
    return SimpleNamespace(args=SimpleNamespace(train=SimpleNamespace(seed=seed)))


@pytest.mark.parametrize("name", ["none", "neighbor"])
def test_it_is_active_though_nothing_is_perturbed(name: str) -> None:
    words = ["--perturbation", name, "--perturbation.rate", "0"]
    assert flags.parse(words).spec is None
    spec = flags.parse([*words, "--perturbation.reproducible"]).spec
    assert spec is not None and spec["reproducible"] is True
    operator = settings.read({"perturbation": spec})
    assert operator is not None and operator.rate == 0.0
    assert not create("neighbor", rate=0.0).active


def test_the_order_of_prompts_follows_the_seed_alone(asked: bool) -> None:
    prepare = reproducible.seeded_prompt_order(lambda strategy, tokenizer: torch.randperm(1000).tolist())
    torch.manual_seed(0)
    first = prepare(strategy(), None)
    torch.manual_seed(1)
    outside = torch.initial_seed()
    assert (prepare(strategy(), None) == first) is asked
    assert torch.initial_seed() == outside, "the process's own generator stays as it was"
    assert prepare(strategy(seed=4), None) != first


def test_the_order_of_training_follows_seed_and_step(asked: bool) -> None:
    ppo_train = reproducible.seeded_training_order(lambda self, kl_ctl: torch.randperm(1000).tolist())
    orders = []
    for noise in (0, 1):
        torch.manual_seed(noise)
        trainer = strategy()
        orders.append([ppo_train(trainer, 0.0), ppo_train(trainer, 0.0)])
    assert (orders[0] == orders[1]) is asked
    assert orders[0][0] != orders[0][1]
