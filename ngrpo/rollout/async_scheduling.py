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

from ngrpo.rollout.routed_experts import RoutedExperts, RoutedStep
from ngrpo.rollout.sampling_support import SamplingMaskStore, SamplingSupport
from ngrpo.rollout.trajectories import TrajectoryStore, grown
from perturbations.errors import require

# --- copies on their way ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Note:
    """A step's draws; their tensors are still being copied from a CUDA device."""

    ready: torch.cuda.Event | None
    slots: np.ndarray
    positions: np.ndarray
    rows: np.ndarray | None  # that drew the tokens; None for all
    log_probs: Tensor
    support: SamplingSupport | None
    edited: tuple[np.ndarray, np.ndarray]  # slots and positions of the edits
    edits: dict[str, Tensor]
    routed: RoutedStep | None = None


class Notes:
    """A queue of notes in the order of their steps: ``taken`` by now, of which ``written`` are whole in the stores."""

    # Tokens and edits are written as soon as a note has arrived. Which tokens sampling left is requested only then,
    # since it takes as much memory as there are of them; so it arrives later, and has a queue of its own.

    def __init__(
        self,
        store: TrajectoryStore,
        masks: SamplingMaskStore | None,
        routed: RoutedExperts | None,
        event: Callable[[], torch.cuda.Event | None],
    ) -> None:
        """store: of tokens and edits; event: tells when all earlier copies have arrived, None where they have."""
        self._store, self._masks, self._routed, self._event = store, masks, routed, event
        self._coming: deque[Note] = deque()
        self._masked: deque[Note] = deque()
        self._newest = np.zeros(store.slots, dtype=np.int64)
        self.taken = self._stored = self.written = 0

    def add(self, note: Note) -> None:
        """Takes a step's note, and writes whatever has arrived."""
        self._coming.append(note)
        self.taken += 1
        self._newest[note.slots] = self.taken
        self.drain()

    def grow(self, slots: int) -> None:
        """Makes room for more slots."""
        self._newest = grown(self._newest, slots)

    def drain(self, until: int = 0) -> None:
        """Writes what has arrived, and the first ``until`` notes ever taken, which are waited for."""
        self._drain_edits(until)
        while self._masked and _arrived(self._masked[0], wait=self.written < until):
            note = self._masked.popleft()
            masks, support = require(self._masks, "the store of masks"), require(note.support, "the support")
            masks.write(note.slots, note.positions, *support.read(note.rows))
            self.written += 1

    def drain_slot(self, slot: int) -> None:
        """Waits for a slot's tokens and edits, hence for its newest note and for none after that."""
        self._drain_edits(int(self._newest[slot]))

    def _drain_edits(self, until: int) -> None:
        while self._coming and _arrived(self._coming[0], wait=self._stored < until):
            note = self._coming.popleft()
            log_probs = note.log_probs.numpy() if note.rows is None else note.log_probs.numpy()[note.rows]
            self._store.write_tokens(note.slots, note.positions, log_probs)
            if note.routed is not None:
                require(self._routed, "the store of experts").write(note.routed)
            if note.edits:
                parts = {name: part.numpy() for name, part in note.edits.items()}
                fed, (slots, positions) = parts.pop("fed"), note.edited
                if not fed.all():
                    parts = {name: part[fed] for name, part in parts.items()}
                    slots, positions = slots[fed], positions[fed]
                self._store.write_edits(slots, positions, parts)
            self._stored += 1
            if note.support is None:
                self.written += 1
            else:
                note.support.ask()
                self._masked.append(replace(note, ready=self._event()))


def _arrived(note: Note, wait: bool) -> bool:
    """Whether the copies of a note are there, waited for where that is asked."""
    if note.ready is None or note.ready.query():
        return True
    if wait:
        note.ready.synchronize()
    return wait
