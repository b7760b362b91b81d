# SPDX-License-Identifier: Apache-2.0
"""The worker's memory of live trajectories: what was fed to each and how likely its tokens were."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbations.replay.trajectory import ReplayRecord, model_fingerprint

# Spare slots for preempted requests, which stay alive next to a full batch; more are made when they run out.
_SPARE = 8
_CHUNK = 64


class ChunkTable:
    """Which slot has which chunks of a pool, as in a paged KV cache: a slot gets a chunk when it first needs it."""

    def __init__(self, slots: int, size: int) -> None:
        """size: rows of a chunk."""
        self.counts = np.zeros(slots, dtype=np.int64)  # rows in use
        self._size = size
        self._held = np.zeros(slots, dtype=np.int64)  # chunks
        self.table = np.zeros((slots, 1), dtype=np.int64)
        self._free: list[int] = []
        self._made = 0

    def grow(self, slots: int) -> None:
        """Makes room for more slots."""
        for name in ("counts", "_held", "table"):
            setattr(self, name, grown(getattr(self, name), slots))

    @property
    def in_use(self) -> int:
        """Chunks of all slots."""
        return self._made - len(self._free)

    def missing(self, slots: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """How many further chunks each of the slots, all different, needs for its number of rows."""
        return np.maximum(-(-rows // self._size) - self._held[slots], 0)

    def reserve(self, slots: np.ndarray, more: np.ndarray) -> None:
        """Gives each of the slots, all different, its number of further chunks."""
        total, held = int(more.sum()), self._held[slots]
        widest = int((held + more).max(initial=0))
        if widest > self.table.shape[1]:
            self.table = np.pad(self.table, ((0, 0), (0, 2 * widest - self.table.shape[1])))
        again = len(self._free) - min(total, len(self._free))
        chunks = [*self._free[again:], *range(self._made, self._made + total - len(self._free) + again)]
        self._made += total - len(self._free) + again
        del self._free[again:]
        nth = np.repeat(held, more) + np.arange(total) - np.repeat(np.cumsum(more) - more, more)
        self.table[np.repeat(slots, more), nth] = chunks
        self._held[slots] += more

    def clear(self, slot: int) -> None:
        """Gives the chunks of a slot back."""
        self._free.extend(self.table[slot, : self._held[slot]].tolist())
        self._held[slot] = self.counts[slot] = 0


class Chunks(ChunkTable):
    """Rows of several arrays for each slot, in chunks of 64.

    Which arrays there are, and how wide they are, follows from the rows that arrive; memory is committed only for
    chunks that were in use.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(slots, _CHUNK)
        self._capacity = _CHUNK
        self._arrays: dict[str, np.ndarray] = {}

    def write(self, slots: np.ndarray, at: np.ndarray, parts: dict[str, np.ndarray]) -> None:
        """Writes N rows at indices ``at`` of their slots, ascending within a slot, and makes each the last one there.

        ``parts`` has N values by name; arrays that are missing in it are 0 in these rows.
        """
        chunks = at // _CHUNK
        short = chunks >= self._held[slots]
        if short.any():
            last = dict(zip(slots[short].tolist(), at[short].tolist()))
            growing, rows = np.array([*last]), np.array([*last.values()]) + 1
            self.reserve(growing, self.missing(growing, rows))
            while self._capacity < self._made:
                self._capacity *= 2
        rows = self.table[slots, chunks] * _CHUNK + at % _CHUNK
        for name, part in parts.items():
            array = self._array(name, part)
            array[rows] = _fit(name, part, array.shape[1:])
        if len(self._arrays) > len(parts):
            for name in self._arrays.keys() - parts.keys():
                # Chunks may have been made since this array was last written to.
                self._array(name, self._arrays[name][:0])[rows] = 0
        self.counts[slots] = at + 1

    def read(self, slot: int, first: int = 0, last: int | None = None) -> dict[str, np.ndarray]:
        """The rows of a slot from ``first`` to before ``last``, (N, …) by name; empty where there are none."""
        at = np.arange(first, self.counts[slot] if last is None else last)
        rows = self.table[slot, at // _CHUNK] * _CHUNK + at % _CHUNK
        return {name: array[rows] for name, array in self._arrays.items()} if len(at) else {}

    def find(self, slot: int, name: str, value: int) -> int:
        """Index of a slot's first row with a ``name``, ascending along the slot, that is not below a value."""
        count = int(self.counts[slot])
        if not count:
            return 0
        array, chunks = self._arrays[name], self.table[slot, : -(-count // _CHUNK)] * _CHUNK
        chunk = max(int(np.searchsorted(array[chunks], value)) - 1, 0)
        rows = array[chunks[chunk] : chunks[chunk] + min(_CHUNK, count - chunk * _CHUNK)]
        return chunk * _CHUNK + int(np.searchsorted(rows, value))

    def _array(self, name: str, part: np.ndarray) -> np.ndarray:
        """The array of a name, large and wide enough for every chunk and for these rows."""
        array, size = self._arrays.get(name), self._capacity * _CHUNK
        if array is None:
            array = np.zeros((size, *part.shape[1:]), dtype=part.dtype)
        elif len(array) < size or array.shape[1:] < part.shape[1:]:
            used, old = min(len(array), self._made * _CHUNK), array
            array = np.zeros((size, *max(old.shape[1:], part.shape[1:])), dtype=old.dtype)
            array[:used] = _fit(name, old[:used], array.shape[1:])  # and no more, which would commit unused memory
        self._arrays[name] = array
        return array


def _fit(name: str, part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Rows made as wide as ``shape``: an edit with fewer candidates repeats its last one with weight 0."""
    if part.shape[1:] == shape:
        return part
    return np.pad(part, ((0, 0), (0, shape[0] - part.shape[1])), mode="edge" if name == "ids" else "constant")


def grown(array: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    """The array with more rows, filled with a value."""
    return np.concatenate([array, np.full((size - len(array), *array.shape[1:]), fill, dtype=array.dtype)])


@dataclass(frozen=True)
class DrawnStep:
    """What a step drew for N trajectories, and the edits of M of them.

    Attributes:
        slots: (N,) int64, all different.
        positions: of the tokens, (N,) int64.
        log_probs: log π of the tokens, (N,) float32.
        edited_slots: (M,) int64.
        edited_positions: (M,) int64.
        edits: the fields of the edits by name, M rows each; empty for M = 0.
    """

    slots: np.ndarray
    positions: np.ndarray
    log_probs: np.ndarray
    edited_slots: np.ndarray
    edited_positions: np.ndarray
    edits: dict[str, np.ndarray]


def _earlier_occurrences(values: np.ndarray) -> np.ndarray:
    """How often each of N values came before: [7, 8, 7, 7] gives [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    in_order = values[order]
    starts = np.flatnonzero(np.concatenate([[True], in_order[1:] != in_order[:-1]]))
    lengths = np.diff(np.append(starts, len(values)))
    earlier = np.empty_like(order)
    earlier[order] = np.arange(len(values)) - np.repeat(starts, lengths)
    return earlier


class TrajectoryStore:
    """Slots of live trajectories, written by whole batches."""

    def __init__(
        self, slots: int, max_model_len: int, embedding: tuple[int, int] | None = None, module: bool = False
    ) -> None:
        """slots: alive at once, more when needed; embedding: (V, D), which tells the model's records, or None.

        module: whether inputs pass the perturbation's learned module.
        """
        self.length, self.slots, self._embedding = max_model_len, slots + _SPARE, embedding
        self._model = 0 if embedding is None else model_fingerprint(*embedding, module)
        self.live: dict[str, int] = {}  # slots by request
        self.seeds, self.prompts, self.training_steps = (np.zeros(self.slots, dtype=np.int64) for _ in range(3))
        self.answers = np.zeros((self.slots, 2), dtype=np.int64)
        self.perturbed, self.has_edits, self.ahead = (np.zeros(self.slots, dtype=bool) for _ in range(3))
        self._free = list(reversed(range(self.slots)))
        self._edits, self._tokens = Chunks(self.slots), Chunks(self.slots)

    def open(
        self,
        request_id: str,
        seed: int,
        prompt_tokens: int,
        perturbed: bool,
        training_step: int = 0,
        answer: tuple[int, int] = (0, 1),
    ) -> int:
        """Gives a new request a clean slot; training_step below 0: no schedule; ``answer``: number and count."""
        if not self._free:
            self._free.extend(reversed(range(self.slots, 2 * self.slots)))
            self.slots *= 2
            for name in ("seeds", "prompts", "training_steps", "answers", "perturbed", "has_edits", "ahead"):
                setattr(self, name, grown(getattr(self, name), self.slots))
            self._edits.grow(self.slots)
            self._tokens.grow(self.slots)
        slot = self._free.pop()
        self.seeds[slot], self.prompts[slot], self.perturbed[slot] = seed, prompt_tokens, perturbed
        self.training_steps[slot], self.has_edits[slot], self.ahead[slot] = training_step, False, False
        self.answers[slot] = answer
        self.live[request_id] = slot
        return slot

    def write_steps(self, steps: Sequence[DrawnStep]) -> None:
        """Notes steps of which each continues the last one: a slot's positions rise by 1 from step to step."""
        if len(steps) == 1:
            step = steps[0]
            self.write_tokens(step.slots, step.positions, step.log_probs)
            if len(step.edited_slots):
                self.write_edits(step.edited_slots, step.edited_positions, step.edits)
            return
        self.write_tokens(
            np.concatenate([step.slots for step in steps]),
            np.concatenate([step.positions for step in steps]),
            np.concatenate([step.log_probs for step in steps]),
        )
        edited = [step for step in steps if len(step.edited_slots)]
        if edited:
            self.write_edits(
                np.concatenate([step.edited_slots for step in edited]),
                np.concatenate([step.edited_positions for step in edited]),
                {name: np.concatenate([step.edits[name] for step in edited]) for name in edited[0].edits},
            )

    def write_tokens(self, slots: np.ndarray, positions: np.ndarray, log_probs: np.ndarray) -> None:
        """Notes N generated tokens, ascending within a slot; a position drawn again replaces what came after it."""
        at = positions - self.prompts[slots]
        again = at < self._tokens.counts[slots]
        if again.any():
            for i in again.nonzero()[0]:
                self._edits.counts[slots[i]] = self._edits.find(slots[i], "positions", positions[i])
        self._tokens.write(slots, at, {"log_probs": log_probs})

    def write_edits(self, slots: np.ndarray, positions: np.ndarray, parts: dict[str, np.ndarray]) -> None:
        """Notes N edits, ascending within a slot, each behind the last one of its slot."""
        at = self._edits.counts[slots] + _earlier_occurrences(slots)
        self._edits.write(slots, at, {"positions": positions.astype(np.int32), **parts})

    def load(self, slot: int, record: ReplayRecord, ahead: bool = False) -> None:
        """Has the record of earlier turns replayed on a new request's prompt; ValueError for one of another model.

        ``ahead``: on generated positions too, and rows are mixed without the module: for a start-up check.
        """
        if self._embedding is not None:
            record.check_model(*self._embedding)
        earlier = record if ahead else record.truncate(int(self.prompts[slot]))
        self.ahead[slot] = ahead
        if len(earlier):
            parts = {name: part for name, part in vars(earlier).items() if isinstance(part, np.ndarray)}
            at = np.arange(len(earlier))
            self._edits.write(np.full_like(at, slot), at, parts)
        self.has_edits[slot] = len(earlier) > 0

    def edits(self, slot: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """The edits of a slot at positions from ``start`` to before ``stop``, (N, …) by name; empty for none."""
        return self._edits.read(slot, *(self._edits.find(slot, "positions", at) for at in (start, stop)))

    def record(self, request_id: str) -> tuple[ReplayRecord, np.ndarray]:
        """The record of a live request, and log π of each generated token, (generated,) float32."""
        slot = self.live[request_id]
        seed, prompt_tokens = int(self.seeds[slot]), int(self.prompts[slot])
        log_probs = self._tokens.read(slot).get("log_probs", np.zeros(0, dtype=np.float32))
        ids = np.zeros((0, 1), dtype=np.int32)
        none = {"positions": ids[:, 0], "ids": ids, "weights": ids.astype(np.float32), "agreed": ids[:, 0].astype(bool)}
        parts: dict[str, Any] = {"sigma": None, **(self._edits.read(slot) or none)}
        length = prompt_tokens + len(log_probs)
        return ReplayRecord(seed, prompt_tokens, length, **parts, model=self._model), log_probs

    def close(self, request_id: str) -> None:
        """Frees a request's slot."""
        slot = self.live.pop(request_id)
        self._edits.clear(slot)
        self._tokens.clear(slot)
        self._free.append(slot)
