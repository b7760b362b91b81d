# SPDX-License-Identifier: Apache-2.0
"""Pass@k Training and PKPO: numbers by hand, every subset counted out, and PKPO's gradient over all outcomes."""

from itertools import combinations, product
from statistics import mean, pstdev

import pytest
import torch

from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import advantages
from ngrpo.trainers.openrlhf.trainer import trainer
from perturbations.errors import UsageError
from tests.fast.run import clip_range


def advantage(name: str, rewards: list[float], **options: object) -> list[float]:
    return advantages.compute(name, torch.tensor([rewards]), **options)[0].tolist()


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


def test_pass_at_k_counts_every_group_of_k() -> None:
    """An answer's advantage is the mean, over the groups of k with it, of (best - mean best) / deviation."""
    rewards = [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    for k in (1, 2, 3, 4):
        groups = list(combinations(range(6), k))
        best = [max(rewards[i] for i in group) for group in groups]
        expected = [
            mean((b - mean(best)) / pstdev(best) for b, group in zip(best, groups) if i in group) for i in range(6)
        ]
        found = advantage("pass_at_k", rewards, k=k)
        assert found == pytest.approx(expected, abs=1e-6) and sum(found) == pytest.approx(0.0, abs=1e-5)


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

REWARDS = [0.0, 0.2, 0.5, 1.0]


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("s", [0.283333, 0.283333, 0.333333, 0.5]),
        ("loo", [-0.272222, -0.272222, -0.155556, 0.233333]),
        ("loo_minus_one", [0.0, 0.033333, 0.133333, 0.383333]),
    ],
)
def test_pkpo(variant: str, expected: list[float]) -> None:
    found = advantage("pkpo", REWARDS, k=2, variant=variant, scaled=False)
    assert found == pytest.approx(expected, abs=1e-6)
    shuffled = advantage("pkpo", [1.0, 0.0, 0.5, 0.2], k=2, variant=variant)
    assert shuffled == pytest.approx([4 * expected[i] for i in (3, 0, 2, 1)], abs=4e-6)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pkpo_counts_every_set_of_k(k: int) -> None:
    rewards = [0.3, -1.0, 2.0, 0.3, 0.7, -1.0]
    n = len(rewards)

    def best(size: int, among: list[int]) -> float:
        return mean(max(rewards[i] for i in chosen) for chosen in combinations(among, size))

    for i in range(n):
        others = [j for j in range(n) if j != i]
        s = sum(max(rewards[j] for j in chosen) for chosen in combinations(range(n), k) if i in chosen)
        s /= len(list(combinations(range(n), k)))
        expected = {
            "s": s,
            "loo": s - k / (n - 1) * best(k, others),
            "loo_minus_one": s - k / n * best(k - 1, others) if k > 1 else s,
        }
        for variant, value in expected.items():
            found = advantage("pkpo", rewards, k=k, variant=variant, scaled=False)
            assert found[i] == pytest.approx(value, abs=1e-6), (variant, i)


@pytest.mark.parametrize("variant", ["s", "loo", "loo_minus_one"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_pkpo_is_the_gradient_of_the_expected_best_of_k(variant: str, k: int) -> None:
    """Over all 3^4 outcomes of four answers of one policy: E[mean_i A_i ∇ log π(x_i)] = ∇ E[max of k], exactly."""
    z = torch.tensor([0.4, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    g = torch.tensor([0.2, 1.0, -0.5], dtype=torch.float64)
    p = torch.softmax(z, dim=0)
    expected_best = sum(p[list(o)].prod() * g[list(o)].max() for o in product(range(3), repeat=k))
    (true,) = torch.autograd.grad(expected_best, z, retain_graph=True)
    outcomes = torch.tensor(list(product(range(3), repeat=4)))
    weights = advantages.compute("pkpo", g[outcomes], k=k, variant=variant)
    estimates = (p.detach()[outcomes].prod(-1) * (weights * p.log()[outcomes]).mean(-1)).sum()
    (found,) = torch.autograd.grad(estimates, z)
    torch.testing.assert_close(found, true)


def test_pkpo_is_not_clipped_where_right_answers_are_rare() -> None:
    """One right answer of 32 has k = 16 times its reward, beyond OpenRLHF's clip of ±10."""
    made, right = advantages.create("pkpo", k=16), torch.eye(32)[:1]
    assert made.compute(right).max().item() == pytest.approx(16.0)
    given = "--rollout.n_samples_per_prompt 32"
    assert clip_range(given, {"name": "pkpo", "k": 16}) == ("-480000", "480000")
    assert clip_range(given, {"name": "pkpo", "k": 2, "k_end": 8}) == ("-240000", "240000")


def test_pkpo_equal_rewards_give_exactly_nothing() -> None:
    assert advantage("pkpo", [0.3] * 8, k=3) == [0.0] * 8


# --- k -----------------------------------------------------------------------------------------------


def test_k_must_fit_the_group() -> None:
    for name in ("pass_at_k", "pkpo"):
        with pytest.raises(UsageError, match=r"k=5: must be in \[1, 4\]"):
            advantage(name, [0.0, 1.0, 1.0, 0.0], k=5)
        with pytest.raises(UsageError, match=r"k=8: must be in \[1, 4\]"):
            advantages.create(name, k=2, k_end=8).flags(Flags(["--rollout.n_samples_per_prompt", "4"]))
        with pytest.raises(UsageError, match=r"k=4: must be in \[1, 1\]"):
            advantages.create(name).flags(Flags())
    with pytest.raises(UsageError, match=r"k=4 with variant=loo: must be below the group's 4 responses"):
        advantage("pkpo", REWARDS, k=4, variant="loo")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [8, 8, 8, 8, 8]),
        ({"k_end": 1, "k_steps": 10}, [8, 8, 8, 1, 1]),
        ({"k_end": 2, "k_steps": 10, "k_change": "linear"}, [8, 6, 5, 2, 2]),  # 5.6 is rounded
    ],
)
def test_k_over_the_run(options: dict[str, object], expected: list[int]) -> None:
    made = advantages.create("pkpo", k=8, **options)
    assert [made.at_step(step).k for step in (0, 4, 5, 10, 500)] == expected


def test_the_trainer_tells_its_step() -> None:
    """A resumed run goes on counting where its checkpoint stood."""

    class Trainer:
        vllm_engines = None

        def __init__(self) -> None:
            self.experience_maker = type("Maker", (), {"step_measures": {}})()

        def train_step(self, samples: object, global_step: int) -> tuple[dict, int]:
            assert self.experience_maker.training_step == global_step
            return {}, global_step + 1

    assert trainer(Trainer)().train_step([], 70) == ({}, 71)
