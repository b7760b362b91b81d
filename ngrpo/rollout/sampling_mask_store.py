# SPDX-License-Identifier: Apache-2.0
"""The sampling masks of a worker's live trajectories, in bounded memory."""

from __future__ import annotations

import mmap
import os

import numpy as np

from ngrpo.rollout.tokens_left import marked
from ngrpo.rollout.trajectories import Chunks, grown
from perturbations.replay.trajectory import SamplingMask, as_words

_CHUNK = 512  # words
_MAP_NORESERVE = 0x4000  # Linux's, on x86 and Arm; the module mmap does not have it before Python 3.13
LIMIT = 8 << 30
"""Bytes that the masks of a worker's live trajectories take at most; half of the machine's memory where it is less."""


class SamplingMaskStore:
    """The masks of live trajectories, by slot.

    Tokens are kept as the 16-bit words of :class:`SamplingMask`, in chunks that a slot gets when it needs them, all out
    of one piece of address space as large as the limit. It costs memory only where it is written to, and never moves.
    """

    def __init__(self, size: int, slots: int, longest: int, limit: int | None = None) -> None:
        """
        Args:
            size: V.
            slots: number of slots.
            longest: positions of a trajectory.
            limit: bytes that all masks may take; None for :data:`LIMIT`.
        """
        self._size, self._limit = size, min(LIMIT, _memory() // 2) if limit is None else limit
        self._rows = Chunks(slots, longest)
        self._last = np.full(slots, -1, dtype=np.int64)  # position of each slot's last row
        self._used = np.zeros(slots, dtype=np.int64)  # words
        self._held = np.zeros(slots, dtype=np.int64)  # chunks
        self._table = np.zeros((slots, 1), dtype=np.int32)
        self._pool = np.zeros(0, dtype=np.uint16)
        self._free: list[int] = []
        self._made = 0

    def grow(self, slots: int) -> None:
        """Makes room for more slots."""
        self._rows.grow(slots)
        self._last = grown(self._last, slots, -1)
        for name in ("_used", "_held", "_table"):
            setattr(self, name, grown(getattr(self, name), slots))

    @property
    def bytes(self) -> int:
        """Memory in use."""
        return (self._made - len(self._free)) * 2 * _CHUNK + 8 * int(self._rows.counts.sum())

    def write(self, slots: np.ndarray, positions: np.ndarray, counts: np.ndarray, ids: np.ndarray) -> None:
        """Notes the tokens left at one position of each of several slots.

        A position that is drawn again replaces what came after it, as in the trajectory store.

        Args:
            slots: (N,), each once.
            positions: (N,).
            counts: how many tokens each has left, (N,).
            ids: as :meth:`TokensLeft.read` returns them.

        Raises:
            RuntimeError: where there is no room left.
        """
        slots, positions = np.asarray(slots, dtype=np.int64), np.asarray(positions, dtype=np.int64)
        for i in (positions <= self._last[slots]).nonzero()[0]:
            self._rewind(int(slots[i]), int(positions[i]))
        words, lengths = as_words(ids, marked(counts, self._size))
        cut = 2 * counts > self._size
        some = counts < self._size
        if not some.all():
            slots, positions, lengths, cut = slots[some], positions[some], lengths[some], cut[some]
        if not len(slots):
            return
        self._put(slots, words, lengths)
        parts = {"positions": positions.astype(np.int32), "lengths": (2 * lengths + cut).astype(np.uint32)}
        self._rows.write(slots, self._rows.counts[slots], parts)
        self._last[slots] = positions

    def _put(self, slots: np.ndarray, words: np.ndarray, lengths: np.ndarray) -> None:
        """Appends to each slot its part of the words: a copy by one index, for each word where it goes."""
        used = self._used[slots]
        ends = used + lengths
        self._reserve(slots, -(-ends // _CHUNK))
        first = used // _CHUNK
        pieces = np.where(lengths > 0, (ends - 1) // _CHUNK - first + 1, 0)  # chunks that a row touches
        row = np.repeat(np.arange(len(slots)), pieces)
        chunk = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        start = np.maximum(used[row], chunk * _CHUNK)
        size = np.minimum(ends[row], (chunk + 1) * _CHUNK) - start
        target = self._table[slots[row], chunk].astype(np.int64) * _CHUNK + start % _CHUNK
        where = np.repeat(target - (np.cumsum(size) - size), size)
        where += np.arange(len(where))
        self._pool[where] = words
        self._used[slots] = ends

    def _reserve(self, slots: np.ndarray, needed: np.ndarray) -> None:
        """Gives each slot as many chunks as it needs."""
        held = self._held[slots]
        more = np.maximum(needed - held, 0)
        total = int(more.sum())
        if self.bytes + total * 2 * _CHUNK + 8 * len(slots) > self._limit:
            raise RuntimeError(self._full())
        if not total:
            return
        if not len(self._pool):
            self._pool = _address_space(self._limit)
        if needed.max() > self._table.shape[1]:
            wider = np.zeros((len(self._table), 2 * int(needed.max())), dtype=np.int32)
            wider[:, : self._table.shape[1]] = self._table
            self._table = wider
        again = min(total, len(self._free))
        chunks = [*self._free[len(self._free) - again :], *range(self._made, self._made + total - again)]
        del self._free[len(self._free) - again :]
        self._made += total - again
        nth = np.repeat(held, more) + np.arange(total) - np.repeat(np.cumsum(more) - more, more)
        self._table[np.repeat(slots, more), nth] = chunks
        self._held[slots] += more

    def _full(self) -> str:
        rows = int(self._rows.counts.sum())
        return (
            f"--sampling.correct_mask: the tokens that sampling left at {rows} positions of"
            f" {int((self._used > 0).sum())} running requests take {self.bytes / 2**30:.2f} GiB,"
            f" {int(self._used.sum()) / max(rows, 1):.0f} words a position, and more than"
            f" {self._limit / 2**30:.2f} GiB are not allowed. Leave fewer tokens (--sampling.top_k, --sampling.min_p, a"
            " lower --rollout.top_p), run fewer requests at once, allow shorter answers, or raise"
            " --sampling.mask_gib (additional_config['sampling_mask_gib'] of an engine of your own)."
        )

    def _rewind(self, slot: int, position: int) -> None:
        """Forgets a slot's rows from a position on."""
        row = self._rows.find(slot, "positions", position)
        rows = self._rows.read(slot, 0, row)
        self._rows.counts[slot] = row
        self._used[slot] = int((rows["lengths"] // 2).sum()) if rows else 0
        self._last[slot] = rows["positions"][-1] if rows else -1

    def read(self, slot: int) -> SamplingMask:
        """The mask of a slot's trajectory so far."""
        rows, used = self._rows.read(slot), int(self._used[slot])
        if not rows:
            return SamplingMask.of(self._size, {})
        chunks = self._table[slot, : -(-used // _CHUNK)]
        space = self._pool[: len(self._pool) // _CHUNK * _CHUNK].reshape(-1, _CHUNK)
        lengths = rows["lengths"].astype(np.int64)
        return SamplingMask(
            self._size,
            rows["positions"].astype(np.int64),
            lengths % 2 == 1,
            lengths // 2,
            space[chunks].reshape(-1)[:used],
        )

    def clear(self, slot: int) -> None:
        """A trajectory begins or ends."""
        self._free.extend(self._table[slot, : self._held[slot]].tolist())
        self._held[slot] = self._used[slot] = 0
        self._last[slot] = -1
        self._rows.clear(slot)


def _memory() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _address_space(size: int) -> np.ndarray:
    """Words of memory that is taken when it is written to."""
    chunk = 2 * _CHUNK
    # Not reserved: Linux joins what lies side by side, and forks no process where that is more than the memory.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    space = mmap.mmap(-1, max(size // chunk, 1) * chunk, flags=flags)
    return np.frombuffer(space, dtype=np.uint16)
