# SPDX-License-Identifier: Apache-2.0
"""The tokens that sampling's filters left (its support): their way from the device to the host, and their store there.

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

from ngrpo.rollout.chunks import Chunks, ChunkTable, grown, ranges
from perturbations.errors import require
from perturbations.replay.sampling_mask import SamplingMask, as_words

# Packs eight bytes of 0 or 1 into one. Of the eight as an int64, times this number, the highest byte has them as its
# bits: byte i is bit i.
_GATHER_BITS = 0x0102040810204080
# Tokens picked out at once; each takes some 60 bytes of the device's memory while that runs.
PICKED_AT_ONCE = 1 << 20
_CHUNK = 512  # words
_CHUNK_BYTES = 2 * _CHUNK
_ROW_BYTES = 8  # of a position: its number, and how many words it has
_MAP_NORESERVE = 0x4000  # Linux's, on x86 and Arm; the module mmap does not have it before Python 3.13
LIMIT = 8 << 30
"""Bytes that the masks of a worker's live trajectories take at most; half of the machine's memory where it is less."""


def pack(drawable: Tensor) -> tuple[Tensor, Tensor]:
    """Bits, one for each token, the first token in a byte's lowest bit; and the number of tokens that a row has left.

    Args:
        drawable: (B, V), with -inf at the tokens that sampling cut.

    Returns:
        (B, ⌈V/8⌉) uint8 and (B,) int64. A bit is set for a token that is left; in a row where more than V/2 are left,
        for a token that is cut.
    """
    size = drawable.shape[-1]
    mask = drawable > -torch.inf
    counts = mask.sum(dim=-1)
    if size % 8:
        mask = F.pad(mask, (0, -size % 8))
    eight_tokens = mask.view(torch.int64)
    products = eight_tokens * _GATHER_BITS
    bits = products.view(torch.uint8)[:, 7::8]  # the highest byte of an int64 is its last one in memory
    inverted = (2 * counts > size).mul(0xFF).to(torch.uint8)
    bits = bits ^ inverted.unsqueeze(-1)
    if size % 8:
        bits[:, -1] &= (1 << size % 8) - 1
    return bits, counts


def marked_counts(counts: np.ndarray, size: int) -> np.ndarray:
    """How many bits :func:`pack` sets in rows with these counts of ``size`` tokens left, (B,)."""
    return np.minimum(counts, size - counts)


def pick(bits: Tensor, size: int) -> Tensor:
    """The ``size`` tokens with set bits of :func:`pack`, row by row, ascending, (size,) int32; without a wait."""
    flat = bits.flatten()
    width = bits.shape[1]
    # The bytes with a set bit. They may be fewer than the tokens: -1 fills up their places, and has no bits.
    byte_places = torch.nonzero_static(flat, size=size).squeeze(1)
    values = torch.where(byte_places >= 0, flat[byte_places], 0)
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    bits_of_bytes = (values.unsqueeze(1) >> shifts) & 1
    bit_places = torch.nonzero_static(bits_of_bytes.flatten(), size=size).squeeze(1)
    byte_in_row = byte_places[bit_places >> 3] % width
    return (byte_in_row * 8 + (bit_places & 7)).to(torch.int32)


class SamplingSupport:
    """The tokens left at each row of one step.

    They come in three steps: the constructor sends how many each row has, :meth:`send_ids` sends the tokens themselves
    once these numbers have arrived, and :meth:`read` gives them once they have arrived too.
    """

    def __init__(self, drawable: Tensor, download: Callable[[Tensor], Tensor]) -> None:
        """drawable: as in :func:`pack`; download: makes a copy on the host that may arrive later."""
        self._size = drawable.shape[-1]
        self._download = download
        bits, counts = pack(drawable)
        self._bits: Tensor | None = bits  # on the device until the tokens are sent
        self._counts = download(counts)
        self._ids: list[Tensor] = []  # marked tokens of the rows, in pieces

    def send_ids(self) -> None:
        """Sends the tokens; to be called once the numbers that the constructor sent have arrived."""
        bits = require(self._bits, "the bits of a step")
        self._bits = None
        ends = np.cumsum(marked_counts(self._counts.numpy(), self._size))
        first = 0
        sent = 0
        while first < len(ends) and sent < ends[-1]:
            # As many rows as add up to what is picked out at once, or a single one that has more.
            fitting = int(np.searchsorted(ends, sent + PICKED_AT_ONCE, side="right"))
            last = max(fitting, first + 1)
            end = int(ends[last - 1])
            if sent < end:
                ids = pick(bits[first:last], end - sent)
                self._ids.append(self._download(ids))
            first = last
            sent = end

    def read(self, rows: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """How many tokens each of the rows (ascending, or all) has left, (N,) int64, and their marked ids, int32.

        The ids ascend within a row, :func:`marked_counts` of them each. The tokens of :meth:`send_ids` have arrived.
        """
        counts = self._counts.numpy()
        pieces = [piece.numpy() for piece in self._ids]
        no_ids = np.zeros(0, dtype=np.int32)
        ids = pieces[0] if len(pieces) == 1 else np.concatenate([no_ids, *pieces])
        if rows is None:
            return counts, ids
        in_rows = np.zeros(len(counts), dtype=bool)
        in_rows[rows] = True
        return counts[rows], ids[np.repeat(in_rows, marked_counts(counts, self._size))]

    def rehearse(self) -> None:
        """Takes the memory of :meth:`send_ids` for as many tokens as it picks out at once."""
        bits = require(self._bits, "the bits of a step")
        pick(bits, min(PICKED_AT_ONCE, bits.numel()))


class SamplingMaskStore:
    """The masks of live trajectories, by slot: the 16-bit words of :class:`SamplingMask`, in chunks.

    All chunks are in one piece of address space as large as the limit, which costs memory only where it is written to.
    """

    def __init__(self, size: int, slots: int, limit: int | None = None) -> None:
        """size: V; limit: bytes that all masks may take, None for :data:`LIMIT`."""
        if limit is None:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            limit = min(LIMIT, memory // 2)
        self._size = size
        self._limit = limit
        # Of each position where some tokens were cut: ``positions``, and ``lengths_and_cut``, which is twice the number
        # of its words, plus 1 where these name the tokens cut.
        self._rows = Chunks(slots)
        self._words = ChunkTable(slots, _CHUNK)
        self._pool = np.zeros(0, dtype=np.uint16)  # the words of all slots, once there are any
        self._last = np.full(slots, -1, dtype=np.int64)  # position of each slot's last row

    def grow(self, slots: int) -> None:
        """Makes room for more slots."""
        self._rows.grow(slots)
        self._words.grow(slots)
        self._last = grown(self._last, slots, -1)

    @property
    def bytes(self) -> int:
        """Memory in use."""
        return self._words.in_use * _CHUNK_BYTES + int(self._rows.counts.sum()) * _ROW_BYTES

    def write(self, slots: np.ndarray, positions: np.ndarray, counts: np.ndarray, ids: np.ndarray) -> None:
        """Writes :meth:`SamplingSupport.read`'s tokens at a position of each slot (N,); RuntimeError without room.

        A position that is drawn again replaces all after it, as in the trajectory store.
        """
        slots = np.asarray(slots, dtype=np.int64)
        positions = np.asarray(positions, dtype=np.int64)
        drawn_again = positions <= self._last[slots]
        for row in drawn_again.nonzero()[0]:
            self._rewind(int(slots[row]), int(positions[row]))
        words, lengths = as_words(ids, marked_counts(counts, self._size))
        names_cut_tokens = 2 * counts > self._size
        # Where no token was cut there is nothing to write: such a row has no words.
        filtered = counts < self._size
        if not filtered.all():
            slots = slots[filtered]
            positions = positions[filtered]
            lengths = lengths[filtered]
            names_cut_tokens = names_cut_tokens[filtered]
        if not len(slots):
            return
        self._append(slots, words, lengths)
        fields = {
            "positions": positions.astype(np.int32),
            "lengths_and_cut": (2 * lengths + names_cut_tokens).astype(np.uint32),
        }
        self._rows.write(slots, self._rows.counts[slots], fields)
        self._last[slots] = positions

    def _append(self, slots: np.ndarray, words: np.ndarray, lengths: np.ndarray) -> None:
        """Appends ``lengths[i]`` of the words to each ``slots[i]``, in their order."""
        used = self._words.counts[slots]
        ends = used + lengths
        more = self._words.missing(slots, ends)
        chunks = int(more.sum())
        self._check_room(rows=len(slots), chunks=chunks)
        if chunks:
            if not len(self._pool):
                self._pool = self._new_pool()
            self._words.reserve(slots, more)
        self._pool[self._places(slots, used, ends)] = words
        self._words.counts[slots] = ends

    def _check_room(self, rows: int, chunks: int) -> None:
        """Raises RuntimeError where so many further rows and chunks are above the limit."""
        if self.bytes + chunks * _CHUNK_BYTES + rows * _ROW_BYTES <= self._limit:
            return
        stored_rows = int(self._rows.counts.sum())
        running = int((self._words.counts > 0).sum())
        mean = int(self._words.counts.sum()) / max(stored_rows, 1)
        raise RuntimeError(
            "--sampling.correct_mask or --sampling.score_centering: the tokens that sampling left at"
            f" {stored_rows} positions of {running} running requests take {self.bytes / 2**30:.2f} GiB,"
            f" {mean:.0f} words a"
            f" position, above the limit of {self._limit / 2**30:.2f} GiB. Leave fewer tokens (--sampling.top_k,"
            " --sampling.min_p, a lower --rollout.top_p), run fewer requests at once, allow shorter responses, or"
            " raise --sampling.mask_gib (additional_config['sampling_mask_gib'] of an engine of your own)."
        )

    def _new_pool(self) -> np.ndarray:
        """Address space for as many chunks as the limit allows, uint16."""
        # Without reserved memory: Linux joins this piece with its neighbors, and refuses to fork a process with a
        # reserved piece that is larger than the machine's memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        chunks = max(self._limit // _CHUNK_BYTES, 1)
        memory = mmap.mmap(-1, chunks * _CHUNK_BYTES, flags=flags)
        return np.frombuffer(memory, dtype=np.uint16)

    def _places(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Where the words from ``starts[i]`` to before ``ends[i]`` of each ``slots[i]`` are in the pool, one by one.

        The slots hold the chunks for them. For example, with chunks of 512 words, words 500 to 1029 of a slot with
        chunks [3, 8, 5] are in three runs: 12 words at the end of chunk 3, all 512 of chunk 8, 6 at the start of 5.
        """
        first_chunks = starts // _CHUNK
        touched = np.where(ends > starts, (ends - 1) // _CHUNK - first_chunks + 1, 0)
        # One run for each chunk that a row touches.
        row = np.repeat(np.arange(len(slots)), touched)
        nth_chunk = ranges(first_chunks, touched)
        run_starts = np.maximum(starts[row], nth_chunk * _CHUNK)
        run_ends = np.minimum(ends[row], (nth_chunk + 1) * _CHUNK)
        run_places = self._words.table[slots[row], nth_chunk] * _CHUNK + run_starts % _CHUNK
        return ranges(run_places, run_ends - run_starts)

    def _rewind(self, slot: int, position: int) -> None:
        """Forgets a slot's rows from a position on."""
        count = self._rows.find(slot, "positions", position)
        rows = self._rows.read(slot, 0, count)
        self._rows.counts[slot] = count
        self._words.counts[slot] = int((rows["lengths_and_cut"] // 2).sum()) if rows else 0
        self._last[slot] = rows["positions"][-1] if rows else -1

    def read(self, slot: int) -> SamplingMask:
        """The mask of a slot's unfinished trajectory."""
        rows = self._rows.read(slot)
        if not rows:
            return SamplingMask.of(self._size, {})
        words = self._pool.reshape(-1, _CHUNK)[self._words.used_chunks(slot)].reshape(-1)
        lengths_and_cut = rows["lengths_and_cut"].astype(np.int64)
        return SamplingMask(
            size=self._size,
            positions=rows["positions"].astype(np.int64),
            cut=lengths_and_cut % 2 == 1,
            lengths=lengths_and_cut // 2,
            words=words[: self._words.counts[slot]],
        )

    def clear(self, slot: int) -> None:
        """Forgets a slot's mask, as its trajectory begins or ends."""
        self._last[slot] = -1
        self._rows.clear(slot)
        self._words.clear(slot)
