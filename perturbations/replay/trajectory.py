# SPDX-License-Identifier: Apache-2.0
"""What a rollout leaves of a trajectory: one object, from the worker through the replay buffer to the trainer's loss.

A trajectory has four shapes on its way: the rows that each step writes into the worker's store (at first on their way
from the device, `ngrpo.rollout.async_scheduling.Note`), this object, its bytes where it goes to another process
(`packing.py`), and the positions of a whole batch where a forward replays it (`scope.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from perturbations.replay import packing
from perturbations.replay.record import ReplayRecord
from perturbations.replay.sampling_mask import SamplingMask

# Bytes that a trajectory takes beside its numbers: its name, its objects and those of its arrays. Measured with Python
# 3.11 and numpy 2 as the growth of a process that holds 50,000 answers of three tokens: 1,300 each.
OVERHEAD = 1300


@dataclass(frozen=True)
class UnperturbedAnswer:
    """A short answer without a perturbation.

    Attributes:
        tokens: prompt and answer, (T,) int32.
        log_probs: log π of the answer's tokens at the rollout, (A,) float32.
    """

    tokens: np.ndarray
    log_probs: np.ndarray


@dataclass(frozen=True, eq=False)
class FinishedTrajectory:
    """What a rollout leaves of one trajectory.

    Attributes:
        record: its perturbed inputs.
        log_probs: log π at the rollout of the trajectory's last L tokens, (L,) float32: of the generated ones as a
            worker hands them over; of all, NaN where none was generated, once a conversation has been put together.
        sampling_mask: the tokens that sampling left at each position; None where this is not recorded.
        dropped: edits of earlier turns whose tokens an agent or a chat template has changed.
        prompted: tokens of the prompts of all turns.
        cached: how many of these the engine found in its prefix cache.
        unperturbed: a short answer of the same engine with the perturbation off, None beside most answers.
    """

    record: ReplayRecord
    log_probs: np.ndarray
    sampling_mask: SamplingMask | None = None
    dropped: int = 0
    prompted: int = 0
    cached: int = 0
    unperturbed: UnperturbedAnswer | None = None

    @property
    def size(self) -> int:
        """Bytes of memory that holding it takes."""
        mask = 0 if self.sampling_mask is None else self.sampling_mask.nbytes
        return OVERHEAD + self.record.size + self.log_probs.nbytes + mask

    def truncate(self, num_tokens: int) -> FinishedTrajectory:
        """What there is of the trajectory's first ``num_tokens`` tokens."""
        beyond = self.record.num_tokens - num_tokens
        if beyond <= 0:
            return self
        return dataclasses.replace(
            self,
            record=self.record.truncate(num_tokens),
            log_probs=self.log_probs[: max(len(self.log_probs) - beyond, 0)],
            sampling_mask=None if self.sampling_mask is None else self.sampling_mask.truncate(num_tokens),
        )

    def pack(self) -> dict[str, bytes]:
        """As bytes by name, without loss: see :func:`perturbations.replay.packing.trajectory_parts`."""
        return packing.trajectory_parts(self)

    @classmethod
    def unpack(cls, parts: Mapping[str, bytes]) -> FinishedTrajectory:
        """Reads what :meth:`pack` wrote.

        Raises:
            ValueError: where bytes were cut or altered on their way.
        """
        mask, answer = parts.get(packing.MASK), parts.get(packing.UNPERTURBED)
        return cls(
            record=ReplayRecord.from_bytes(parts[packing.RECORD]),
            sampling_mask=None if mask is None else SamplingMask.from_bytes(mask),
            unperturbed=None if answer is None else UnperturbedAnswer(**packing.answer_fields(answer)),
            **packing.trajectory_fields(parts),
        )
