# SPDX-License-Identifier: Apache-2.0
"""LENS against numbers derived by hand, its gradient, and the log-probabilities that a step gives it."""

from types import SimpleNamespace

import pytest
import torch

from ngrpo.methods import advantages
from ngrpo.trainers.openrlhf.step_advantages import StepAdvantages
from tests.fast.openrlhf_doubles import maker

HALF, QUARTER = torch.tensor([0.5, 0.25], dtype=torch.float64).log().tolist()


def lens(rewards: list[float], answers: list[tuple[float, int]], **options: float) -> torch.Tensor:
    """Of one group of answers, each with the log-probability of every token and the number of tokens."""
    further = torch.tensor([[[each * tokens, tokens] for each, tokens in answers]], dtype=torch.float64)
    return advantages.compute("lens", torch.tensor([rewards], dtype=torch.float64), further=further, **options)[0]


def test_all_wrong_by_hand() -> None:
    """π̄ = 1/2, 1/4, so D = 1; r̃ = −1/2 · (1/2)/(1/2) and −1/2 · (1/4)/(3/4), mean −1/3; a quarter of ∓1/6."""
    assert lens([0, 0], [(HALF, 2), (QUARTER, 3)]).tolist() == pytest.approx([-1 / 24, 1 / 24])
    assert lens([0, 0], [(HALF, 2), (QUARTER, 3)], alpha=1.0).tolist() == pytest.approx([-1 / 6, 1 / 6])


@pytest.mark.parametrize("name", ["lens", "reinforce_rej"])
def test_rewards_within_rounding_of_right_are_a_uniform_group(name: str) -> None:
    """A sum of float32 may be 0.9999996: its difference from 1 is no difference between responses."""
    further = torch.tensor([[[HALF, 1], [QUARTER, 1], [HALF, 2]]], dtype=torch.float64)
    assert not advantages.compute(name, torch.tensor([[0.9999996, 1.0, 0.9999998]]), further=further).any()


@pytest.mark.parametrize(
    ("tokens", "calibrated"),
    [
        # The right answer's probability is 1/2, D_imp = 1 / (1/4 · 2) = 2; (1/2)/(3/2) and (1/4)/(7/4) of 1/4.
        (1, [1.0, -1 / 12, -1 / 28, -1 / 28]),
        # It is 1/2^40: D = 2 · 1/2; (1/2)/(1/2) and (1/4)/(3/4) of 1/4. Of 9,000 tokens it is 0 in float64.
        (40, [1.0, -1 / 4, -1 / 12, -1 / 12]),
        (9000, [1.0, -1 / 4, -1 / 12, -1 / 12]),
    ],
)
def test_a_mixed_group_by_hand(tokens: int, calibrated: list[float]) -> None:
    found = lens([1, 0, 0, 0], [(HALF, tokens), (HALF, tokens), (QUARTER, tokens), (QUARTER, tokens)])
    expected = advantages.compute("group_norm", torch.tensor([calibrated], dtype=torch.float64))[0]
    torch.testing.assert_close(found, expected)
    assert found[0] > 0.0 > found[1:].max(), "a right answer rises, the wrong ones fall"


@pytest.mark.parametrize("size", [1, 3, 64])
def test_all_right_gives_exactly_nothing(size: int) -> None:
    assert not lens([1.0] * size, [(-0.1 * i, 3 + i) for i in range(size)]).any()


def test_the_penalty_is_the_gradient_of_the_likelihood() -> None:
    """Theorem 1: −π / (D − π) ∇ log π is the gradient of log(1 − π / D), for one token an answer."""
    log_probs = torch.tensor([-0.3, -1.2, -2.5], dtype=torch.float64, requires_grad=True)
    difficulty = 2.0 * log_probs.detach().exp().max()
    (1.0 - log_probs.exp() / difficulty).log().sum().backward()
    found = lens([0, 0, 0], [(value, 1) for value in log_probs.tolist()], alpha=1.0)
    torch.testing.assert_close(3.0 * found, log_probs.grad - log_probs.grad.mean())


def test_a_step_gives_sums_over_trained_tokens() -> None:
    """Two prompts of two answers, mixed; masked tokens hold NaN, as OpenRLHF's padding may hold anything."""
    nan, made = float("nan"), []
    rows = {0: [-1.0, -2.0, nan], 3: [nan, -4.0, nan], 1: [-1.0, nan, nan], 2: [-3.0, -3.0, -3.0]}
    for part in ([3, 0], [1, 2]):
        values = torch.tensor([rows[i] for i in part])
        mask = (~values.isnan()).float()
        made.append(SimpleNamespace(index=part, rewards=torch.zeros(2), action_log_probs=values, action_mask=mask))
    seen = []

    class Seeing(type(advantages.create("lens"))):
        def formula(self, rewards: torch.Tensor, further: torch.Tensor | None) -> torch.Tensor:
            seen.append(further)
            return rewards

    step = StepAdvantages(maker(args=SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=2))), made, Seeing())
    for experience in made:
        step.next(experience.rewards)
    assert seen[0].tolist() == [[[-3.0, 2.0], [-1.0, 1.0]], [[-9.0, 3.0], [-4.0, 1.0]]]
