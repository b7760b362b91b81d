# SPDX-License-Identifier: Apache-2.0
"""Pass@k Training, PKPO, MaxRL and RS-GRPO: numbers by hand, the gradients of their objectives."""

import math
from collections.abc import Callable
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
    """The advantages of one group in float64."""
    groups = torch.tensor([rewards], dtype=torch.float64)
    return advantages.compute(name, groups, **options)[0].tolist()


# --- Pass@k Training --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right_count", "of_right", "of_wrong"),
    [
        # ρ = 1 - 15/70 = .785714, σ = .410326.
        pytest.param(2, 0.522233, -0.174078, id="two right"),
        pytest.param(4, 0.120386, -0.120386, id="half right"),
        pytest.param(5, 0.0, 0.0, id="every four of eight hold a right one"),
        pytest.param(0, 0.0, 0.0, id="all wrong"),
        pytest.param(8, 0.0, 0.0, id="all right"),
    ],
)
def test_pass_at_k_by_hand(right_count: int, of_right: float, of_wrong: float) -> None:
    """k = 4 of eight responses."""
    wrong_count = 8 - right_count
    rewards = [1.0] * right_count + [0.0] * wrong_count
    expected = [of_right] * right_count + [of_wrong] * wrong_count
    assert advantage("pass_at_k", rewards, k=4) == pytest.approx(expected, abs=1e-6)


def test_pass_at_k_combined() -> None:
    """c = 2 of 8: a quarter of A_4 and three quarters of A_1, which is (1 - 1/4) / √(3/16) = √3 and -1/√3."""
    rewards = [1.0, 1.0] + [0.0] * 6
    combined = advantage("pass_at_k", rewards, k=4, form="combined")
    assert combined[0] == pytest.approx(0.25 * 0.522233 + 0.75 * 3**0.5, abs=1e-6)
    assert combined[-1] == pytest.approx(-0.25 * 0.174078 - 0.75 / 3**0.5, abs=1e-6)


def test_pass_at_k_refuses_fractional_rewards() -> None:
    with pytest.raises(UsageError, match=r"a reward of 0\.5 is neither 0 for a wrong nor 1 for a right"):
        advantage("pass_at_k", [0.0, 0.5, 1.0, 1.0], k=2)


def test_pass_at_k_takes_rewards_within_rounding_of_0_and_1() -> None:
    rewards = [1e-7, 1.0, 1.0 - 1e-6, 0.0]
    assert advantage("pass_at_k", rewards, k=1) == pytest.approx([-1.0, 1.0, 1.0, -1.0])


# --- PKPO -------------------------------------------------------------------------------------------

# For rewards 0, 0.2, 0.5, 1 and k = 2.
PKPO_BY_HAND = pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("s", [0.283333, 0.283333, 0.333333, 0.5]),
        ("loo", [-0.272222, -0.272222, -0.155556, 0.233333]),
        ("loo_minus_one", [0.0, 0.033333, 0.133333, 0.383333]),
    ],
)


@PKPO_BY_HAND
def test_pkpo_by_hand(variant: str, expected: list[float]) -> None:
    unscaled = advantage("pkpo", [0.0, 0.2, 0.5, 1.0], k=2, variant=variant, scaled=False)
    assert unscaled == pytest.approx(expected, abs=1e-6)


@PKPO_BY_HAND
def test_pkpo_is_scaled_by_the_group_s_size_and_follows_the_order_of_the_responses(
    variant: str, expected: list[float]
) -> None:
    of_0, of_0_2, of_0_5, of_1 = (4 * value for value in expected)
    shuffled = advantage("pkpo", [1.0, 0.0, 0.5, 0.2], k=2, variant=variant)
    assert shuffled == pytest.approx([of_1, of_0, of_0_5, of_0_2], abs=4e-6)


def test_pkpo_equal_rewards_give_exactly_nothing() -> None:
    assert advantage("pkpo", [0.3] * 8, k=3) == [0.0] * 8


# --- RS-GRPO ----------------------------------------------------------------------------------------


def test_rs_grpo_of_one_right_response_of_four() -> None:
    """β = 2: exp is e² = 7.389056 and 1, mean 2.597264; ½ (2.844938 − 1) and ½ (.385020 − 1)."""
    expected = [0.922469, -0.307490, -0.307490, -0.307490]
    assert advantage("rs_grpo", [1.0, 0.0, 0.0, 0.0]) == pytest.approx(expected, abs=1e-6)


def test_rs_grpo_of_two_right_responses_of_four() -> None:
    """β = ln 3: exp 3 and 1, mean 2; (3/2 − 1) / ln 3 and (1/2 − 1) / ln 3."""
    half = 0.5 / math.log(3)
    expected = [-half, half, half, -half]
    values = advantage("rs_grpo", [0.0, 1.0, 1.0, 0.0], beta=math.log(3))
    assert values == pytest.approx(expected)


def test_rs_grpo_of_any_rewards() -> None:
    """0, 1, 3 at β = ln 2 are exp 1, 2, 8 with mean 11/3."""
    expected = [
        (3 / 11 - 1) / math.log(2),
        (6 / 11 - 1) / math.log(2),
        (24 / 11 - 1) / math.log(2),
    ]
    assert advantage("rs_grpo", [0.0, 1.0, 3.0], beta=math.log(2)) == pytest.approx(expected)


def test_rs_grpo_sees_no_shift_of_the_rewards() -> None:
    plain = advantage("rs_grpo", [0.0, 0.25, 1.0], beta=4.0)
    shifted = advantage("rs_grpo", [500.0, 500.25, 501.0], beta=4.0)
    assert shifted == pytest.approx(plain)


def test_rs_grpo_never_overflows() -> None:
    expected = [-0.02, 0.06, -0.02, -0.02]
    assert advantage("rs_grpo", [-1e4, 1e4, -1e4, -1e4], beta=50.0) == pytest.approx(expected)


@pytest.mark.parametrize("beta", [0.0, 1e-8])
def test_rs_grpo_tends_to_the_reward_less_the_mean(beta: float) -> None:
    """β → 0. The mean of the rewards is 0.475."""
    rewards = [0.0, 0.2, 0.7, 1.0]
    expected = [reward - 0.475 for reward in rewards]
    assert advantage("rs_grpo", rewards, beta=beta) == pytest.approx(expected, rel=1e-6)


def test_rs_grpo_tends_to_the_best_response() -> None:
    """β → ∞: β A is G − 1 for the best response and −1 for all others."""
    of_beta_500 = advantage("rs_grpo", [0.0, 0.2, 0.7, 1.0], beta=500.0)
    assert [500 * value for value in of_beta_500] == pytest.approx([-1.0, -1.0, -1.0, 3.0])


# --- the update of a policy over three responses ------------------------------------------------------

# A policy is its probabilities of three responses, (3,); an objective maps them to a number.
Objective = Callable[[Tensor], Tensor]


def policy_logits() -> Tensor:
    return torch.tensor([0.4, -0.3, -0.9], dtype=torch.float64, requires_grad=True)


def gradient_of(objective: Objective) -> Tensor:
    """The gradient of an objective of the policy's probabilities to its logits."""
    logits = policy_logits()
    (gradient,) = torch.autograd.grad(objective(torch.softmax(logits, dim=0)), logits)
    return gradient


def expected_update(name: str, rewards: list[float], size: int, **options: Any) -> Tensor:
    """E[mean_i A_i ∇ log π(x_i)] over all groups of ``size`` responses, exactly, to the policy's logits."""

    def update(p: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for group in combinations_with_replacement(range(3), size):
            probability = float(math.factorial(size))
            for response in range(3):
                count = group.count(response)
                probability *= p[response].item() ** count / math.factorial(count)
            rewards_of_group = [rewards[response] for response in group]
            weights = p.new_tensor(advantage(name, rewards_of_group, **options))
            log_probs = p.log()[list(group)]
            total = total + probability * (weights * log_probs).mean()
        return total

    return gradient_of(update)


@pytest.mark.parametrize("variant", ["s", "loo", "loo_minus_one"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_pkpo_is_the_gradient_of_the_expected_best_of_k(variant: str, k: int) -> None:
    rewards = [0.2, 1.0, -0.5]

    def expected_best(p: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for responses in product(range(3), repeat=k):
            best = max(rewards[response] for response in responses)
            total = total + p[list(responses)].prod() * best
        return total

    update = expected_update("pkpo", rewards, size=4, k=k, variant=variant)
    torch.testing.assert_close(update, gradient_of(expected_best))


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("right", range(3))
def test_maxrl_is_the_gradient_of_truncated_maximum_likelihood(size: int, right: int) -> None:
    """Of log p(right) = −Σ_k (1 − p)^k / k, cut after k = G − 1."""
    rewards = [0.0, 0.0, 0.0]
    rewards[right] = 1.0

    def truncated_log_likelihood(p: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for k in range(1, size):
            total = total - (1 - p[right]) ** k / k
        return total

    update = expected_update("maxrl", rewards, size)
    torch.testing.assert_close(update, gradient_of(truncated_log_likelihood), atol=1e-12, rtol=0.0)


@pytest.mark.parametrize("beta", [0.0, 2.0, 6.0])
def test_rs_grpo_is_the_gradient_of_the_risk_sensitive_objective(beta: float) -> None:
    """∇ (1/β) log E[exp(β r)], but for a share that falls as 1/G: the mean is of the same responses."""
    rewards = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)

    def mean_reward(p: Tensor) -> Tensor:
        return (p * rewards).sum()

    def risk_sensitive(p: Tensor) -> Tensor:
        if beta == 0.0:
            return mean_reward(p)
        return (p * (beta * rewards).exp()).sum().log() / beta

    true_gradient = gradient_of(risk_sensitive)

    def relative_error(size: int) -> float:
        update = expected_update("rs_grpo", rewards.tolist(), size, beta=beta)
        return ((update - true_gradient).norm() / true_gradient.norm()).item()

    error_of_40 = relative_error(40)
    assert error_of_40 < 0.1
    assert relative_error(10) > 3.4 * error_of_40
    if beta > 0.0:
        # Another objective's direction is further away than what a group of 40 leaves.
        of_mean = gradient_of(mean_reward)
        between_directions = of_mean / of_mean.norm() - true_gradient / true_gradient.norm()
        assert between_directions.norm() > 2 * error_of_40


# --- OpenRLHF's clip of ±10 is widened where the only right response of a group has more ---------------


@pytest.mark.parametrize(
    ("spec", "size", "reward", "largest", "clip"),
    [
        pytest.param(
            {"name": "pkpo", "k": 16},
            32,
            1.0,
            16.0,
            "480000",
            id="pkpo",
        ),
        pytest.param(
            {"name": "pkpo", "k": 2, "k_end": 8},
            32,
            100.0,
            200.0,
            "240000",
            id="pkpo with a k that grows",
        ),
        pytest.param(
            {"name": "maxrl"},
            64,
            1.0,
            63.0,
            "63",
            id="maxrl",
        ),
        pytest.param(
            {"name": "rs_grpo", "beta": 1.0},
            64,
            100.0,
            63.0,
            "64",
            id="rs_grpo",
        ),
        pytest.param(
            {"name": "group_norm"},
            128,
            1.0,
            127.0 / 128.0**0.5,
            "12",
            id="group_norm",
        ),
    ],
)
def test_a_rare_right_response_is_not_clipped(
    spec: dict[str, Any], size: int, reward: float, largest: float, clip: str
) -> None:
    one_right = reward * torch.eye(size)[:1]
    values = advantages.create(**spec).compute(one_right)
    assert values.max().item() == pytest.approx(largest)
    assert clip_range(f"--rollout.n_samples_per_prompt {size}", spec) == (f"-{clip}", clip)


def test_openrlhf_s_own_clip_stays_where_it_is_enough() -> None:
    assert clip_range("--rollout.n_samples_per_prompt 11", {"name": "maxrl"}) is None
    assert clip_range("--rollout.n_samples_per_prompt 100", {"name": "group_norm"}) is None
    assert clip_range("--rollout.n_samples_per_prompt 8", {"name": "rs_grpo", "beta": 1.0}) is None


REPEAT = {"name": "repeat", "prompts": 3, "answers": 4}


@pytest.mark.parametrize(
    ("spec", "clip"),
    [
        pytest.param({"name": "maxrl"}, ("-19", "19"), id="maxrl"),
        pytest.param({"name": "rs_grpo", "beta": 1}, ("-20", "20"), id="rs_grpo"),
    ],
)
def test_the_clip_is_for_all_responses_that_are_compared(spec: dict[str, Any], clip: tuple[str, str]) -> None:
    """8 responses and 3 × 4 of a second round: the only right one of 20 has 19."""
    words = "--rollout.n_samples_per_prompt 8"
    assert clip_range(words, spec, second_round=REPEAT) == clip


@pytest.mark.parametrize(
    "second_round",
    [
        pytest.param({**REPEAT, "group": "kept"}, id="groups of their own"),
        pytest.param({"name": "igrpo"}, id="igrpo"),
    ],
)
def test_the_clip_is_openrlhf_s_where_a_second_round_is_not_compared(second_round: dict[str, Any]) -> None:
    words = "--rollout.n_samples_per_prompt 8"
    assert clip_range(words, {"name": "maxrl"}, second_round=second_round) is None


PKPO_GROUPS = [
    (2, 1),
    (3, 2),
    (5, 1),
    (5, 2),
    (5, 4),
]


@pytest.mark.parametrize(
    ("variant", "size", "k"),
    [
        *(("loo", size, k) for size, k in PKPO_GROUPS),
        # loo leaves one response out, so its k is below the group's size.
        *(("s", size, k) for size, k in [*PKPO_GROUPS, (5, 5)]),
        *(("loo_minus_one", size, k) for size, k in [*PKPO_GROUPS, (5, 5)]),
    ],
)
def test_pkpo_s_clip_is_beyond_all_that_its_rewards_come_to(variant: str, size: int, k: int) -> None:
    """All groups of up to five responses with rewards at either bound; a reward beyond them is refused."""
    pkpo = advantages.create("pkpo", k=k, variant=variant)
    _, high = clip_range(f"--rollout.n_samples_per_prompt {size}", pkpo.spec())
    rewards = torch.tensor(list(product([-1e4, 1e4], repeat=size)))
    assert pkpo.compute(rewards).abs().max().item() <= float(high)
    with pytest.raises(UsageError, match=r"a reward of 10001 is not in \[-10000, 10000\].* Divide"):
        pkpo.compute(rewards + 1.0)
    with pytest.raises(UsageError, match="a reward of -10001 is"):
        pkpo.compute(rewards - 1.0)


# --- k -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pass_at_k", "pkpo"])
def test_k_must_fit_the_group(name: str) -> None:
    with pytest.raises(UsageError, match=r"k=5: must be in \[1, 4\]"):
        advantage(name, [0.0, 1.0, 1.0, 0.0], k=5)


@pytest.mark.parametrize("name", ["pass_at_k", "pkpo"])
def test_the_last_k_must_fit_the_group(name: str) -> None:
    flags = Flags(["--rollout.n_samples_per_prompt", "4"])
    with pytest.raises(UsageError, match=r"k=8: must be in \[1, 4\]"):
        advantages.create(name, k=2, k_end=8).flags(flags)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, [8, 8, 8, 8, 8], id="constant"),
        pytest.param(
            {"k_end": 1, "k_steps": 10},
            [8, 8, 8, 1, 1],
            id="step",
        ),
        # 5.6 is rounded to 6, and 5 to itself.
        pytest.param(
            {"k_end": 2, "k_steps": 10, "k_change": "linear"},
            [8, 6, 5, 2, 2],
            id="linear",
        ),
    ],
)
def test_k_over_the_run(options: dict[str, Any], expected: list[int]) -> None:
    pkpo = advantages.create("pkpo", k=8, **options)
    assert [pkpo.at_step(step).k for step in (0, 4, 5, 10, 500)] == expected


def test_the_trainer_tells_its_step() -> None:
    """A resumed run continues to count from its checkpoint's step."""

    class Trainer:
        vllm_engines = None
        experience_maker = makers_state()

        def train_step(self, samples: object, global_step: int) -> tuple[dict, int]:
            return {"seen": self.experience_maker.training_step}, global_step + 1

    assert trainer(Trainer)().train_step([], 70) == ({"seen": 70}, 71)
