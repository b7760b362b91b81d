# SPDX-License-Identifier: Apache-2.0
"""Rows of live trajectories by slot, in chunks of a pool that all slots share, as in a paged KV cache.

A slot gets a chunk when it first needs it, and gives all of its chunks back when its trajectory ends. So memory follows
from what was written, and not from the number of slots times the longest trajectory.
"""

import numpy as np

_CHUNK = 64  # rows


class ChunkTable:
    """Which chunks of a pool each slot holds; the pool itself belongs to whoever uses the table.

    Row i of a slot is row ``i % size`` of chunk ``table[slot, i // size]``, for chunks of ``size`` rows.

    Attributes:
        counts: rows in use of each slot, (slots,) int64.
        table: numbers of each slot's chunks, in order, (slots, widest) int64; what follows them in a row means nothing.
    """

    def __init__(self, slots: int, size: int) -> None:
        """size: rows of a chunk."""
        self.counts = np.zeros(slots, dtype=np.int64)
        self.table = np.zeros((slots, 1), dtype=np.int64)
        self._size = size
        self._held = np.zeros(slots, dtype=np.int64)  # chunks of each slot
        self._made = 0  # chunks 0 to _made − 1 exist: as many as slots ever held at once
        self._free: list[int] = []  # the existing chunks that no slot holds

    def grow(self, slots: int) -> None:
        """Makes room for more slots."""
        self.counts = grown(self.counts, slots)
        self.table = grown(self.table, slots)
        self._held = grown(self._held, slots)

    @property
    def in_use(self) -> int:
        """Chunks of all slots."""
        return self._made - len(self._free)

    def used_chunks(self, slot: int) -> np.ndarray:
        """The numbers of the chunks that a slot's rows in use are in, in order."""
        used = (int(self.counts[slot]) + self._size - 1) // self._size
        return self.table[slot, :used]

    def missing(self, slots: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """How many further chunks each of the slots, all different, needs for its number of rows."""
        needed = (rows + self._size - 1) // self._size
        return np.maximum(needed - self._held[slots], 0)

    def reserve(self, slots: np.ndarray, more: np.ndarray) -> None:
        """Gives ``more[i]`` further chunks to each ``slots[i]``; the slots are all different.

        Chunks that were given back are used again before new ones are made. For example, slots [3, 5] hold [2, 0]
        chunks and get [1, 2] more, where chunks 0 to 8 were made and chunk 7 is free. The three chunks are [7, 9, 10],
        and they go to ``table[3, 2]``, ``table[5, 0]`` and ``table[5, 1]``.
        """
        held = self._held[slots]
        widest = int((held + more).max(initial=0))
        if widest > self.table.shape[1]:
            wider = np.zeros((len(self.table), 2 * widest), dtype=np.int64)
            wider[:, : self.table.shape[1]] = self.table
            self.table = wider
        total = int(more.sum())
        reused = min(total, len(self._free))
        first_reused = len(self._free) - reused
        end = self._made + total - reused
        chunks = [*self._free[first_reused:], *range(self._made, end)]
        del self._free[first_reused:]
        self._made = end
        nth_chunk = ranges(held, more)
        self.table[np.repeat(slots, more), nth_chunk] = chunks
        self._held[slots] += more

    def clear(self, slot: int) -> None:
        """Gives the chunks of a slot back."""
        self._free.extend(self.table[slot, : self._held[slot]].tolist())
        self._held[slot] = 0
        self.counts[slot] = 0


class Chunks(ChunkTable):
    """Rows of several arrays for each slot, in chunks of 64.

    Which arrays there are, and how wide they are, follows from the rows that arrive. An array spans all chunks; the
    operating system commits its memory only where it is written to.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(slots, _CHUNK)
        self._capacity = _CHUNK  # chunks that a new array has room for
        self._arrays: dict[str, np.ndarray] = {}

    def write(self, slots: np.ndarray, indices: np.ndarray, fields: dict[str, np.ndarray]) -> None:
        """Writes N rows at ``indices`` of their slots; in each slot the last one written ends the slot.

        Args:
            slots: (N,) int64.
            indices: of the rows in their slots, ascending within a slot, (N,) int64.
            fields: N values by name. An array that is missing here is 0 in these rows.
        """
        chunks = indices // _CHUNK
        lacks_chunk = chunks >= self._held[slots]
        if lacks_chunk.any():
            self._reserve_up_to(slots[lacks_chunk], indices[lacks_chunk])
        rows = self.table[slots, chunks] * _CHUNK + indices % _CHUNK
        for name, values in fields.items():
            array = self._array(name, values)
            array[rows] = _as_wide(name, values, array.shape[1:])
        if len(self._arrays) > len(fields):
            for name in self._arrays.keys() - fields.keys():
                # No rows are added: the array gets room for the chunks that were made since it was last written to.
                array = self._array(name, self._arrays[name][:0])
                array[rows] = 0
        self.counts[slots] = indices + 1

    def _reserve_up_to(self, slots: np.ndarray, indices: np.ndarray) -> None:
        """Reserves the chunks of rows at ``indices``, ascending within a slot."""
        last_indices = dict(zip(slots.tolist(), indices.tolist()))  # a slot's later index replaces its earlier ones
        growing = np.array(list(last_indices))
        rows = np.array(list(last_indices.values())) + 1
        self.reserve(growing, self.missing(growing, rows))
        while self._capacity < self._made:
            self._capacity *= 2

    def read(self, slot: int, first: int = 0, last: int | None = None) -> dict[str, np.ndarray]:
        """The rows of a slot from ``first`` to before ``last``, (N, …) by name; empty where there are none."""
        indices = np.arange(first, self.counts[slot] if last is None else last)
        if not len(indices):
            return {}
        rows = self.table[slot, indices // _CHUNK] * _CHUNK + indices % _CHUNK
        return {name: array[rows] for name, array in self._arrays.items()}

    def find(self, slot: int, name: str, value: int) -> int:
        """The index of a slot's first row whose field ``name`` is at least ``value``; its row count if there is none.

        The field must ascend along the slot.
        """
        count = int(self.counts[slot])
        if not count:
            return 0
        array = self._arrays[name]
        # The last chunk that begins below the value has the row, or is followed by it.
        first_rows = self.used_chunks(slot) * _CHUNK
        chunk = max(int(np.searchsorted(array[first_rows], value)) - 1, 0)
        start = int(first_rows[chunk])
        size = min(_CHUNK, count - chunk * _CHUNK)
        return chunk * _CHUNK + int(np.searchsorted(array[start : start + size], value))

    def _array(self, name: str, values: np.ndarray) -> np.ndarray:
        """The array of a name, with room for every chunk, and as wide as these rows at least."""
        array = self._arrays.get(name)
        size = self._capacity * _CHUNK
        if array is None:
            self._arrays[name] = np.zeros((size, *values.shape[1:]), dtype=values.dtype)
        elif len(array) < size or array.shape[1:] < values.shape[1:]:
            width = max(array.shape[1:], values.shape[1:])
            enlarged = np.zeros((size, *width), dtype=array.dtype)
            # Only rows of chunks that were ever used: to copy the others would commit their memory.
            used = min(len(array), self._made * _CHUNK)
            enlarged[:used] = _as_wide(name, array[:used], width)
            self._arrays[name] = enlarged
        return self._arrays[name]


def _as_wide(name: str, rows: np.ndarray, width: tuple[int, ...]) -> np.ndarray:
    """Rows (N, *width): an edit with fewer candidates than others repeats its last one, with weight 0."""
    if rows.shape[1:] == width:
        return rows
    missing = width[0] - rows.shape[1]
    mode = "edge" if name == "ids" else "constant"
    return np.pad(rows, [(0, 0), (0, missing)], mode=mode)


def grown(array: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    """The array with more rows, ``size`` in all; the new ones have the value ``fill``."""
    shape = (size - len(array), *array.shape[1:])
    return np.concatenate([array, np.full(shape, fill, dtype=array.dtype)])


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``lengths[i]`` numbers from ``starts[i]`` on, for each i: [7, 2] and [3, 2] give [7, 8, 9, 2, 3]."""
    ends = np.cumsum(lengths)
    numbers = np.repeat(starts - (ends - lengths), lengths)
    numbers += np.arange(len(numbers))
    return numbers
