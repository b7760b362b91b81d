# SPDX-License-Identifier: Apache-2.0
"""The further gates: `first`, `bursts` (by position) and `top_margin` (by logits)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perturbations import Gate, GateStep, Positions, option, register_gate


@register_gate("first")
@dataclass(frozen=True, kw_only=True)
class First(Gate):
    """Open for the first tokens of the response only."""

    length: int = option(64, "generated positions that are open", low=1)

    def plan(self, positions: Positions) -> np.ndarray:
        """Fewer than ``length`` tokens are before the position."""
        return positions.generated < self.length


@register_gate("bursts")
@dataclass(frozen=True, kw_only=True)
class Bursts(Gate):
    """Cuts the response into stretches of equal length and opens each one with the same probability."""

    length: int = option(8, "positions in a stretch", low=1)
    share: float = option(0.1, "probability that a stretch is open", low=0.0, high=1.0)

    def plan(self, positions: Positions) -> np.ndarray:
        """One draw for each stretch, at its first position."""
        stretch = positions.positions - positions.generated % self.length
        return positions.uniform(1, at=stretch)[:, 0] < self.share


@register_gate("top_margin")
@dataclass(frozen=True, kw_only=True)
class TopMargin(Gate):
    """Open where p(likeliest) - p(second likeliest) is at most the margin, at the sampling temperature."""

    margin: float = option(0.2, "largest difference of the two largest probabilities", low=0.0, high=1.0)

    def open(self, step: GateStep) -> Tensor:
        """exp(z₁ - log Z) - exp(z₂ - log Z) ≤ margin."""
        best = step.top(2)[0]
        p = torch.exp(best - step.log_total().unsqueeze(-1))
        return p[:, 0] - p[:, 1] <= self.margin
