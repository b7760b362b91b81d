# SPDX-License-Identifier: Apache-2.0
"""A replay buffer in the worker's memory, bounded in bytes."""

import logging
from dataclasses import dataclass, field
from functools import cached_property

from perturbations import FinishedTrajectory, ReplayBuffer, option, register_buffer

logger = logging.getLogger(__name__)


@dataclass
class _Content:
    """The trajectories of a buffer. They are in no field of it, since fields are options and travel with its spec."""

    held: dict[str, FinishedTrajectory] = field(default_factory=dict)  # oldest first
    size: int = 0  # bytes
    warned: bool = False  # whether the user was told that trajectories are dropped


@register_buffer("memory")
@dataclass(frozen=True, kw_only=True)
class MemoryBuffer(ReplayBuffer):
    """Keeps the newest trajectories. Records that nobody takes, as with ``vllm serve``, cannot fill the memory."""

    max_bytes: int = option(4 << 30, "above this many bytes the oldest trajectories are dropped", low=1)

    @cached_property
    def _content(self) -> _Content:
        return _Content()

    def add(self, name: str, finished: FinishedTrajectory) -> None:
        """As :meth:`ReplayBuffer.add`; beyond ``max_bytes`` the oldest are dropped."""
        content = self._content
        if name in content.held:
            self.take(name)
        content.held[name] = finished
        content.size += finished.size
        while content.size > self.max_bytes and len(content.held) > 1:
            if not content.warned:
                logger.warning(
                    "%d finished trajectories (%d bytes) were not taken; the oldest are dropped from now on, without a"
                    " further word. Take or drop the records of finished requests, or raise max_bytes.",
                    len(content.held),
                    content.size,
                )
                content.warned = True
            self.take(next(iter(content.held)))

    def names(self) -> list[str]:
        """As :meth:`ReplayBuffer.names`."""
        return list(self._content.held)

    def take(self, name: str) -> FinishedTrajectory:
        """As :meth:`ReplayBuffer.take`."""
        finished = self._content.held.pop(name)
        self._content.size -= finished.size
        return finished

    def __len__(self) -> int:
        return len(self._content.held)
