# SPDX-License-Identifier: Apache-2.0
"""The trajectories of a batch on the host, and the step in flight."""

from dataclasses import dataclass

import numpy as np

from ngrpo.rollout.step_rows import HostColumns


@dataclass
class Rows:
    """The trajectories of a batch, which stay the same from step to step until a request comes, goes or moves.

    Attributes:
        names: of the requests.
        slots: (B,) int64, as the further ones.
        seeds: of the trajectories.
        first: positions of their first generated tokens.
        perturbed: whether their requests may be perturbed, (B,) bool.
        matrix: what a graph is told of them, the rows of :class:`HostColumns`; None until a graph needs it.
    """

    names: list[str]
    slots: np.ndarray
    seeds: np.ndarray
    first: np.ndarray
    perturbed: np.ndarray
    matrix: np.ndarray | None = None

    def columns_of(self, size: int, scratch: int) -> HostColumns:
        """What a graph of ``size`` rows is told; rows beyond the batch have the gate's ``scratch`` row.

        Positions, and what follows from them, are set at each step.
        """
        if self.matrix is None:
            self.matrix = np.zeros((len(HostColumns._fields), size), dtype=np.int64)
            columns = HostColumns(*self.matrix)
            count = len(self.slots)
            columns.slots.fill(scratch)
            columns.slots[:count] = self.slots
            columns.first[:count] = self.first
            columns.seeds[:count] = self.seeds
        return HostColumns(*self.matrix)


@dataclass(frozen=True)
class Batch:
    """The step in flight: which trajectory each row belongs to, and where its next token goes."""

    rows: Rows
    next_positions: np.ndarray  # (B,) int64
    sampled: np.ndarray  # (B,) bool; False where a prompt is not complete

    @property
    def slots(self) -> np.ndarray:
        """Of the trajectories, (B,) int64."""
        return self.rows.slots


NO_POSITIONS = np.zeros(0, dtype=np.int64)
NO_ROWS = Rows(names=[], slots=NO_POSITIONS, seeds=NO_POSITIONS, first=NO_POSITIONS, perturbed=np.zeros(0, dtype=bool))
