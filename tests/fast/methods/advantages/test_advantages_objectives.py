# SPDX-License-Identifier: Apache-2.0
"""Pass@k Training, PKPO, MaxRL and RS-GRPO: numbers by hand, the gradients of their objectives."""

import math
from itertools import combinations_with_replacement, product
from typing import Any

import pytest
import torch
from torch import Tensor

from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import advantages
from ngrpo.trainers.openrlhf.trainer import trainer
from perturbations.errors import UsageError
from tests.support.openrlhf_doubles import makers_state
from tests.support.run import clip_range


def advantage(name: str, rewards: list[float], **options: Any) -> list[float]:
    return advantages.compute(name, torch.tensor([rewards], dtype=torch.float64), **options)[0].tolist()


# --- Pass@k Training --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        (2, (0.522233, -0.174078)),  # ρ = 1 - 15/70 = .785714, σ = .410326
        (4, (0.120386, -0.120386)),
        (5, (0.0, 0.0)),  # every four of eight hold a right one
        (0, (0.0, 0.0)),
        (8, (0.0, 0.0)),
    ],
)
def test_pass_at_k(right: int, expected: tuple[float, float]) -> None:
    found = advantage("pass_at_k", [1.0] * right + [0.0] * (8 - right), k=4)
    assert found == pytest.approx([expected[0]] * right + [expected[1]] * (8 - right), abs=1e-6)


def test_pass_at_k_combined() -> None:
    """c = 2 of 8: a quarter of A_4 and three quarters of A_1, which is (1 - 1/4) / √(3/16) = √3 and -1/√3."""
    found = advantage("pass_at_k", [1.0, 1.0] + [0.0] * 6, k=4, form="combined")
    assert found[0] == pytest.approx(0.25 * 0.522233 + 0.75 * 3**0.5, abs=1e-6)
    assert found[-1] == pytest.approx(-0.25 * 0.174078 - 0.75 / 3**0.5, abs=1e-6)


def test_pass_at_k_takes_rewards_of_0_and_1_only() -> None:
    with pytest.raises(UsageError, match=r"a reward of 0\.5 is neither 0 for a wrong nor 1 for a right"):
        advantage("pass_at_k", [0.0, 0.5, 1.0, 1.0], k=2)
    assert advantage("pass_at_k", [1e-7, 1.0, 1.0 - 1e-6, 0.0], k=1) == pytest.approx([-1.0, 1.0, 1.0, -1.0])


# --- PKPO -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("s", [0.283333, 0.283333, 0.333333, 0.5]),
        ("loo", [-0.272222, -0.272222, -0.155556, 0.233333]),
        ("loo_minus_one", [0.0, 0.033333, 0.133333, 0.383333]),
    ],
)
def test_pkpo(variant: str, expected: list[float]) -> None:
    found = advantage("pkpo", [0.0, 0.2, 0.5, 1.0], k=2, variant=variant, scaled=False)
    assert found == pytest.approx(expected, abs=1e-6)
    shuffled = advantage("pkpo", [1.0, 0.0, 0.5, 0.2], k=2, variant=variant)
    assert shuffled == pytest.approx([4 * expected[i] for i in (3, 0, 2, 1)], abs=4e-6)


def test_pkpo_equal_rewards_give_exactly_nothing() -> None:
    assert advantage("pkpo", [0.3] * 8, k=3) == [0.0] * 8


# --- RS-GRPO ----------------------------------------------------------------------------------------


def test_rs_grpo() -> None:
    """One right answer of four, β = 2: exp is e² = 7.389056 and 1, mean 2.597264; ½ (2.844938 − 1) and ½ (.385020 − 1).

    Half right, β = ln 3: exp 3 and 1, mean 2; (3/2 − 1) / ln 3 and (1/2 − 1) / ln 3.
    """
    assert advantage("rs_grpo", [1.0, 0.0, 0.0, 0.0]) == pytest.approx([0.922469] + [-0.307490] * 3, abs=1e-6)
    half = 0.5 / math.log(3)
    assert advantage("rs_grpo", [0.0, 1.0, 1.0, 0.0], beta=math.log(3)) == pytest.approx([-half, half, half, -half])
    # Any rewards: 0, 1, 3 at β = ln 2 are exp 1, 2, 8 with mean 11/3.
    expected = [(share / 11 - 1) / math.log(2) for share in (3, 6, 24)]
    assert advantage("rs_grpo", [0.0, 1.0, 3.0], beta=math.log(2)) == pytest.approx(expected)


def test_rs_grpo_sees_no_shift_of_the_rewards_and_never_overflows() -> None:
    plain = advantage("rs_grpo", [0.0, 0.25, 1.0], beta=4.0)
    assert advantage("rs_grpo", [500.0, 500.25, 501.0], beta=4.0) == pytest.approx(plain)
    assert advantage("rs_grpo", [-1e4, 1e4, -1e4, -1e4], beta=50.0) == pytest.approx([-0.02, 0.06, -0.02, -0.02])


def test_rs_grpo_is_between_the_mean_and_the_best() -> None:
    """β → 0: the reward less the mean. β → ∞: β A is G − 1 for the best answer and −1 for all others."""
    rewards = [0.0, 0.2, 0.7, 1.0]
    for beta in (0.0, 1e-8):
        assert advantage("rs_grpo", rewards, beta=beta) == pytest.approx([r - 0.475 for r in rewards], rel=1e-6)
    assert [500 * a for a in advantage("rs_grpo", rewards, beta=500.0)] == pytest.approx([-1.0, -1.0, -1.0, 3.0])


# --- the update of a policy over three answers --------------------------------------------------------


def updated(name: str, rewards: list[float], size: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """E[mean_i A_i ∇ log π(x_i)] over all groups of ``size`` answers, exactly; the logits, and π of each answer."""
    z = torch.tensor([0.4, -0.3, -0.9], dtype=torch.float64, requires_grad=True)
    p, total = torch.softmax(z, dim=0), torch.zeros((), dtype=torch.float64)
    for group in combinations_with_replacement(range(3), size):
        counts = [group.count(answer) for answer in range(3)]
        ways = math.factorial(size) // math.prod(map(math.factorial, counts))
        weight = ways * math.prod(p[answer].item() ** count for answer, count in enumerate(counts))
        values = p.new_tensor(advantage(name, [rewards[answer] for answer in group], **options))
        total = total + weight * (values * p.log()[list(group)]).mean()
    return torch.autograd.grad(total, z, retain_graph=True)[0], z, p


@pytest.mark.parametrize("variant", ["s", "loo", "loo_minus_one"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_pkpo_is_the_gradient_of_the_expected_best_of_k(variant: str, k: int) -> None:
    rewards = [0.2, 1.0, -0.5]
    update, z, p = updated("pkpo", rewards, size=4, k=k, variant=variant)
    expected_best = sum(p[list(o)].prod() * max(rewards[i] for i in o) for o in product(range(3), repeat=k))
    torch.testing.assert_close(update, *torch.autograd.grad(expected_best, z))


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("right", range(3))
def test_maxrl_is_the_gradient_of_truncated_maximum_likelihood(size: int, right: int) -> None:
    update, z, p = updated("maxrl", [float(answer == right) for answer in range(3)], size)
    objective = -sum((1 - p[right]) ** k / k for k in range(1, size))
    torch.testing.assert_close(update, *torch.autograd.grad(objective, z), atol=1e-12, rtol=0.0)


@pytest.mark.parametrize("beta", [0.0, 2.0, 6.0])
def test_rs_grpo_is_the_gradient_of_the_risk_sensitive_objective(beta: float) -> None:
    """∇ (1/β) log E[exp(β r)], but for a share that falls as 1/G: the mean is of the same answers."""
    rewards, away = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64), {}
    for size in (10, 40):
        update, z, p = updated("rs_grpo", rewards.tolist(), size, beta=beta)
        mean_reward = (p * rewards).sum()
        objective = mean_reward if beta == 0.0 else (p * (beta * rewards).exp()).sum().log() / beta
        true, of_mean = (torch.autograd.grad(each, z, retain_graph=True)[0] for each in (objective, mean_reward))
        away[size] = (update - true).norm() / true.norm()
    assert away[40].item() < 0.1 and away[10].item() > 3.4 * away[40].item()
    # Other objectives are further away than what a group of 40 leaves.
    assert beta == 0.0 or (of_mean / of_mean.norm() - true / true.norm()).norm() > 2 * away[40]


# --- OpenRLHF's clip of ±10 is widened where the only right answer of a group has more ----------------


@pytest.mark.parametrize(
    ("spec", "size", "reward", "largest", "clip"),
    [
        ({"name": "pkpo", "k": 16}, 32, 1.0, 16.0, "480000"),
        ({"name": "pkpo", "k": 2, "k_end": 8}, 32, 100.0, 200.0, "240000"),
        ({"name": "maxrl"}, 64, 1.0, 63.0, "63"),
        ({"name": "rs_grpo", "beta": 1.0}, 64, 100.0, 63.0, "64"),
    ],
)
def test_a_rare_right_answer_is_not_clipped(
    spec: dict[str, Any], size: int, reward: float, largest: float, clip: str
) -> None:
    found = advantages.create(**spec).compute(reward * torch.eye(size)[:1])
    assert found.max().item() == pytest.approx(largest)
    assert clip_range(f"--rollout.n_samples_per_prompt {size}", spec) == (f"-{clip}", clip)


def test_openrlhf_s_own_clip_stays_where_it_is_enough() -> None:
    assert clip_range("--rollout.n_samples_per_prompt 11", {"name": "maxrl"}) is None
    assert clip_range("--rollout.n_samples_per_prompt 8", {"name": "rs_grpo", "beta": 1.0}) is None


def test_the_clip_is_for_all_responses_that_are_compared() -> None:
    """8 responses and 3 × 4 of a second round: the only right one of 20 has 19."""
    words, both = "--rollout.n_samples_per_prompt 8", {"name": "repeat", "prompts": 3, "answers": 4}
    assert clip_range(words, {"name": "maxrl"}, second_round=both) == ("-19", "19")
    assert clip_range(words, {"name": "rs_grpo", "beta": 1}, second_round=both) == ("-20", "20")
    for alone in ({**both, "group": "kept"}, {"name": "igrpo"}):
        assert clip_range(words, {"name": "maxrl"}, second_round=alone) is None


@pytest.mark.parametrize("variant", ["s", "loo", "loo_minus_one"])
def test_pkpo_s_clip_is_beyond_all_that_its_rewards_come_to(variant: str) -> None:
    """All groups of up to five answers with rewards at either bound; a reward beyond them is refused."""
    for size, k in ((2, 1), (3, 2), (5, 1), (5, 2), (5, 4), (5, 5)):
        if k == size and variant == "loo":
            continue
        made = advantages.create("pkpo", k=k, variant=variant)
        bound = float(clip_range(f"--rollout.n_samples_per_prompt {size}", made.spec())[1])
        rewards = torch.tensor(list(product([-1e4, 1e4], repeat=size)))
        assert made.compute(rewards).abs().max().item() <= bound
        with pytest.raises(UsageError, match=r"a reward of 10001 is not in \[-10000, 10000\].* Divide"):
            made.compute(rewards + 1.0)
        with pytest.raises(UsageError, match="a reward of -10001 is"):
            made.compute(rewards - 1.0)


# --- k -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pass_at_k", "pkpo"])
def test_k_must_fit_the_group(name: str) -> None:
    with pytest.raises(UsageError, match=r"k=5: must be in \[1, 4\]"):
        advantage(name, [0.0, 1.0, 1.0, 0.0], k=5)
    with pytest.raises(UsageError, match=r"k=8: must be in \[1, 4\]"):
        advantages.create(name, k=2, k_end=8).flags(Flags(["--rollout.n_samples_per_prompt", "4"]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [8, 8, 8, 8, 8]),
        ({"k_end": 1, "k_steps": 10}, [8, 8, 8, 1, 1]),
        ({"k_end": 2, "k_steps": 10, "k_change": "linear"}, [8, 6, 5, 2, 2]),  # 5.6 is rounded
    ],
)
def test_k_over_the_run(options: dict[str, Any], expected: list[int]) -> None:
    made = advantages.create("pkpo", k=8, **options)
    assert [made.at_step(step).k for step in (0, 4, 5, 10, 500)] == expected


def test_the_trainer_tells_its_step() -> None:
    """A resumed run continues to count from its checkpoint's step."""

    class Trainer:
        vllm_engines = None
        experience_maker = makers_state()

        def train_step(self, samples: object, global_step: int) -> tuple[dict, int]:
            return {"seen": self.experience_maker.training_step}, global_step + 1

    assert trainer(Trainer)().train_step([], 70) == ({"seen": 70}, 71)
