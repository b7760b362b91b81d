# SPDX-License-Identifier: Apache-2.0
"""GRPO's advantage."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ngrpo.advantages import register
from ngrpo.advantages.base import Advantage, normalised


@register("group_norm")
@dataclass(frozen=True, kw_only=True)
class GroupNorm(Advantage):
    """GRPO's: rewards normalised within the group."""

    paper = "GRPO, arXiv 2402.03300"

    def formula(self, rewards: Tensor, counts: Tensor | None) -> Tensor:
        """(r − mean) / (std + 1e-9), with the sample standard deviation."""
        return normalised(rewards)
