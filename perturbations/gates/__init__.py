# SPDX-License-Identifier: Apache-2.0
"""The contract of a gate."""

from collections.abc import Mapping
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
    :meth:`open` or both. A gate that remembers earlier positions adds :meth:`initial_state` and :meth:`advance`.
    """

    kind = "gate"
    registry = gates

    def plan(self, positions: Positions) -> np.ndarray:
        """Which of N positions are open, (N,) bool. It runs on the host; the trajectories may be any.

        Each position is judged alone, with no randomness but ``positions.uniform``.
        """
        return np.ones(len(positions.positions), dtype=bool)

    def open(self, step: GateStep) -> Tensor:
        """Which of B rows the gate leaves open, from the logits, (B,) bool. It runs on the device.

        Each row is of another trajectory and is judged alone, with no randomness but the step's, and without a wait for
        the device: no ``.item()``, no ``if`` on a tensor.
        """
        return torch.ones_like(step.sampled, dtype=torch.bool)

    def initial_state(self) -> Mapping[str, float]:
        """The numbers by name that each response starts with; none for a gate without state.

        They are kept as float32 on the device, also while a request is preempted. Whole numbers are exact up to 2^24.
        """
        return {}

    def advance(self, step: GateStep, fed: Tensor) -> Mapping[str, Tensor]:
        """The state after each of B positions, from ``step.state`` before it: (B,) by name, of any dtype.

        It is called for every generated token, also where the position is not perturbed. The rules of :meth:`open`
        apply. The engine may draw a position again, with the same ``step.state``; so the result must be the only thing
        that is kept.

        Args:
            step: with the tokens of the text as ``step.sampled``.
            fed: whether a perturbed input is fed at each position, (B,) bool.
        """
        return step.state
