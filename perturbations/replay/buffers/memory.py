# SPDX-License-Identifier: Apache-2.0
"""A replay buffer in the worker's memory, bounded in bytes."""

import logging
from dataclasses import dataclass, field
from functools import cached_property

from perturbations import FinishedTrajectory, ReplayBuffer, option, register_buffer

logger = logging.getLogger(__name__)


@dataclass
class _Content:
    """What a buffer holds: no option, and nothing that is sent to another process."""

    held: dict[str, FinishedTrajectory] = field(default_factory=dict)
    size: int = 0
    warned: bool = False


@register_buffer("memory")
@dataclass(frozen=True, kw_only=True)
class MemoryBuffer(ReplayBuffer):
    """Keeps the newest trajectories; records that nobody takes (``vllm serve``, say) must not fill the memory."""

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
                untaken = f"{len(content.held)} finished trajectories ({content.size} bytes) were not taken"
                fix = "Take or drop the records of finished requests, or raise max_bytes"
                logger.warning("%s; the oldest are dropped from now on, without a further word. %s.", untaken, fix)
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
