# SPDX-License-Identifier: Apache-2.0
"""The support of sampling, the tokens that filters left: on its way from the device to the host, and in memory there.

A step keeps one bit a token on the device and sends how many tokens each row has left. Once these numbers have arrived,
exactly that many tokens are picked out on the device and sent. Nothing waits, and 1,024 rows with 40 tokens each send
0.2 MB instead of the 19 MB of a bit for each of 151,936 tokens.
"""

import mmap
import os
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ngrpo.rollout.trajectories import Chunks, ChunkTable, grown
from perturbations.errors import require
from perturbations.replay.sampling_mask import SamplingMask, as_words

# Eight bytes of 0 or 1 times this number have them as the bits of the highest byte, the first as the lowest.
_GATHER_BITS = 0x0102040810204080
# Tokens picked out at once, each of which takes some 60 bytes of the device's memory for a moment.
PICKED_AT_ONCE = 1 << 20
_CHUNK = 512  # words
_MAP_NORESERVE = 0x4000  # Linux's, on x86 and Arm; the module mmap does not have it before Python 3.13
LIMIT = 8 << 30
"""Bytes that the masks of a worker's live trajectories take at most; half of the machine's memory where it is less."""


def pack(drawable: Tensor) -> tuple[Tensor, Tensor]:
    """One bit for each token that may be drawn, the first in a byte's lowest, (B, ⌈V/8⌉) uint8; their numbers (B,).

    Cut tokens are -inf in ``drawable`` (B, V). Rows with more than V/2 tokens have the bits of those cut.
    """
    size = drawable.shape[-1]
    mask = drawable > -torch.inf
    counts = mask.sum(dim=-1)
    if size % 8:
        mask = F.pad(mask, (0, -size % 8))
    bits = (mask.view(torch.int64) * _GATHER_BITS).view(torch.uint8)[:, 7::8]
    bits = bits ^ (2 * counts > size).mul(0xFF).to(torch.uint8).unsqueeze(-1)
    if size % 8:
        bits[:, -1] &= (1 << size % 8) - 1
    return bits, counts


def marked(counts: np.ndarray, size: int) -> np.ndarray:
    """How many bits :func:`pack` sets in rows with these counts of ``size`` tokens left, (B,)."""
    return np.minimum(counts, size - counts)


def pick(bits: Tensor, size: int) -> Tensor:
    """The ``size`` tokens with set bits of :func:`pack`, row by row, ascending, (size,) int32; without a wait."""
    flat, width = bits.flatten(), bits.shape[1]
    at = torch.nonzero_static(flat, size=size).squeeze(1)  # bytes with a bit; there may be fewer, then -1 follows
    held = torch.where(at >= 0, flat[at], 0).unsqueeze(1)
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    which = torch.nonzero_static(((held >> places) & 1).flatten(), size=size).squeeze(1)
    return (at[which >> 3] % width * 8 + (which & 7)).to(torch.int32)


class SamplingSupport:
    """The tokens left at each row of one step."""

    def __init__(self, drawable: Tensor, download: Callable[[Tensor], Tensor]) -> None:
        """drawable: as of :func:`pack`; download: makes a copy on the host that may arrive later."""
        self._size, self._download = drawable.shape[-1], download
        bits, counts = pack(drawable)
        self._bits: Tensor | None = bits
        self._counts = download(counts)
        self._ids: list[Tensor] = []

    def ask(self) -> None:
        """Has the tokens sent; the numbers that the constructor had sent have arrived."""
        bits, self._bits = require(self._bits, "the bits of a step"), None
        ends = np.cumsum(marked(self._counts.numpy(), self._size))
        first = done = 0
        # Rows that add up to what is picked out at once, or single ones that have more.
        while first < len(ends) and ends[-1] > done:
            last = max(int(np.searchsorted(ends, done + PICKED_AT_ONCE, side="right")), first + 1)
            if ends[last - 1] > done:
                self._ids.append(self._download(pick(bits[first:last], int(ends[last - 1] - done))))
            first, done = last, int(ends[last - 1])

    def read(self, rows: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """How many tokens each of the rows (ascending, or all) has left, (N,) int64, and their marked ids, int32.

        The ids ascend within a row, :func:`marked` of them each. The tokens of :meth:`ask` have arrived.
        """
        counts = self._counts.numpy()
        parts = [part.numpy() for part in self._ids]
        ids = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype=np.int32), *parts])
        if rows is None:
            return counts, ids
        mask = np.zeros(len(counts), dtype=bool)
        mask[rows] = True
        return counts[rows], ids[np.repeat(mask, marked(counts, self._size))]

    def rehearse(self) -> None:
        """Takes the memory of :meth:`ask` for as many tokens as it picks out at once."""
        bits = require(self._bits, "the bits of a step")
        pick(bits, min(PICKED_AT_ONCE, bits.numel()))


class SamplingMaskStore:
    """The masks of live trajectories, by slot: the 16-bit words of :class:`SamplingMask`, in chunks.

    All chunks are in one piece of address space as large as the limit, which costs memory only where it is written to.
    """

    def __init__(self, size: int, slots: int, limit: int | None = None) -> None:
        """size: V; limit: bytes that all masks may take, None for :data:`LIMIT`."""
        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # of the machine's memory
        self._size, self._limit = size, min(LIMIT, half) if limit is None else limit
        self._rows, self._words = Chunks(slots), ChunkTable(slots, _CHUNK)
        self._last = np.full(slots, -1, dtype=np.int64)  # position of each slot's last row
        self._pool = np.zeros(0, dtype=np.uint16)

    def grow(self, slots: int) -> None:
        """Makes room for more slots."""
        self._rows.grow(slots)
        self._words.grow(slots)
        self._last = grown(self._last, slots, -1)

    @property
    def bytes(self) -> int:
        """Memory in use."""
        return self._words.in_use * 2 * _CHUNK + 8 * int(self._rows.counts.sum())

    def write(self, slots: np.ndarray, positions: np.ndarray, counts: np.ndarray, ids: np.ndarray) -> None:
        """Notes :meth:`SamplingSupport.read`'s tokens at a position of each slot (N,); RuntimeError without room.

        A position that is drawn again replaces all after it, as in the trajectory store.
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
        self._append(slots, words, lengths)
        parts = {"positions": positions.astype(np.int32), "lengths": (2 * lengths + cut).astype(np.uint32)}
        self._rows.write(slots, self._rows.counts[slots], parts)
        self._last[slots] = positions

    def _append(self, slots: np.ndarray, words: np.ndarray, lengths: np.ndarray) -> None:
        """Appends to each slot its part of the words."""
        used = self._words.counts[slots]
        ends = used + lengths
        more = self._words.missing(slots, ends)
        total = int(more.sum())
        if self.bytes + total * 2 * _CHUNK + 8 * len(slots) > self._limit:
            rows, running = int(self._rows.counts.sum()), int((self._words.counts > 0).sum())
            mean = int(self._words.counts.sum()) / max(rows, 1)
            raise RuntimeError(
                f"--sampling.correct_mask: the tokens that sampling left at {rows} positions of {running}"
                f" running requests take {self.bytes / 2**30:.2f} GiB, {mean:.0f} words a"
                f" position, above the limit of {self._limit / 2**30:.2f} GiB. Leave fewer tokens (--sampling.top_k,"
                " --sampling.min_p, a lower --rollout.top_p), run fewer requests at once, allow shorter responses, or"
                " raise --sampling.mask_gib (additional_config['sampling_mask_gib'] of an engine of your own)."
            )
        if total and not len(self._pool):
            # Not reserved: Linux joins neighboring pieces, and forks no process where these are more than the memory.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            size = max(self._limit // (2 * _CHUNK), 1) * 2 * _CHUNK
            self._pool = np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=np.uint16)
        if total:
            self._words.reserve(slots, more)
        first = used // _CHUNK
        pieces = np.where(lengths > 0, (ends - 1) // _CHUNK - first + 1, 0)  # chunks that a row touches
        row = np.repeat(np.arange(len(slots)), pieces)
        chunk = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        start = np.maximum(used[row], chunk * _CHUNK)
        size = np.minimum(ends[row], (chunk + 1) * _CHUNK) - start
        target = self._words.table[slots[row], chunk] * _CHUNK + start % _CHUNK
        places = np.repeat(target - (np.cumsum(size) - size), size)
        places += np.arange(len(places))
        self._pool[places] = words
        self._words.counts[slots] = ends

    def _rewind(self, slot: int, position: int) -> None:
        """Forgets a slot's rows from a position on."""
        row = self._rows.find(slot, "positions", position)
        rows = self._rows.read(slot, 0, row)
        self._rows.counts[slot] = row
        self._words.counts[slot] = int((rows["lengths"] // 2).sum()) if rows else 0
        self._last[slot] = rows["positions"][-1] if rows else -1

    def read(self, slot: int) -> SamplingMask:
        """The mask of a slot's unfinished trajectory."""
        rows, used = self._rows.read(slot), int(self._words.counts[slot])
        if not rows:
            return SamplingMask.of(self._size, {})
        chunks = self._words.table[slot, : -(-used // _CHUNK)]
        space = self._pool[: len(self._pool) // _CHUNK * _CHUNK].reshape(-1, _CHUNK)
        positions, lengths = (rows[name].astype(np.int64) for name in ("positions", "lengths"))
        return SamplingMask(self._size, positions, lengths % 2 == 1, lengths // 2, space[chunks].reshape(-1)[:used])

    def clear(self, slot: int) -> None:
        """A trajectory begins or ends."""
        self._last[slot] = -1
        self._rows.clear(slot)
        self._words.clear(slot)
