# SPDX-License-Identifier: Apache-2.0
"""A sample's luggage from rollout to training, as a dictionary of bytes: its trajectory, and its two rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbations.replay import ReplayRecord, packing
from perturbations.replay.trajectory import FinishedTrajectory

SECOND_ROUND = "second_round"
_VERSION = 1
OURS = {*packing.PARTS, SECOND_ROUND}
"""Our entries of a sample's dictionary; the others are a multimodal model's."""


def unpack(side_inputs: Sequence[Any] | None) -> list[FinishedTrajectory | None]:
    """The trajectories of a batch, None for a sample without one; ValueError for bytes that were cut or altered."""
    return [
        FinishedTrajectory.unpack(entry) if entry and packing.RECORD in entry else None for entry in side_inputs or ()
    ]


def records(side_inputs: Sequence[Any] | None, batch: int) -> list[ReplayRecord]:
    """The replay records of a training batch, in order; a sample without a perturbed position has an empty one.

    Raises:
        RuntimeError: if a sample has none.
    """
    trajectories = unpack(side_inputs) or [None] * batch
    missing = [i for i, trajectory in enumerate(trajectories) if trajectory is None]
    if missing or len(trajectories) != batch:
        raise RuntimeError(
            f"{len(missing) or batch - len(trajectories)} of {batch} samples have no replay record (the first:"
            f" {missing[:5]}), so the model would be trained on inputs that the rollout did not see. Each sample of a"
            " perturbed run has its record in mm_train_inputs: a custom executor must hand on what generate() returns."
        )
    return [trajectory.record for trajectory in trajectories if trajectory is not None]


@dataclass(frozen=True)
class TwoRounds:
    """The two rounds of a sample's prompt.

    Attributes:
        rewards: of all responses, the first round's in front, (G + G',) float32.
        place: of this response among them.
        log_probs: log π_old of its tokens given its round's prompt, (T,) float32; None in the first round, whose prompt
            is the data's.
    """

    rewards: np.ndarray
    place: int
    log_probs: np.ndarray | None = None

    def pack(self) -> dict[str, bytes]:
        """As plain bytes with a checksum, like records."""
        parts = [packing.varint(len(self.rewards)), packing.floats(self.rewards), packing.varint(self.place)]
        parts.append(packing.varint(self.log_probs is not None))
        if self.log_probs is not None:
            parts.append(packing.floats(self.log_probs))
        return {SECOND_ROUND: packing.sealed(parts, _VERSION)}


def two_rounds(side_inputs: Sequence[Any] | None, batch: int) -> list[TwoRounds | None]:
    """The two rounds of each sample of a batch, None if the first was enough."""
    found: list[TwoRounds | None] = []
    for entry in side_inputs or [None] * batch:
        data = (entry or {}).get(SECOND_ROUND)
        if data is None:
            found.append(None)
            continue
        reader = packing.unsealed(data, _VERSION, "a sample's two rounds")
        rewards, place = reader.floats(reader.varint()), reader.varint()
        found.append(TwoRounds(rewards, place, reader.all_floats() if reader.varint() else None))
    return found
