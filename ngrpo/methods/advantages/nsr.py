# SPDX-License-Identifier: Apache-2.0
"""NSR, negative samples only: a baseline of NGRPO."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ngrpo.methods.advantages import register
from ngrpo.methods.advantages.base import VerifiedAdvantage


@register("nsr")
@dataclass(frozen=True, kw_only=True)
class NegativeOnly(VerifiedAdvantage):
    """NSR, negative samples only: A = r - 1."""

    def formula(self, rewards: Tensor, counts: Tensor | None) -> Tensor:
        """r - 1."""
        return rewards - 1.0
