# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling: a step is scheduled, and may run, before the last one's tokens are known.

- A step's draws are still on their way to the host when the next steps run. They wait in :class:`Notes`.
- A request's slot stays its own until its last copies have arrived (`ngrpo.rollout.requests`).
- A worker computes further tokens before a response's end is seen, any number where vLLM's front end finds a stop
  string. Only the front end knows how long a response is; `records.py` cuts a worker's trajectory to that.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ngrpo.rollout.chunks import grown
from ngrpo.rollout.routed_experts import RoutedExperts, RoutedStep
from ngrpo.rollout.sampling_support import SamplingMaskStore, SamplingSupport
from ngrpo.rollout.step_records import StepRecord
from ngrpo.rollout.trajectories import DrawnStep, TrajectoryStore
from perturbations.errors import require

# Steps that are written into the store together: a write costs the host as much for a thousand rows as for a hundred.
STEPS_AT_ONCE = 16


# --- copies on their way ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Note:
    """What a step drew; it is still being copied from a CUDA device until ``ready``.

    Attributes:
        ready: tells when the copies have arrived; None where they have.
        slots: of the step's B rows.
        positions: of the tokens that were drawn, (B,).
        kept_rows: the rows whose token belongs to a response; None for all.
        record: the draws.
        support: the tokens that sampling left, or None.
        routed: the experts of the forward, or None.
        buffer: memory of the host that the record is in, used again once it is written; None for memory of its own.
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


class Notes:
    """A queue of notes in the order of their steps: ``taken`` so far, of which ``written`` are whole in the stores.

    Tokens and edits of up to :data:`STEPS_AT_ONCE` steps are written together, once they have arrived. Which tokens
    sampling left is requested only then, since it takes as much memory as there are of them; it arrives later, and has
    a queue of its own. A worker that records it writes each step at once, so that the device has to keep the bits of a
    few steps only.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        masks: SamplingMaskStore | None,
        routed: RoutedExperts | None,
        event: Callable[[], torch.cuda.Event | None],
    ) -> None:
        """store: of tokens and edits; event: tells when all earlier copies have arrived, None where they have."""
        self._store = store
        self._masks = masks
        self._routed = routed
        self._event = event
        self._at_once = STEPS_AT_ONCE if masks is None else 1
        self._coming: deque[Note] = deque()
        self._masked: deque[Note] = deque()
        self._newest_note = np.zeros(store.slots, dtype=np.int64)  # number of each slot's newest note
        self._newest_position = np.full(store.slots, -1, dtype=np.int64)  # of each slot's newest note
        self.taken = 0
        self._stored = 0  # notes whose tokens and edits are in the store
        self.written = 0

    def add(self, note: Note) -> None:
        """Takes a step's note, and writes what has arrived once enough steps have gathered."""
        self._coming.append(note)
        self.taken += 1
        self._newest_note[note.slots] = self.taken
        if len(self._coming) >= self._at_once:
            self.drain()

    def grow(self, slots: int) -> None:
        """Makes room for more slots."""
        self._newest_note = grown(self._newest_note, slots)
        self._newest_position = grown(self._newest_position, slots, -1)

    def drain(self, until: int = 0) -> None:
        """Writes what has arrived, and the first ``until`` notes ever taken, which are waited for."""
        self._drain_edits(until)
        while self._masked and _arrived(self._masked[0], wait=self.written < until):
            note = self._masked.popleft()
            masks = require(self._masks, "the store of masks")
            support = require(note.support, "the support")
            masks.write(*note.kept, *support.read(note.kept_rows))
            self.written += 1

    def drain_slot(self, slot: int) -> None:
        """Waits for a slot's tokens and edits, hence for its newest note and for none after that."""
        self._drain_edits(int(self._newest_note[slot]))

    def _drain_edits(self, until: int) -> None:
        arrived: list[Note] = []
        while self._coming and _arrived(self._coming[0], wait=self._stored + len(arrived) < until):
            arrived.append(self._coming.popleft())
        steps: list[DrawnStep] = []
        for note in arrived:
            step = note.drawn_step()
            if steps and not self._continues(step):
                self._store.write_steps(steps)
                steps = []
            self._newest_position[step.slots] = step.positions
            steps.append(step)
        if steps:
            self._store.write_steps(steps)
        for note in arrived:
            self._stored += 1
            if note.buffer is not None:
                note.buffer.give_back()
            if note.routed is not None:
                require(self._routed, "the store of experts").write(note.routed)
            if note.support is None:
                self.written += 1
            else:
                note.support.ask()
                self._masked.append(replace(note, ready=self._event()))

    def _continues(self, step: DrawnStep) -> bool:
        """Whether a step draws the position after each slot's newest one; not at a start and after a preemption."""
        return bool((self._newest_position[step.slots] + 1 == step.positions).all())


def _arrived(note: Note, wait: bool) -> bool:
    """Whether the copies of a note are there; with ``wait`` it waits for them."""
    if note.ready is None or note.ready.query():
        return True
    if wait:
        note.ready.synchronize()
    return wait


# --- memory of the host that copies go through --------------------------------------------------------------------


class HostBuffer:
    """A tensor on the host that a device copies to or from, with the event that tells when it has done so."""

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
        """The host has read what was copied here, so that a later step may use it."""
        self._pool.free.append(self)


class HostBuffers:
    """Pinned buffers of one shape, which are used again: pinning memory costs more than a step's copies."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """device: at the other end of the copies; memory is pinned for CUDA only."""
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.free: deque[HostBuffer] = deque()
        self._uploading: deque[HostBuffer] = deque()

    def take(self) -> HostBuffer:
        """A buffer for a copy to the host; :meth:`HostBuffer.give_back` ends its use."""
        return self.free.pop() if self.free else HostBuffer(self)

    def upload(self, array: np.ndarray, target: Tensor) -> None:
        """Copies an array (N,) to the first N elements of a tensor on the device, without waiting."""
        while self._uploading and (self._uploading[0].event is None or self._uploading[0].event.query()):
            self._uploading.popleft().give_back()
        buffer = self.take()
        buffer.array[: len(array)] = array
        target[: len(array)].copy_(buffer.tensor[: len(array)], non_blocking=True)
        if buffer.event is not None:
            buffer.event.record()
        self._uploading.append(buffer)
