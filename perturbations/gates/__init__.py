# SPDX-License-Identifier: Apache-2.0
"""Where a perturbation acts: the contract of a gate, the default gate, and the further gates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perturbations.options import Options
from perturbations.registry import gates
from perturbations.step import GateStep, Positions


@dataclass(frozen=True, kw_only=True)
class Gate(Options):
    """A gate with its options: it can close positions that the default gate left open.

    Subclasses are frozen dataclasses whose fields come from :func:`perturbations.option`, and implement :meth:`plan`,
    :meth:`open` or both. With the perturbation's ``rate`` at 1 the gate alone decides.
    """

    kind = "gate"
    registry = gates

    def plan(self, positions: Positions) -> np.ndarray:
        """Which positions the gate leaves open, from seeds and positions alone; on the host.

        Must judge each position by itself: they are asked for one step at a time, those of all trajectories together.

        Args:
            positions: N positions that the default gate selected.

        Returns:
            (N,) bool.
        """
        return np.ones(len(positions.positions), dtype=bool)

    def open(self, step: GateStep) -> Tensor:
        """Which rows the gate leaves open, from the logits; on the device.

        Must be a function of each row alone, use no randomness but the step's, and not synchronise with the host: no
        ``.item()``, no ``if`` on a tensor.

        Args:
            step: B positions, each of another trajectory.

        Returns:
            (B,) bool. Elsewhere sampling and lookup are ordinary.
        """
        return torch.ones_like(step.sampled, dtype=torch.bool)
