# SPDX-License-Identifier: Apache-2.0
"""Baselines of NGRPO (arXiv 2509.18851) for rewards in [0, 1], without a group: `psr`, `nsr`, `w_reinforce`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.methods.advantages import register
from ngrpo.methods.advantages.base import ROUNDING, VerifiedAdvantage
from perturbations import option


@register("psr")
@dataclass(frozen=True, kw_only=True)
class PositiveOnly(VerifiedAdvantage):
    """PSR, positive samples only: A = r."""

    def formula(self, rewards: Tensor, counts: Tensor | None) -> Tensor:
        """r."""
        return rewards.clone()


@register("nsr")
@dataclass(frozen=True, kw_only=True)
class NegativeOnly(VerifiedAdvantage):
    """NSR, negative samples only: A = r - 1."""

    def formula(self, rewards: Tensor, counts: Tensor | None) -> Tensor:
        """r - 1."""
        return rewards - 1.0


@register("w_reinforce")
@dataclass(frozen=True, kw_only=True)
class WeightedReinforce(VerifiedAdvantage):
    """W-REINFORCE: lam * r for a correct answer, r - 1 for a wrong one."""

    lam: float = option(0.1, "λ, the weight of the correct answers", low=0.0)

    def formula(self, rewards: Tensor, counts: Tensor | None) -> Tensor:
        """λ r where r = 1, else r - 1."""
        return torch.where(rewards >= 1.0 - ROUNDING, self.lam * rewards, rewards - 1.0)
