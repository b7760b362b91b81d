# SPDX-License-Identifier: Apache-2.0
"""GRPO's advantage."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ngrpo.methods.advantages import register
from ngrpo.methods.advantages.base import Advantage, normalised
from perturbations.options import option


@register("group_norm")
@dataclass(frozen=True, kw_only=True)
class GroupNorm(Advantage):
    """GRPO's: rewards normalised within the group."""

    paper = "GRPO, arXiv 2402.03300"
    sums_to_zero = True

    overlong: str = option(
        "keep",
        "answers that were cut off: as any, or out of mean and deviation, with advantage 0",
        choices=("keep", "exclude"),
    )

    @property
    def leaves_out_overlong(self) -> bool:  # type: ignore[override]
        """As the option says."""
        return self.overlong == "exclude"

    def formula(self, rewards: Tensor, counts: Tensor | None) -> Tensor:
        """(r − mean) / (std + 1e-9), with the sample standard deviation."""
        return normalised(rewards)
