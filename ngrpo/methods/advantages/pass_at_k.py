# SPDX-License-Identifier: Apache-2.0
"""Pass@k Training: the advantage of groups of k answers of which one must be right (arXiv 2508.10751)."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor

from ngrpo.methods.advantages import register
from ngrpo.methods.advantages.base import ROUNDING, AnnealedK
from perturbations.errors import UsageError
from perturbations.options import option


@register("pass_at_k")
@dataclass(frozen=True, kw_only=True)
class PassAtK(AnnealedK):
    """Pass@k Training: the mean advantage of an answer over all groups of k that hold it; rewards of 0 and 1."""

    paper = "Pass@k Training, arXiv 2508.10751"
    sums_to_zero = True

    form: str = option(
        "pass_at_k",
        "Pass@k alone, or combined with Pass@1 by the share of right answers",
        choices=("pass_at_k", "combined"),
    )

    def check_rewards(self, rewards: Tensor) -> None:
        """Raises ``UsageError`` for rewards other than 0 and 1."""
        between = rewards[(rewards.abs() > ROUNDING) & ((rewards - 1.0).abs() > ROUNDING)]
        if len(between):
            raise UsageError(
                f"advantage pass_at_k: a reward of {float(between[0]):g}; 0 for a wrong and 1 for a right answer are"
                " needed. Let the reward function give those, or use --advantage pkpo, which takes any rewards."
            )

    def formula(self, rewards: Tensor, counts: Tensor | None) -> Tensor:
        """(1 − ρ)/σ for a right answer, (1 − ρ − C(N−c−1, k−1)/C(N−1, k−1))/σ for a wrong one; 0 where σ is 0.

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
    """The advantages of a right and a wrong answer by how many of n are right, (n + 1, 2) float64."""
    rows = []
    for c in range(n + 1):
        missed = comb(n - c, k) / comb(n, k)
        deviation = (missed * (1.0 - missed)) ** 0.5
        wrong = comb(n - c - 1, k - 1) / comb(n - 1, k - 1) if c < n else 0.0
        rows.append([missed / deviation, (missed - wrong) / deviation] if deviation else [0.0, 0.0])
    return torch.tensor(rows, dtype=torch.float64)
