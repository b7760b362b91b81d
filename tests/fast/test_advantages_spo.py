# SPDX-License-Identifier: Apache-2.0
"""SPO's tracker and advantage against numbers derived by hand, over a resume."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ngrpo.config import complete_flags
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods.advantages import create
from ngrpo.trainers.openrlhf.step_advantages import StepAdvantages, Values, Visits
from ngrpo.trainers.openrlhf.trainer import trainer as our_trainer
from tests.fast.openrlhf_doubles import maker
from tests.fast.run import run_of
from tests.fast.test_resume import Trainer


def test_the_tracker_by_hand() -> None:
    """ρ = 3/4, so α + β starts at 4. p: 1 0 0 0 is 1 of 4. q has one response: the step's mean, 0.4, is 1.6 of 4.

    p then sees 1, 1: before it 1/4; after it α = 3/4 + 2, β = 9/4, so 2.75/5. q had 1: (2.2, 1.8), 0.55. It sees 0:
    (1.65, 2.35) after, 1.65/4.
    """
    values = Values()
    assert values.visit("pqppp", [1, 1, 0, 0, 0], 0.75) == pytest.approx([0.25, 0.4, 0.25, 0.25, 0.25])
    assert values.visit("pqp", [1, 0, 1], 0.75) == pytest.approx([0.25, 0.55, 0.25])
    assert values.visit("qp", [0.5, 0.5], 0.75) == pytest.approx([0.4125, 0.55])
    assert repr(values) == "Values of 2 prompts"


def step(at: Any, rewards: list[float], order: list[int], prompts: str) -> list[float]:
    """A step's advantages in the order of generation."""
    given = torch.tensor(rewards, dtype=torch.float32)
    made = [SimpleNamespace(index=order, rewards=given[order], prompts=[prompts[i] for i in order])]
    run = StepAdvantages(at, made, create("spo", rho=0.75))
    found = torch.empty_like(given)
    found[order] = run.next(made[0].rewards)
    return found.tolist()


def test_a_step_takes_off_the_value_before_it_and_goes_on_after_a_resume() -> None:
    def new() -> Any:
        return maker(args=SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=2)))

    first, second = our_trainer(Trainer)(), our_trainer(Trainer)()
    first.experience_maker, second.experience_maker = new(), new()
    first.experience_maker.visits = Visits()  # of a checkpoint with another advantage
    # r − v̂ is ½, −½, 0, 0, of mean 0 and variance 1/6.
    wanted = pytest.approx([1.5**0.5, -(1.5**0.5), 0.0, 0.0])
    assert step(first.experience_maker, [1, 0, 1, 1], [2, 0, 3, 1], "ppqq") == wanted
    first.save_logs_and_checkpoints(1, {}, {"global_step": 1})
    assert "Values of 2 prompts" in repr(pickle.loads(Trainer.saved)["ngrpo"]["visits"])
    second.init_checkpoint_states()
    # ½, ½, −1, 0, of mean 0 and variance ½.
    wanted = pytest.approx([0.5**0.5, 0.5**0.5, -(2**0.5), 0.0])
    assert step(second.experience_maker, [1, 1, 0, 1], [1, 3, 2, 0], "ppqq") == wanted


def test_equal_differences_to_the_value_teach_nothing() -> None:
    """Prompts of one response each, first seen and seen again."""
    at = maker(args=SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=1)))
    assert step(at, [0.1] * 3, [2, 0, 1], "pqr") == [0.0] * 3
    assert step(at, [0.3] * 3, [0, 1, 2], "pqr") == [0.0] * 3


def test_openrlhf_s_estimator_needs_no_group_and_leaves_the_numbers_alone() -> None:
    """It does not normalize them again, and clips beyond √128, the most of 128 responses."""
    run = run_of(preset="grpo", advantage={"name": "spo"})
    given = Flags(["--rollout.n_samples_per_prompt", "1", "--rollout.batch_size", "128"])
    flags = complete_flags.of_preset(given, run)
    assert (flags["--algo.advantage.estimator"], flags["--reward.clip_range"]) == ("flash_reinforce", ("-12", "12"))
