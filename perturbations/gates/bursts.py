# SPDX-License-Identifier: Apache-2.0
"""A gate that opens for whole stretches of an answer, so that perturbed positions come in runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perturbations.gates.base import Gate
from perturbations.options import option
from perturbations.registry import register_gate
from perturbations.step import Positions


@register_gate("bursts")
@dataclass(frozen=True, kw_only=True)
class Bursts(Gate):
    """Cuts the answer into stretches of equal length and opens each one with the same probability."""

    length: int = option(8, "positions in a stretch", low=1)
    share: float = option(0.1, "probability that a stretch is open", low=0.0, high=1.0)

    def plan(self, positions: Positions) -> np.ndarray:
        """One draw for each stretch, taken at its first position, (N,) bool."""
        stretch = positions.positions - positions.generated % self.length
        return positions.uniform(1, at=stretch)[:, 0] < self.share
