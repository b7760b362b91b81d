# SPDX-License-Identifier: Apache-2.0
"""A step's advantages in OpenRLHF: COPO's visits, options that change over the run, the rows that replace estimates."""

import math
from types import SimpleNamespace

import pytest
import torch

from ngrpo.methods.advantages import compute, create
from ngrpo.methods.scoring.answers import outcome
from ngrpo.trainers.openrlhf import step_advantages
from ngrpo.trainers.openrlhf.step_advantages import StepAdvantages, Visits, advantage_measures

# --- COPO's visits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7 + 5 = 12.", "12"),
        ("It is 1,234.5 in all", "1234.5"),
        ("so \\boxed{1} or rather \\boxed{\\frac{1}{ 2}}", "\\frac{1}{2}"),
        ("<think>40</think> The answer: 41", "41"),
        ("  I do  NOT know ", "i do not know"),
    ],
)
def test_the_answer_of_a_response_is_its_outcome(text: str, answer: str) -> None:
    assert outcome(text) == answer


def test_counts_are_of_the_run_and_of_the_others_in_the_batch() -> None:
    visits = Visits()
    assert visits.count(["p", "p", "p", "q"], ["= 3", "3!", "4", "3"]) == [1, 1, 0, 0]
    assert visits.count(["p", "q"], ["so 3", "4"]) == [2, 0]
    assert len(visits) == 4


# --- metrics -------------------------------------------------------------------------------------------------

# One response of four right; all wrong; all right.
REWARDS = torch.tensor(
    [
        [1.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0, 1.0],
    ]
)


def test_measures() -> None:
    """The uniform groups are the second, which is 0 0 0 0 1, of mean 1/5 and variance 20/25/4, and the third, of 0."""
    measures = advantage_measures(REWARDS, compute("ngrpo", REWARDS))
    assert measures["advantage/uniform_groups"] == pytest.approx(2 / 3)
    assert measures["advantage/uniform_mean"] == pytest.approx(-0.2 / math.sqrt(0.2) / 2, abs=1e-5)
    assert measures["advantage/min"] == pytest.approx(-0.4 / math.sqrt(0.3), abs=1e-5)
    assert measures["advantage/max"] == pytest.approx(0.6 / math.sqrt(0.3), abs=1e-5)


def test_measures_of_a_mixed_group_with_counts() -> None:
    mixed = REWARDS[:1]
    counts = torch.tensor([[1.0, 3.0, 0.0, 0.0]])
    measures = advantage_measures(mixed, compute("psr", mixed), counts)
    assert "advantage/uniform_mean" not in measures
    assert measures["advantage/count_mean"] == 1.0


def test_equal_rewards_are_a_uniform_group_where_their_float32_mean_is_another_number() -> None:
    rewards = torch.full((1, 7), 0.3)
    assert (rewards.mean(-1, keepdim=True) != rewards).any()
    measures = advantage_measures(rewards, torch.zeros(1, 7))
    assert measures["advantage/uniform_groups"] == 1.0


# --- a step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("training_step", "k"), [(9, 4), (10, 1)])
def test_a_step_computes_with_the_options_of_its_time(training_step: int, k: int) -> None:
    """PKPO's k is 4, and 1 from step 10 on: then it is the reward, less nothing, of each of four responses."""
    advantage = create("pkpo", k=4, k_end=1, k_steps=10)
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    experience = SimpleNamespace(index=[0, 1, 2, 3], rewards=rewards, prompts=["p"] * 4)
    args = SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=4))
    maker = SimpleNamespace(args=args, training_step=training_step)
    (advantages,) = step_advantages.compute(maker, [experience], advantage).advantages
    expected = create("pkpo", k=k).compute(rewards.unsqueeze(0))[0]
    assert torch.equal(advantages, expected)


# --- the rows that replace OpenRLHF's estimates -------------------------------------------------------------

ESTIMATES = torch.tensor([4.0, 5.0])
# For each of two micro-batches: advantages; and zeros in the place of some estimates.
ROWS = [
    *StepAdvantages(advantages=(torch.tensor([1.0, 2.0]),)).replacements(),
    *StepAdvantages(zeroed=(torch.tensor([True, False]),)).replacements(),
]

compute_reward = step_advantages.compute_reward(lambda r, scale: r * scale)


def test_openrlhf_continues_with_our_rows_and_takes_each_once() -> None:
    with step_advantages.replacing_estimates(ROWS):
        assert compute_reward(ESTIMATES, 2.0).tolist() == [2.0, 4.0]
        assert compute_reward(ESTIMATES, scale=1.0).tolist() == [0.0, 5.0], "the first one is set to 0"
        with pytest.raises(RuntimeError, match="more micro-batches than the step has"):
            compute_reward(ESTIMATES, 1.0)


def test_outside_of_a_step_no_estimate_is_replaced() -> None:
    assert compute_reward(ESTIMATES, 2.0).tolist() == [8.0, 10.0]
    with step_advantages.replacing_estimates(ROWS):
        compute_reward(ESTIMATES, 1.0)
        compute_reward(ESTIMATES, 1.0)
    assert compute_reward(ESTIMATES, 2.0).tolist() == [8.0, 10.0]


def test_rows_that_openrlhf_did_not_take_are_an_error() -> None:
    message = "did not take our advantages for 2 micro-batches"
    with pytest.raises(RuntimeError, match=message), step_advantages.replacing_estimates(ROWS):
        pass


def test_a_row_has_one_number_for_each_estimate() -> None:
    message = r"\(3,\) estimates of a micro-batch, the run's advantages are \(2,\)"
    with pytest.raises(RuntimeError, match=message), step_advantages.replacing_estimates(ROWS):
        compute_reward(torch.zeros(3), 1.0)
