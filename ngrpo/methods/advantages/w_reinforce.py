# SPDX-License-Identifier: Apache-2.0
"""W-REINFORCE, weighted correct and wrong samples: a baseline of NGRPO."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.methods.advantages import register
from ngrpo.methods.advantages.base import ROUNDING, VerifiedAdvantage
from perturbations.options import option


@register("w_reinforce")
@dataclass(frozen=True, kw_only=True)
class WeightedReinforce(VerifiedAdvantage):
    """W-REINFORCE: lam * r for a correct answer, r - 1 for a wrong one."""

    lam: float = option(0.1, "λ, the weight of the correct answers", low=0.0)

    def formula(self, rewards: Tensor, counts: Tensor | None) -> Tensor:
        """λ r where r = 1, else r - 1."""
        return torch.where(rewards >= 1.0 - ROUNDING, self.lam * rewards, rewards - 1.0)
