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
        is_wrong = rewards.abs() <= ROUNDING
        is_right = (rewards - 1.0).abs() <= ROUNDING
        self.refuse(
            rewards[~is_wrong & ~is_right],
            "neither 0 for a wrong nor 1 for a right response. Let the reward function give those, or use --advantage"
            " pkpo, which takes any rewards.",
        )

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """(1 − ρ)/σ for a right response, (1 − ρ − C(N−c−1, k−1)/C(N−1, k−1))/σ for a wrong one; 0 where σ is 0.

        ρ = 1 − C(N−c, k)/C(N, k) with c right of N, σ = √(ρ (1 − ρ)). Combined: (c/N) A_k + (1 − c/N) A_1.
        """
        is_right = rewards > 0.5
        right_count = is_right.sum(dim=-1)  # (P,)
        size = rewards.shape[1]
        table = _table(size, self.k)
        if self.form == "combined":
            share_right = torch.arange(size + 1, dtype=torch.float64).unsqueeze(-1) / size
            table = share_right * table + (1.0 - share_right) * _table(size, 1)
        advantage_pairs = table.to(rewards)[right_count]  # (P, 2)
        return torch.where(is_right, advantage_pairs[:, :1], advantage_pairs[:, 1:])


def _table(n: int, k: int) -> Tensor:
    """The advantages of a right and of a wrong response, (n + 1, 2) float64: row c is for c right responses of n."""
    rows = []
    for c in range(n + 1):
        no_right = comb(n - c, k) / comb(n, k)  # 1 − ρ: the share of sets of k that hold no right response
        deviation = (no_right * (1.0 - no_right)) ** 0.5
        if not deviation:
            rows.append([0.0, 0.0])
            continue
        no_right_beside_wrong = comb(n - c - 1, k - 1) / comb(n - 1, k - 1) if c < n else 0.0
        advantage_of_right = no_right / deviation
        advantage_of_wrong = (no_right - no_right_beside_wrong) / deviation
        rows.append([advantage_of_right, advantage_of_wrong])
    return torch.tensor(rows, dtype=torch.float64)


# How many responses a group must have beyond k.
_BEYOND_K = {"s": 0, "loo": 1, "loo_minus_one": 0}
# The largest reward. An advantage is at most 3 k times as large: k for s, and k n / (n − 1) for the baseline of loo.
_LARGEST_REWARD = 10_000


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
        """Also: the baseline of loo is of k responses besides the response itself."""
        super().check_group(size)
        if self.k + _BEYOND_K[self.variant] > size:
            raise UsageError(
                f"advantage pkpo: k={self.k} with variant=loo: must be below the group's {size} responses"
                " (--rollout.n_samples_per_prompt). Lower it, or take variant=loo_minus_one."
            )

    def largest(self, size: int) -> float:
        """A bound: k times the reward, and the baseline."""
        return 3.0 * _LARGEST_REWARD * max(self.k, self.k_end or 1)

    def check_rewards(self, rewards: Tensor) -> None:
        super().check_rewards(rewards)
        self.refuse(
            rewards[rewards.abs() > _LARGEST_REWARD],
            f"not in [-{_LARGEST_REWARD}, {_LARGEST_REWARD}], beyond which the clip would cut its advantage."
            " Divide the rewards by a constant.",
        )

    def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
        """s_i − b_i, times n if ``scaled``, for a group of n responses.

        s_i = Σ max_{j∈S} r_j / C(n, k) over all sets S of k responses that hold i. The baseline b_i is 0 for s. For loo
        it is k/(n−1) times the mean of max r_j over all sets of k other responses; for loo_minus_one k/n times that
        over all sets of k − 1 others, and 0 for k = 1.
        """
        wide = rewards.double()
        if self.variant == "loo_minus_one" and self.k > 1:
            # To subtract one number from all rewards changes none of these advantages, and a group of equal rewards
            # then gives exactly 0.
            wide = wide - wide[:, :1]
        size = rewards.shape[1]
        sorted_rewards, order = wide.sort(dim=-1)  # (P, G) each
        by_rank = sorted_rewards @ _matrix(size, self.k, self.variant).to(wide.device).T
        by_rank = by_rank * (size if self.scaled else 1.0)
        return torch.empty_like(wide).scatter(-1, order, by_rank).to(rewards.dtype)


@lru_cache
def _matrix(n: int, k: int, variant: str) -> Tensor:
    """The advantages as a linear map of the sorted rewards, (n, n) float64.

    Row i has the factors of all rewards, by their rank j from the smallest, in the advantage of the response of rank i.
    """
    rows = []
    for i in range(n):
        factors = []
        for j in range(n):
            factors.append(_estimate(n, k, i, j) - _baseline(n, k, variant, i, j))
        rows.append(factors)
    return torch.tensor(rows, dtype=torch.float64)


def _estimate(n: int, k: int, i: int, j: int) -> float:
    """The share of all sets of k responses that hold the one of rank i, and whose best response is that of rank j."""
    if j < i:
        return 0.0
    if j == i:
        sets = comb(i, k - 1)  # with k − 1 responses below i
    elif k > 1:
        sets = comb(j - 1, k - 2)  # with i, j and k − 2 other responses below j
    else:
        sets = 0
    return sets / comb(n, k)


def _baseline(n: int, k: int, variant: str, i: int, j: int) -> float:
    """The factor of the reward of rank j in the baseline of the response of rank i, which does not depend on i's."""
    if j == i or variant == "s" or (variant == "loo_minus_one" and k == 1):
        return 0.0
    rank_without_i = j - 1 if j > i else j
    if variant == "loo":
        return k / (n - 1) * comb(rank_without_i, k - 1) / comb(n - 1, k)
    return k / n * comb(rank_without_i, k - 2) / comb(n - 1, k - 1)
