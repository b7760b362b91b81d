# SPDX-License-Identifier: Apache-2.0
"""`--reproducible`: what makes the same seed give the same rollouts from run to run.

That whole runs then repeat is shown in tests/pipeline/test_compare.py.
"""

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ngrpo.config import parse
from ngrpo.methods import advantages
from ngrpo.patches import TRAINING, active
from ngrpo.rollout import settings
from ngrpo.trainers.openrlhf import samples_generator
from ngrpo.trainers.openrlhf.actor_trainer import actor_trainer
from ngrpo.trainers.openrlhf.trainer import prepare_datasets
from perturbations.errors import UsageError
from tests.support.run import run_of, run_with


def strategy(seed: int = 3, updates: int = 0) -> Any:
    model = SimpleNamespace(global_steps=updates)
    train = SimpleNamespace(seed=seed, batch_size=8, max_epochs=1)
    args = SimpleNamespace(train=train, rollout=SimpleNamespace(n_samples_per_prompt=4))
    return SimpleNamespace(args=args, actor=SimpleNamespace(model=model))


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("--reproducible --model m", True),
        ("--reproducible=no", False),
        ("--perturbation none --perturbation.reproducible", True),
        ("--perturbation neighbor", False),
    ],
)
def test_it_is_a_setting_of_the_run(line: str, asked: bool) -> None:
    command = parse.run_config(line.split())
    assert command.reproducible is asked
    assert "reproducible" not in (command.spec or {})
    assert (command.spec is None) is ("neighbor" not in line)


def test_a_seed_without_effect_is_said() -> None:
    (note,) = parse.run_config(["--perturbation", "none", "--perturbation.seed", "5", "--reproducible"]).notes
    assert "seed" in note


@pytest.mark.parametrize("spec", [None, {"name": "none"}, {"name": "neighbor", "rate": 0.0}])
def test_seeded_draws_install_what_draws_the_tokens(spec: dict | None) -> None:
    config = {} if spec is None else {"perturbation": spec}
    assert settings.read(config) is None
    perturbation = settings.read({**config, "seeded_draws": True})
    assert perturbation is not None and not perturbation.active
    with pytest.raises(UsageError, match="seeded_draws"):
        settings.read({**config, "seeded_draws": "yes"})


def test_an_unperturbed_run_has_stock_training() -> None:
    """Its draws are seeded and its order is fixed, without replay and density; the rest is in every run."""
    rows = active(run_of(reproducible=True).conditions), active([TRAINING])
    ours, always = ({row.ours.split(":")[0].rpartition(".")[2] for row in part if row.ours} for part in rows)
    assert ours == {"samples_generator", "trainer"}
    novelty = active(run_of(advantage=advantages.create("rep_exp").spec()).conditions)
    assert any("PolicyModelActor" in row.target for row in novelty), "its actors hand over hidden states"
    of_training = {"trainer", "experience_maker", "step_advantages", "actor_trainer", "rollout_actor", "prompt_rows"}
    assert always == of_training | {"processes", "build_locks"}, "free ports, and locks of killed builds"


def test_the_order_of_prompts_follows_the_seed_alone() -> None:
    prepare = prepare_datasets(lambda strategy, tokenizer: torch.randperm(1000).tolist())
    torch.manual_seed(0)
    first = prepare(strategy(), None)
    torch.manual_seed(1)
    outside = torch.initial_seed()
    assert prepare(strategy(), None) == first
    assert torch.initial_seed() == outside, "the process's own generator stays as it was"
    assert prepare(strategy(seed=4), None) != first


def test_the_order_of_training_follows_seed_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, reproducible=True)

    class ActorPPOTrainer:
        def __init__(self, updates: int) -> None:
            vars(self).update(vars(strategy(updates=updates)))

        def ppo_train(self, kl_ctl: float) -> dict[str, Any]:
            return {"order": torch.randperm(1000).tolist()}

    orders = []
    for noise in (0, 1):
        torch.manual_seed(noise)
        orders.append([actor_trainer(ActorPPOTrainer)(updates).ppo_train(0.0) for updates in (0, 2)])
    assert orders[0] == orders[1], "a process that was resumed after two updates has the orders of one that was not"
    assert orders[0][0] != orders[0][1]


class Generator:
    """As OpenRLHF's SamplesGenerator: two engines that were sent 3 of the 4 requests, or all of them."""

    def __init__(self, arrived: tuple[int, int]) -> None:
        def engine(unfinished: int) -> Any:
            pause, count = SimpleNamespace(remote=lambda: None), SimpleNamespace(remote=lambda: unfinished)
            calls = {"pause_generation": pause, "resume_generation": pause, "get_num_unfinished_requests": count}
            return SimpleNamespace(**calls)

        algo, rollout = SimpleNamespace(dynamic_filtering_enable=False), SimpleNamespace(n_samples_per_prompt=2)
        self.args = SimpleNamespace(algo=algo, rollout=rollout)
        self.vllm_engines = [engine(count) for count in arrived]

    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str]) -> list[list[str]]:
        return [[prompt, prompt] for prompt in prompts]


@pytest.mark.parametrize(("arrived", "lapsed"), [((2, 2), False), ((2, 1), True)])
def test_an_incomplete_batch_is_said(
    arrived: tuple[int, int], lapsed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda found: found, put=lambda value: value))
    run_with(monkeypatch, reproducible=True)
    monkeypatch.setattr(samples_generator, "_PATIENCE_SECONDS", 0.05)
    generator = samples_generator.samples_generator(Generator)(arrived)
    with caplog.at_level(logging.WARNING):
        answers = generator._dispatch_prompts_to_vllm(["a", "b"], ["", ""])
    assert answers == [["a", "a", "b", "b"]]
    assert ("only 3 of 4 requests" in caplog.text) is lapsed
