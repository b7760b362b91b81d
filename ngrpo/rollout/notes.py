# SPDX-License-Identifier: Apache-2.0
"""What steps left for the host, from the copies on their way until it is in the worker's stores."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ngrpo.rollout.in_flight import Note
from ngrpo.rollout.sampling_mask_store import SamplingMaskStore
from ngrpo.rollout.trajectories import TrajectoryStore, grown
from perturbations.errors import present


class Notes:
    """A queue of notes in the order of their steps.

    Tokens and edits are written as soon as a note has arrived. Which tokens sampling left is asked for only then,
    since it takes as much memory as there are of them; so it arrives later, and has a queue of its own.

    Attributes:
        taken: notes taken so far.
        written: how many of them are in the stores with all that they have.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        masks: SamplingMaskStore | None,
        event: Callable[[], torch.cuda.Event | None],
    ) -> None:
        """
        Args:
            store: of tokens and edits.
            masks: of the tokens that sampling left, None where these are not recorded.
            event: tells when all copies made so far have arrived, None where they have.
        """
        self._store, self._masks, self._event = store, masks, event
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
            masks, left = present(self._masks, "the store of masks"), present(note.left, "the tokens left")
            masks.write(note.slots, note.positions, *left.read(note.rows))
            self.written += 1

    def drain_slot(self, slot: int) -> None:
        """Waits for a slot's tokens and edits, hence for its newest note and for none after that."""
        self._drain_edits(int(self._newest[slot]))

    def _drain_edits(self, until: int) -> None:
        while self._coming and _arrived(self._coming[0], wait=self._stored < until):
            note = self._coming.popleft()
            self._write(note)
            self._stored += 1
            if note.left is None:
                self.written += 1
            else:
                note.left.ask()
                self._masked.append(replace(note, ready=self._event()))

    def _write(self, note: Note) -> None:
        log_probs = note.log_probs.numpy() if note.rows is None else note.log_probs.numpy()[note.rows]
        self._store.write_tokens(note.slots, note.positions, log_probs)
        if note.edits:
            parts = {name: part.numpy() for name, part in note.edits.items()}
            fed, (slots, positions) = parts.pop("fed"), note.edited
            if not fed.all():
                parts = {name: part[fed] for name, part in parts.items()}
                slots, positions = slots[fed], positions[fed]
            self._store.write_edits(slots, positions, parts)


def _arrived(note: Note, wait: bool) -> bool:
    """Whether the copies of a note are there, waited for where that is asked."""
    if note.ready is None or note.ready.query():
        return True
    if wait:
        note.ready.synchronize()
    return wait
