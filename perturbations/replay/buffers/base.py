# SPDX-License-Identifier: Apache-2.0
"""The contract of a replay buffer: where finished trajectories wait until the trainer takes them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from perturbations.options import Options
from perturbations.registry import buffers
from perturbations.replay.record import ReplayRecord

# Bytes that a trajectory takes beside its numbers: its name, its objects and those of its arrays. Measured with Python
# 3.11 and numpy 2 as the growth of a process that holds 50,000 answers of three tokens: 1,300 each.
OVERHEAD = 1300


@dataclass(frozen=True, eq=False)
class FinishedTrajectory:
    """What a rollout leaves of one trajectory.

    Attributes:
        record: its perturbed inputs.
        log_probs: log π of each generated token at the rollout, (generated,) float32.
        sampling_mask: the tokens that sampling left at each position, as the rollout packs them; empty where this is
            not recorded.
    """

    record: ReplayRecord
    log_probs: np.ndarray
    sampling_mask: bytes = b""

    @property
    def size(self) -> int:
        """Bytes of memory that holding it takes."""
        return OVERHEAD + self.record.size + self.log_probs.nbytes + len(self.sampling_mask)


@dataclass(frozen=True, kw_only=True)
class ReplayBuffer(Options, ABC):
    """Holds the finished trajectories of one vLLM worker, by request; each tensor-parallel rank has its own.

    Subclasses are frozen dataclasses whose fields come from :func:`perturbations.option`; what they hold is not among
    the fields, see ``perturbations/replay/buffers/memory.py``.
    """

    kind = "replay buffer"
    registry = buffers

    @abstractmethod
    def add(self, name: str, finished: FinishedTrajectory) -> None:
        """Keeps a trajectory; a second one of the same name replaces the first."""

    @abstractmethod
    def names(self) -> list[str]:
        """What is held, oldest first."""

    @abstractmethod
    def take(self, name: str) -> FinishedTrajectory:
        """Hands one over and forgets it. Raises ``KeyError`` where it is not held."""

    def drop(self, names: Iterable[str]) -> None:
        """Forgets what is held of these names."""
        for name in dict.fromkeys(names):
            with contextlib.suppress(KeyError):  # by which take() says that it is not held
                self.take(name)
