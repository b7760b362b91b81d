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
from ngrpo.patches import TRAINING, active
from ngrpo.rollout import settings
from ngrpo.trainers.openrlhf import samples_generator
from ngrpo.trainers.openrlhf.actor_trainer import actor_trainer
from ngrpo.trainers.openrlhf.trainer import prepare_datasets
from perturbations.errors import UsageError
from tests.support.run import run_of, run_with


def strategy(seed: int = 3, updates: int = 0) -> Any:
    model = SimpleNamespace(global_steps=updates)
    train = SimpleNamespace(seed=seed, batch_size=8, max_epochs=1, micro_batch_size=4, dynamic_batch_enable=False)
    rollout = SimpleNamespace(n_samples_per_prompt=4, batch_size=2, vllm_generate_batch_size=2)
    return SimpleNamespace(
        args=SimpleNamespace(train=train, rollout=rollout),
        actor=SimpleNamespace(model=model),
        replay_buffer=SimpleNamespace(items=[None] * 8),
    )


@pytest.mark.parametrize(
    ("line", "reproducible"),
    [
        ("--reproducible --model m", True),
        ("--reproducible=no", False),
        ("--perturbation none --perturbation.reproducible", True),
        ("--perturbation neighbor", False),
    ],
)
def test_it_is_a_setting_of_the_run(line: str, reproducible: bool) -> None:
    command = parse.run_config(line.split())
    assert command.reproducible is reproducible
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
    assert perturbation is not None
    assert not perturbation.active
    with pytest.raises(UsageError, match="seeded_draws"):
        settings.read({**config, "seeded_draws": "yes"})


def replaced_modules(conditions: Any) -> set[str]:
    """The names of our modules that have something in place of upstream's, under these conditions of a run."""
    paths = [row.ours.split(":")[0] for row in active(conditions) if row.ours]
    return {path.rpartition(".")[2] for path in paths}


def test_an_unperturbed_run_has_stock_training() -> None:
    """Its draws are seeded and its order is fixed, without replay and density."""
    assert replaced_modules(run_of(reproducible=True).conditions) == {"trainer"}


def test_what_every_training_replaces() -> None:
    of_training = {"trainer", "async_trainer", "samples_generator", "rollout_actor", "prompt_rows"}
    of_training |= {"experience_maker", "step_advantages", "model_actors", "actor_trainer", "reward_model"}
    free_ports_and_killed_builds = {"processes", "build_locks"}
    assert replaced_modules([TRAINING]) == of_training | free_ports_and_killed_builds | {"short_steps"}


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
            self.strategy = SimpleNamespace(accumulated_gradient=2)

        def ppo_train(self, kl_ctl: float) -> dict[str, Any]:
            return {"order": torch.randperm(1000).tolist()}

    def orders(process_seed: int) -> list[dict[str, Any]]:
        """The results of a process at its first step, and at the one after two updates."""
        torch.manual_seed(process_seed)
        return [actor_trainer(ActorPPOTrainer)(updates).ppo_train(0.0) for updates in (0, 2)]

    first, later = orders(process_seed=0)
    assert orders(process_seed=1) == [first, later], "a resumed process has the orders of one that was not"
    assert first != later


class Generator:
    """As OpenRLHF's SamplesGenerator, with two samples for each prompt; ``unfinished`` are the requests by engine."""

    def __init__(self, unfinished: tuple[int, int]) -> None:
        def engine(count: int) -> Any:
            nothing = SimpleNamespace(remote=lambda: None)
            return SimpleNamespace(
                pause_generation=nothing,
                resume_generation=nothing,
                get_num_unfinished_requests=SimpleNamespace(remote=lambda: count),
            )

        self.args = SimpleNamespace(
            algo=SimpleNamespace(dynamic_filtering_enable=False),
            rollout=SimpleNamespace(n_samples_per_prompt=2),
        )
        self.vllm_engines = [engine(count) for count in unfinished]

    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str]) -> list[list[str]]:
        return [[prompt, prompt] for prompt in prompts]


@pytest.mark.parametrize(
    ("arrived", "warned"),
    [
        pytest.param((2, 2), False, id="all four requests"),
        pytest.param((2, 1), True, id="three of four"),
    ],
)
def test_a_batch_that_does_not_arrive_in_time_is_warned_of(
    arrived: tuple[int, int], warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda results: results, put=lambda value: value))
    run_with(monkeypatch, reproducible=True)
    monkeypatch.setattr(samples_generator, "_PATIENCE_SECONDS", 0.05)
    generator = samples_generator.samples_generator(Generator)(arrived)
    with caplog.at_level(logging.WARNING):
        responses = generator._dispatch_prompts_to_vllm(["a", "b"], ["", ""])
    assert responses == [["a", "a", "b", "b"]]
    assert ("only 3 of 4 requests" in caplog.text) is warned
