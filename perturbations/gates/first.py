# SPDX-License-Identifier: Apache-2.0
"""A gate that is open at the beginning of each answer and closed from then on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perturbations.gates.base import Gate
from perturbations.options import option
from perturbations.registry import register_gate
from perturbations.step import Positions


@register_gate("first")
@dataclass(frozen=True, kw_only=True)
class First(Gate):
    """Open for the first tokens of the answer only."""

    length: int = option(64, "generated positions that are open", low=1)

    def plan(self, positions: Positions) -> np.ndarray:
        """Fewer than ``length`` tokens stand before the position, (N,) bool."""
        return positions.generated < self.length
