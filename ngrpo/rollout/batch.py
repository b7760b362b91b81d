# SPDX-License-Identifier: Apache-2.0
"""What the host knows of a batch: its trajectories, and the step that is in flight."""

from dataclasses import dataclass

import numpy as np

from ngrpo.rollout.step_rows import HostColumns


@dataclass
class Rows:
    """The trajectories of a batch's B rows. They stay the same until a request comes, goes or changes its row.

    Attributes:
        names: of the requests.
        slots: of the trajectories, (B,) int64.
        seeds: of the trajectories, (B,) int64.
        first: positions of their first generated tokens, (B,) int64.
        perturbed: whether the requests may be perturbed, (B,) bool.
        matrix: what is uploaded for a graph, with the fields of :class:`HostColumns` as its rows; None until a graph
            needs it.
    """

    names: list[str]
    slots: np.ndarray
    seeds: np.ndarray
    first: np.ndarray
    perturbed: np.ndarray
    matrix: np.ndarray | None = None

    def columns_of(self, size: int, scratch: int) -> HostColumns:
        """The columns for a graph of ``size`` rows. Rows beyond the batch have the slot ``scratch``.

        Made at the first call, from these sizes; later calls return the same columns, since the batch's rows and so its
        graph stay the same. The caller sets positions, and what follows from them, at each step.
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
    """The step in flight.

    Attributes:
        rows: the trajectory of each row.
        next_positions: of the tokens that are drawn, (B,) int64.
        keeps_token: False where the prompt is incomplete, so that vLLM throws the drawn token away, (B,) bool.
    """

    rows: Rows
    next_positions: np.ndarray
    keeps_token: np.ndarray

    @property
    def slots(self) -> np.ndarray:
        """Of the trajectories, (B,) int64."""
        return self.rows.slots


NO_POSITIONS = np.zeros(0, dtype=np.int64)


def no_rows() -> Rows:
    """The rows of a batch without requests."""
    return Rows(
        names=[],
        slots=NO_POSITIONS,
        seeds=NO_POSITIONS,
        first=NO_POSITIONS,
        perturbed=np.zeros(0, dtype=bool),
    )
