# SPDX-License-Identifier: Apache-2.0
"""COPO, count-based exploration."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ngrpo.methods.advantages import register
from ngrpo.methods.advantages.base import Advantage, normalised
from perturbations.errors import require
from perturbations.options import option


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
