# SPDX-License-Identifier: Apache-2.0
"""What a sample carries from rollout to training, as a dictionary of bytes: its trajectory, and its two rounds."""

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
"""The entries of a sample's dictionary that are for us, and not for a multimodal model."""


def unpack(side_inputs: Sequence[Any] | None) -> list[FinishedTrajectory | None]:
    """The trajectories of a batch.

    Args:
        side_inputs: one dictionary or None per sample.

    Returns:
        One per sample, None where the sample has none.

    Raises:
        ValueError: where bytes were cut or altered on their way.
    """
    return [
        FinishedTrajectory.unpack(entry) if entry and packing.RECORD in entry else None for entry in side_inputs or ()
    ]


def records(side_inputs: Sequence[Any] | None, batch: int) -> list[ReplayRecord]:
    """The replay records of a training batch, in order; a sample without a perturbed position has an empty one.

    Raises:
        RuntimeError: where a sample has none.
    """
    trajectories = unpack(side_inputs) or [None] * batch
    missing = [i for i, trajectory in enumerate(trajectories) if trajectory is None]
    if missing or len(trajectories) != batch:
        raise RuntimeError(
            f"{len(missing) or batch - len(trajectories)} of {batch} samples have no replay record (the first:"
            f" {missing[:5]}). Each sample of a perturbed run brings its own in mm_train_inputs; without it the model"
            " would be trained on inputs that the rollout did not see. A custom executor must hand on what generate()"
            " returns."
        )
    return [trajectory.record for trajectory in trajectories if trajectory is not None]


@dataclass(frozen=True)
class TwoRounds:
    """What a sample carries of the two rounds of its prompt.

    Attributes:
        rewards: of all responses, the first round's in front, (G + G',) float32.
        place: of this response among them.
        log_probs: log π_old of its tokens given the prompt of its round, (T,) float32; None in a response of the first
            round, whose prompt is that of the data.
    """

    rewards: np.ndarray
    place: int
    log_probs: np.ndarray | None = None

    def pack(self) -> dict[str, bytes]:
        """As plain bytes with a checksum, as records are."""
        parts = [packing.varint(len(self.rewards)), packing.floats(self.rewards), packing.varint(self.place)]
        parts.append(packing.varint(self.log_probs is not None))
        if self.log_probs is not None:
            parts.append(packing.floats(self.log_probs))
        return {SECOND_ROUND: packing.sealed(parts, _VERSION)}


def two_rounds(side_inputs: Sequence[Any] | None, batch: int) -> list[TwoRounds | None]:
    """What the samples of a batch carry of two rounds, None where the first round was enough."""
    return [_two_rounds((entry or {}).get(SECOND_ROUND)) for entry in side_inputs or [None] * batch]


def _two_rounds(data: bytes | None) -> TwoRounds | None:
    if data is None:
        return None
    reader = packing.unsealed(data, _VERSION, "what a sample carries of its two rounds")
    rewards, place = reader.floats(reader.varint()), reader.varint()
    log_probs = reader.all_floats() if reader.varint() else None
    return TwoRounds(rewards, place, log_probs)
