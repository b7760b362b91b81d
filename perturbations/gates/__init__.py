# SPDX-License-Identifier: Apache-2.0
"""The contract of a gate."""

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

    Subclasses are frozen dataclasses with fields from :func:`perturbations.option`. They implement :meth:`plan`,
    :meth:`open` or both.
    """

    kind = "gate"
    registry = gates

    def plan(self, positions: Positions) -> np.ndarray:
        """Which of N positions of any trajectories are open, each judged alone; on the host: (N,) bool."""
        return np.ones(len(positions.positions), dtype=bool)

    def open(self, step: GateStep) -> Tensor:
        """Which of B rows, each of another trajectory, the gate leaves open, from the logits; on the device: (B,) bool.

        Each row is judged alone, with no randomness but the step's, without ``.item()`` or an ``if`` on a tensor.
        """
        return torch.ones_like(step.sampled, dtype=torch.bool)
