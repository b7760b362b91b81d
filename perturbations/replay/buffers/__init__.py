# SPDX-License-Identifier: Apache-2.0
"""Replay buffers: the contract, and one file for each, named like it."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from perturbations.options import Options
from perturbations.registry import buffers
from perturbations.replay.trajectory import FinishedTrajectory


@dataclass(frozen=True, kw_only=True)
class ReplayBuffer(Options, ABC):
    """Holds the finished trajectories of one vLLM worker, by request; each tensor-parallel rank has its own.

    Subclasses are frozen dataclasses with fields of :func:`perturbations.option`; their content is no field.
    """

    kind = "replay buffer"
    registry = buffers

    @abstractmethod
    def add(self, name: str, finished: FinishedTrajectory) -> None:
        """Keeps a trajectory; it replaces one of the same name."""

    @abstractmethod
    def names(self) -> list[str]:
        """The names of the trajectories that are held, oldest first."""

    @abstractmethod
    def take(self, name: str) -> FinishedTrajectory:
        """Returns the trajectory of a name and forgets it; ``KeyError`` where it is not held."""

    def drop(self, names: Iterable[str]) -> None:
        """Forgets the trajectories of these names, where they are held."""
        for name in dict.fromkeys(names):
            with contextlib.suppress(KeyError):  # take() raises it where nothing is held
                self.take(name)
