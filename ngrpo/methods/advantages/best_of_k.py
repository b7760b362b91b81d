# SPDX-License-Identifier: Apache-2.0
"""The best of k responses: Pass@k Training (arXiv 2508.10751) and PKPO (arXiv 2505.15201)."""

from dataclasses import dataclass
from functools import lru_cache
from math import comb

import torch
from torch import Tensor

from ngrpo.methods.advantages import register
from ngrpo.methods.advantages.base import ROUNDING, AnnealedK
from perturbations import UsageError, option


@register("pass_at_k")
@dataclass(frozen=True, kw_only=True)
class PassAtK(AnnealedK):
    """Pass@k Training: the mean advantage of a response over all groups of k that hold it; rewards of 0 and 1."""

    paper = "Pass@k Training, arXiv 2508.10751"
    sums_to_zero = True

    form: str = option(
        "pass_at_k",
        "Pass@k alone, or combined with Pass@1 by the share of right responses",
        choices=("pass_at_k", "combined"),
    )

    def check_rewards(self, rewards: Tensor) -> None:
        super().check_rewards(rewards)
        neither = rewards[(rewards.abs() > ROUNDING) & ((rewards - 1.0).abs() > ROUNDING)]
        fix = "Let the reward function give those, or use --advantage pkpo, which takes any rewards."
        self.refuse(neither, f"neither 0 for a wrong nor 1 for a right response. {fix}")

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """(1 − ρ)/σ for a right response, (1 − ρ − C(N−c−1, k−1)/C(N−1, k−1))/σ for a wrong one; 0 where σ is 0.

        ρ = 1 − C(N−c, k)/C(N, k) with c right of N, σ = √(ρ (1 − ρ)). Combined: (c/N) A_k + (1 − c/N) A_1.
        """
        right = rewards > 0.5
        size, number = rewards.shape[1], right.sum(dim=-1)
        values = _table(size, self.k)
        if self.form == "combined":
            share = torch.arange(size + 1, dtype=torch.float64).unsqueeze(-1) / size
            values = share * values + (1.0 - share) * _table(size, 1)
        values = values.to(rewards)[number]
        return torch.where(right, values[:, :1], values[:, 1:])


def _table(n: int, k: int) -> Tensor:
    """The advantages of a right and a wrong response by how many of n are right, (n + 1, 2) float64."""
    rows = []
    for c in range(n + 1):
        missed = comb(n - c, k) / comb(n, k)
        deviation = (missed * (1.0 - missed)) ** 0.5
        wrong = comb(n - c - 1, k - 1) / comb(n - 1, k - 1) if c < n else 0.0
        rows.append([missed / deviation, (missed - wrong) / deviation] if deviation else [0.0, 0.0])
    return torch.tensor(rows, dtype=torch.float64)


_LEAST = {"s": 0, "loo": 1, "loo_minus_one": 0}
# Rewards go up to this, and with them values up to 3 k times it: k for s, and for loo's baseline k n / (n − 1) more.
_LARGEST = 10_000


@register("pkpo")
@dataclass(frozen=True, kw_only=True)
class PKPO(AnnealedK):
    """PKPO: what a response adds to the expected maximum of k rewards, of any size."""

    paper = "PKPO, arXiv 2505.15201"

    variant: str = option(
        "loo_minus_one",
        "the estimator alone (s), less a leave-one-out baseline, or less that of k - 1 responses",
        choices=("s", "loo", "loo_minus_one"),
    )
    scaled: bool = option(True, "multiply by the group's size, since the loss averages over its responses")

    def check_group(self, size: int) -> None:
        """Also: a baseline without the response itself needs more than k others, and one of k - 1 a k of at least 2."""
        super().check_group(size)
        if self.k + _LEAST[self.variant] > size:
            least = f"must be below the group's {size} responses (--rollout.n_samples_per_prompt)"
            fix = "Lower it, or take variant=loo_minus_one"
            raise UsageError(f"advantage pkpo: k={self.k} with variant=loo: {least}. {fix}.")

    def largest(self, size: int) -> float:
        """An only right response has k times its reward, and less of a baseline."""
        return 3.0 * _LARGEST * max(self.k, self.k_end or 1)

    def check_rewards(self, rewards: Tensor) -> None:
        super().check_rewards(rewards)
        limits = f"[-{_LARGEST}, {_LARGEST}], beyond which the clip would cut its advantage"
        self.refuse(rewards[rewards.abs() > _LARGEST], f"not in {limits}. Divide the rewards by a constant.")

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """s_i is the mean, over all sets of k responses, of the maximum of sets with i, times their share.

        loo: less k/(n−1) times the mean maximum of k others; loo_minus_one: less k/n times that of k − 1 others.
        """
        wide = rewards.double()
        if self.variant == "loo_minus_one" and self.k > 1:
            wide = wide - wide[:, :1]  # unchanged by it, and so a group of equal rewards gives exactly 0
        ordered, order = wide.sort(dim=-1)
        values = ordered @ _matrix(rewards.shape[1], self.k, self.variant).to(wide.device).T
        values = values * (rewards.shape[1] if self.scaled else 1.0)
        return torch.empty_like(wide).scatter(-1, order, values).to(rewards.dtype)


@lru_cache
def _matrix(n: int, k: int, variant: str) -> Tensor:
    """What each response, by its rank, gets of each reward, by its rank: (n, n) float64."""

    def baseline(i: int, j: int) -> float:
        if j == i or variant == "s" or (variant == "loo_minus_one" and k == 1):
            return 0.0
        rank = j - (j > i)  # among the others
        if variant == "loo":
            return k / (n - 1) * comb(rank, k - 1) / comb(n - 1, k)
        return k / n * comb(rank, k - 2) / comb(n - 1, k - 1)

    def own(i: int, j: int) -> float:
        if j < i:
            return 0.0
        ways = comb(i, k - 1) if j == i else comb(j - 1, k - 2) if k > 1 else 0
        return ways / comb(n, k)

    return torch.tensor([[own(i, j) - baseline(i, j) for j in range(n)] for i in range(n)], dtype=torch.float64)
