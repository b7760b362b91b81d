# SPDX-License-Identifier: Apache-2.0
"""The contract of a gate."""

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
    """A gate with its options, which can close positions that the default gate left open.

    Subclasses are frozen dataclasses whose fields come from :func:`perturbations.option`. They implement :meth:`plan`,
    :meth:`open` or both.
    """

    kind = "gate"
    registry = gates

    def plan(self, positions: Positions) -> np.ndarray:
        """Which of N positions the gate leaves open, from seeds and positions alone; on the host: (N,) bool.

        Must judge each position alone: the positions are of one step, and of all trajectories together.
        """
        return np.ones(len(positions.positions), dtype=bool)

    def open(self, step: GateStep) -> Tensor:
        """Which of B rows, each of another trajectory, the gate leaves open, from the logits; on the device: (B,) bool.

        Must be a function of each row alone, with no randomness but the step's. Must not synchronise with the host: no
        ``.item()``, no ``if`` on a tensor.
        """
        return torch.ones_like(step.sampled, dtype=torch.bool)
