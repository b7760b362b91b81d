# SPDX-License-Identifier: Apache-2.0
"""Advantages normalised within the group: GRPO's `group_norm` (arXiv 2402.03300), and COPO (arXiv 2501.12735)."""

from dataclasses import dataclass

from torch import Tensor

from ngrpo.methods.advantages import register
from ngrpo.methods.advantages.base import Advantage, normalised
from perturbations import option
from perturbations.errors import require


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


@register("copo")
@dataclass(frozen=True, kw_only=True)
class CountBonus(Advantage):
    """COPO: a bonus of beta / sqrt(1 + N) on rarely seen (prompt, answer) outcomes, then as group_norm.

    In a group of equal rewards β cancels in the normalisation: there the advantages depend on the counts alone.
    """

    paper = "COPO, arXiv 2501.12735"
    sums_to_zero = True
    counted = True

    beta: float = option(0.1, "β, the bonus of an outcome never seen before", low=0.0)

    def formula(self, rewards: Tensor, counts: Tensor | None) -> Tensor:
        """The normalised r + β / √(1 + N)."""
        seen = require(counts, "counts")
        return normalised(rewards + self.beta / (1.0 + seen.to(rewards.dtype)).sqrt())
