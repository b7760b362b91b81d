# SPDX-License-Identifier: Apache-2.0
"""RS-GRPO against numbers derived by hand, its limits, and the gradient of its objective."""

import math
from itertools import combinations_with_replacement
from math import factorial, prod

import pytest
import torch

from ngrpo.methods import advantages
from tests.fast.run import clip_range


def advantage(rewards: list[float], **options: float) -> list[float]:
    return advantages.compute("rs_grpo", torch.tensor([rewards], dtype=torch.float64), **options)[0].tolist()


def test_by_hand() -> None:
    """One right answer of four, β = 2: exp is e² = 7.389056 and 1, mean 2.597264; ½ (2.844938 − 1) and ½ (.385020 − 1).

    Half right, β = ln 3: exp 3 and 1, mean 2; (3/2 − 1) / ln 3 and (1/2 − 1) / ln 3.
    """
    assert advantage([1.0, 0.0, 0.0, 0.0]) == pytest.approx([0.922469] + [-0.307490] * 3, abs=1e-6)
    half = 0.5 / math.log(3)
    assert advantage([0.0, 1.0, 1.0, 0.0], beta=math.log(3)) == pytest.approx([-half, half, half, -half])
    # Any rewards: 0, 1, 3 at β = ln 2 are exp 1, 2, 8 with mean 11/3.
    expected = [(3 / 11 - 1) / math.log(2), (6 / 11 - 1) / math.log(2), (24 / 11 - 1) / math.log(2)]
    assert advantage([0.0, 1.0, 3.0], beta=math.log(2)) == pytest.approx(expected)


def test_a_shift_of_the_rewards_changes_nothing_and_nothing_overflows() -> None:
    plain = advantage([0.0, 0.25, 1.0], beta=4.0)
    assert advantage([500.0, 500.25, 501.0], beta=4.0) == pytest.approx(plain)
    assert advantage([-1e4, 1e4, -1e4, -1e4], beta=50.0) == pytest.approx([-0.02, 0.06, -0.02, -0.02])


@pytest.mark.parametrize("value", [0.0, 0.3, 1.0, -1e6, 123456.789])
@pytest.mark.parametrize("beta", [0.0, 1e-6, 2.0, 1e3])
def test_equal_rewards_give_exactly_nothing(value: float, beta: float) -> None:
    for size in (1, 3, 8, 64):
        assert not advantages.compute("rs_grpo", torch.full((2, size), value), beta=beta).any()


def test_between_the_mean_and_the_best() -> None:
    """β → 0: the reward less the mean. β → ∞: β A is G − 1 for the best answer and −1 for all others."""
    rewards = [0.0, 0.2, 0.7, 1.0]
    centred = [reward - 0.475 for reward in rewards]
    assert advantage(rewards, beta=0.0) == pytest.approx(centred)
    assert advantage(rewards, beta=1e-8) == pytest.approx(centred, rel=1e-6)
    assert [500 * a for a in advantage(rewards, beta=500.0)] == pytest.approx([-1.0, -1.0, -1.0, 3.0])


def expected_update(z: torch.Tensor, rewards: torch.Tensor, size: int, beta: float) -> torch.Tensor:
    """E[mean_i A_i ∇ log π(x_i)] over all groups of so many answers of a policy over three, exactly."""
    p, total = torch.softmax(z, dim=0), torch.zeros((), dtype=torch.float64)
    for group in combinations_with_replacement(range(3), size):
        counts = [group.count(answer) for answer in range(3)]
        ways = factorial(size) // prod(map(factorial, counts))
        weight = ways * prod(p[answer].item() ** count for answer, count in enumerate(counts))
        values = advantages.compute("rs_grpo", rewards[list(group)].view(1, -1), beta=beta)[0]
        total = total + weight * (values * p.log()[list(group)]).mean()
    return torch.autograd.grad(total, z)[0]


@pytest.mark.parametrize("beta", [0.0, 2.0, 6.0])
def test_the_update_is_the_gradient_of_the_risk_sensitive_objective(beta: float) -> None:
    """∇ (1/β) log E[exp(β r)], but for a share that falls as 1/G: the mean is of the same answers."""
    z = torch.tensor([0.4, -0.3, -0.9], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)
    p = torch.softmax(z, dim=0)
    objective = (p * rewards).sum() if beta == 0.0 else (p * (beta * rewards).exp()).sum().log() / beta
    (true,) = torch.autograd.grad(objective, z)
    away = {size: (expected_update(z, rewards, size, beta) - true).norm() / true.norm() for size in (10, 40)}
    assert away[40].item() < 0.1 and away[10].item() > 3.4 * away[40].item()
    # Other objectives are further away than what a group of 40 leaves.
    (mean,) = torch.autograd.grad((torch.softmax(z, 0) * rewards).sum(), z)
    assert beta == 0.0 or (mean / mean.norm() - true / true.norm()).norm() > 2 * away[40]


def test_the_clip_leaves_a_rare_right_answer_alone() -> None:
    """The only right answer of 64, with β = 1 and large rewards, has 63."""
    made, spec = advantages.create("rs_grpo", beta=1.0), {"name": "rs_grpo", "beta": 1.0}
    assert made.compute(100.0 * torch.eye(64)[:1]).max().item() == pytest.approx(63.0)
    assert clip_range("--rollout.n_samples_per_prompt 64", spec) == ("-64", "64")
    assert clip_range("--rollout.n_samples_per_prompt 8", spec) is None, "OpenRLHF's own clip, 10, is wider"
