# SPDX-License-Identifier: Apache-2.0
"""PSR, positive samples only: a baseline of NGRPO."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ngrpo.methods.advantages import register
from ngrpo.methods.advantages.base import VerifiedAdvantage


@register("psr")
@dataclass(frozen=True, kw_only=True)
class PositiveOnly(VerifiedAdvantage):
    """PSR, positive samples only: A = r."""

    def formula(self, rewards: Tensor, counts: Tensor | None) -> Tensor:
        """r."""
        return rewards.clone()
