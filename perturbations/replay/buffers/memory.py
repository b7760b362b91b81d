# SPDX-License-Identifier: Apache-2.0
"""A replay buffer in the worker's memory, bounded in bytes."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from perturbations.options import option
from perturbations.registry import register_buffer
from perturbations.replay.buffers.base import ReplayBuffer
from perturbations.replay.trajectory import FinishedTrajectory

logger = logging.getLogger(__name__)


@register_buffer("memory")
@dataclass(frozen=True, kw_only=True)
class MemoryBuffer(ReplayBuffer):
    """Keeps the newest trajectories; records that nobody takes (``vllm serve``, say) must not fill the memory."""

    max_bytes: int = option(4 << 30, "beyond so many bytes the oldest trajectories are dropped", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        held: dict[str, FinishedTrajectory] = {}
        for name, value in {"_held": held, "_bytes": 0, "_warned": False}.items():
            object.__setattr__(self, name, value)

    def add(self, name: str, finished: FinishedTrajectory) -> None:
        """See :meth:`ReplayBuffer.add`."""
        if name in self._held:
            self.take(name)
        self._held[name] = finished
        object.__setattr__(self, "_bytes", self._bytes + finished.size)
        while self._bytes > self.max_bytes and len(self._held) > 1:
            if not self._warned:
                logger.warning(
                    "%d finished trajectories (%d bytes) were not taken; from now on the oldest are dropped without a"
                    " further word. Take or drop the records of finished requests, or raise max_bytes.",
                    len(self._held),
                    self._bytes,
                )
                object.__setattr__(self, "_warned", True)
            self.take(next(iter(self._held)))

    def names(self) -> list[str]:
        """See :meth:`ReplayBuffer.names`."""
        return list(self._held)

    def take(self, name: str) -> FinishedTrajectory:
        """See :meth:`ReplayBuffer.take`."""
        finished = self._held.pop(name)
        object.__setattr__(self, "_bytes", self._bytes - finished.size)
        return finished

    def __len__(self) -> int:
        return len(self._held)
