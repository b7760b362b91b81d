# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling: a step is scheduled, and may run, before the tokens of the last step are known.

- A step's draws are still being copied to the host when the next steps run. They wait in :class:`PendingSteps`.
- A request keeps its slot until the last copies of its draws have arrived (`ngrpo.rollout.requests`).
- A worker computes further tokens before the end of a response is seen, any number of them where vLLM's front end looks
  for a stop string. Only the front end knows how long a response is; `records.py` cuts a worker's trajectory to that.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ngrpo.rollout.chunks import grown
from ngrpo.rollout.routed_experts import RoutedExperts, RoutedStep
from ngrpo.rollout.sampling_support import SamplingMaskStore, SamplingSupport
from ngrpo.rollout.step_records import StepRecord
from ngrpo.rollout.trajectories import DrawnStep, TrajectoryStore
from perturbations.errors import require

# The number of steps that are written into the store together. A write costs the host as much for a thousand rows as
# for a hundred.
STEPS_AT_ONCE = 16


# --- copies on their way ------------------------------------------------------------------------------------------


class DrawnBatch(NamedTuple):
    """What a step drew, on the device and on its way to the host."""

    tokens: Tensor  # the next tokens, (B,) int64
    record: StepRecord  # their log π, and the edits
    buffer: "HostBuffer | None"  # memory of the host that the record is in; None for memory of its own
    may_edit: np.ndarray  # slots of the rows that may have got an edit


@dataclass(frozen=True)
class PendingStep:
    """What a step drew. On CUDA it is still being copied to the host until ``ready`` has happened.

    Attributes:
        ready: the event after the copies; None where they have arrived.
        slots: the trajectory of each of the step's B rows, (B,) int64.
        positions: of the tokens that were drawn, (B,) int64.
        kept_rows: the rows whose token belongs to a response; None for all.
        record: the draws.
        support: the tokens that top-k, top-p and min-p left; None where they are not recorded.
        routed: the experts of the forward; None where they are not recorded.
        buffer: the host's memory that the record is in, which is used again once the record is written; None where the
            record has memory of its own.
    """

    ready: torch.cuda.Event | None
    slots: np.ndarray
    positions: np.ndarray
    kept_rows: np.ndarray | None
    record: StepRecord
    support: SamplingSupport | None
    routed: RoutedStep | None = None
    buffer: "HostBuffer | None" = None

    @property
    def kept(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots and positions of the tokens that belong to responses."""
        if self.kept_rows is None:
            return self.slots, self.positions
        return self.slots[self.kept_rows], self.positions[self.kept_rows]

    def drawn_step(self) -> DrawnStep:
        """The draws for the store, once they have arrived."""
        slots, positions = self.kept
        log_probs = self.record.log_probs()
        edited_rows, edits = self.record.edits()
        return DrawnStep(
            slots=slots,
            positions=positions,
            log_probs=log_probs if self.kept_rows is None else log_probs[self.kept_rows],
            edited_slots=self.slots[edited_rows],
            edited_positions=self.positions[edited_rows],
            edits=edits,
        )


class PendingSteps:
    """The steps whose draws are not in the store yet, first in, first out.

    Tokens and edits of up to :data:`STEPS_AT_ONCE` steps are written together, once they have arrived. The tokens that
    sampling left are copied to the host only then: their number, and so the size of their copy, arrives with the drawn
    tokens. Steps that wait for this second copy have a queue of their own. A worker that records sampling masks writes
    each step by itself, so that the device keeps the bits of few steps.

    Attributes:
        added: the number of steps ever added.
        written: the number of steps that are completely in the stores.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        masks: SamplingMaskStore | None,
        routed: RoutedExperts | None,
        event: Callable[[], torch.cuda.Event | None],
    ) -> None:
        """
        Args:
            store: of tokens and edits.
            masks: the store of the tokens that sampling left; None where they are not recorded.
            routed: the store of experts; None where they are not recorded.
            event: records an event after all earlier copies; None where they have arrived.
        """
        self._store = store
        self._masks = masks
        self._routed = routed
        self._event = event
        self._at_once = STEPS_AT_ONCE if masks is None else 1
        self._coming: deque[PendingStep] = deque()  # steps whose tokens and edits are not in the store yet
        self._masked: deque[PendingStep] = deque()  # steps whose tokens and edits are, and whose sampling masks are not
        # Of each slot: the number of its newest step, and the position that its newest written step drew.
        self._newest_step = np.zeros(store.slots, dtype=np.int64)
        self._newest_position = np.full(store.slots, -1, dtype=np.int64)
        self.added = 0
        self._stored = 0  # the number of steps whose tokens and edits are in the store
        self.written = 0

    def add(self, step: PendingStep) -> None:
        """Queues a step. Once enough steps have gathered, those that have arrived are written."""
        self._coming.append(step)
        self.added += 1
        self._newest_step[step.slots] = self.added
        if len(self._coming) >= self._at_once:
            self.drain()

    def grow(self, slots: int) -> None:
        """Makes room for more slots."""
        self._newest_step = grown(self._newest_step, slots)
        self._newest_position = grown(self._newest_position, slots, -1)

    def drain(self, until: int = 0) -> None:
        """Writes the steps that have arrived, and waits for the first ``until`` steps ever added."""
        self._drain_edits(until)
        while self._masked and _arrived(self._masked[0], wait=self.written < until):
            step = self._masked.popleft()
            masks = require(self._masks, "the store of masks")
            support = require(step.support, "the support")
            slots, positions = step.kept
            counts, ids = support.read(step.kept_rows)
            masks.write(slots, positions, counts, ids)
            self.written += 1

    def drain_slot(self, slot: int) -> None:
        """Waits for the tokens and edits of a slot: for its newest step, and for no step after that."""
        self._drain_edits(int(self._newest_step[slot]))

    def _drain_edits(self, until: int) -> None:
        """As :meth:`drain`, for tokens, edits and experts."""
        arrived: list[PendingStep] = []
        while self._coming and _arrived(self._coming[0], wait=self._stored + len(arrived) < until):
            arrived.append(self._coming.popleft())
        self._write_steps(arrived)
        for step in arrived:
            self._stored += 1
            if step.buffer is not None:
                step.buffer.give_back()
            if step.routed is not None:
                require(self._routed, "the store of experts").write(step.routed)
            if step.support is None:
                self.written += 1
            else:
                step.support.send_ids()
                self._masked.append(replace(step, ready=self._event()))

    def _write_steps(self, arrived: Sequence[PendingStep]) -> None:
        """Writes the tokens and edits of steps that have arrived: as many together as draw consecutive positions."""
        consecutive: list[DrawnStep] = []
        for pending in arrived:
            step = pending.drawn_step()
            if consecutive and not self._continues(step):
                self._store.write_steps(consecutive)
                consecutive = []
            self._newest_position[step.slots] = step.positions
            consecutive.append(step)
        if consecutive:
            self._store.write_steps(consecutive)

    def _continues(self, step: DrawnStep) -> bool:
        """Whether a step draws, in each of its slots, the position after the newest one.

        It does not at the start of a request and after a preemption.
        """
        return bool((self._newest_position[step.slots] + 1 == step.positions).all())


def _arrived(step: PendingStep, wait: bool) -> bool:
    """Whether the copies of a step have arrived; with ``wait`` they are waited for."""
    if step.ready is None or step.ready.query():
        return True
    if wait:
        step.ready.synchronize()
    return wait


# --- the host's memory that copies go through ---------------------------------------------------------------------


class HostBuffer:
    """A tensor on the host that a device copies to or from, and the event after that copy.

    Attributes:
        tensor: the memory, pinned for CUDA.
        array: the same memory as numpy's.
        event: recorded after the copy; None without CUDA.
    """

    def __init__(self, pool: "HostBuffers") -> None:
        self._pool = pool
        self.tensor: Tensor = torch.empty(pool.shape, dtype=pool.dtype)
        self.array: np.ndarray = self.tensor.numpy()
        self.event: torch.cuda.Event | None = None
        if pool.device.type == "cuda":
            self.tensor = self.tensor.pin_memory()
            self.array = self.tensor.numpy()
            self.event = torch.cuda.Event()

    def give_back(self) -> None:
        """Returns the buffer to its pool, once the host, or after an upload the device, has read it."""
        self._pool.free.append(self)


class HostBuffers:
    """Buffers of one shape, which are used again: to pin memory costs more than the copies of a step."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """device: the other end of the copies; memory is pinned for CUDA only."""
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.free: deque[HostBuffer] = deque()
        self._uploading: deque[HostBuffer] = deque()  # buffers that the device may still read from

    def take(self) -> HostBuffer:
        """A buffer for a copy to the host; :meth:`HostBuffer.give_back` ends its use."""
        return self.free.pop() if self.free else HostBuffer(self)

    def upload(self, array: np.ndarray, target: Tensor) -> None:
        """Copies an array (N,) to the first N elements of a tensor on the device, without waiting."""
        while self._uploading:
            event = self._uploading[0].event
            if event is not None and not event.query():
                break
            self._uploading.popleft().give_back()
        buffer = self.take()
        count = len(array)
        buffer.array[:count] = array
        target[:count].copy_(buffer.tensor[:count], non_blocking=True)
        if buffer.event is not None:
            buffer.event.record()
        self._uploading.append(buffer)
