# SPDX-License-Identifier: Apache-2.0
"""Which tokens a request's sampling left to be drawn: recorded at the rollout, for the trainer's log-probabilities.

Top-p, top-k, min-p, a grammar and the like cut tokens before one is drawn. `SamplingMask` holds the tokens that were
left at each position of a trajectory, exactly and sparsely; a position where nothing was cut takes no space.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perturbations.replay import packing

_VERSION = 1


def pack(drawable: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that may be drawn, small enough to be copied to the host at every step.

    Args:
        drawable: logits after everything that cuts tokens, which are -inf there, (B, V).

    Returns:
        One bit for each token, the first in a byte's lowest, (B, ⌈V/8⌉) uint8; and how many are set, (B,) int64.
    """
    kept = drawable > -torch.inf
    bits = F.pad(kept, (0, -kept.shape[-1] % 8)).view(len(kept), -1, 8)
    places = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits * places).sum(dim=-1, dtype=torch.uint8), kept.sum(dim=-1)


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The tokens left at each of the N positions of one trajectory where some were cut.

    Attributes:
        size: V.
        positions: of the tokens drawn, ascending, (N,) int64.
        cut: whether ``ids`` names the tokens that were cut, being fewer, and not those left, (N,) bool.
        counts: how many ids belong to each position, (N,) int64.
        ids: ascending within a position, (Σ counts,) int64.
    """

    size: int
    positions: np.ndarray
    cut: np.ndarray
    counts: np.ndarray
    ids: np.ndarray

    @classmethod
    def of(cls, size: int, left: dict[int, tuple[bool, np.ndarray]]) -> SamplingMask:
        """From each position's ``cut`` and ids."""
        positions = np.array(sorted(left), dtype=np.int64)
        pairs = [left[int(position)] for position in positions]
        ids = [ids for _, ids in pairs]
        return cls(
            size,
            positions,
            np.array([cut for cut, _ in pairs], dtype=bool),
            np.array([len(part) for part in ids], dtype=np.int64),
            np.concatenate([np.zeros(0, dtype=np.int64), *ids]).astype(np.int64),
        )

    def __len__(self) -> int:
        return len(self.positions)

    def by_position(self) -> dict[int, tuple[bool, np.ndarray]]:
        """What :meth:`of` takes."""
        parts = np.split(self.ids, np.cumsum(self.counts)[:-1]) if len(self) else []
        return {int(p): (bool(cut), ids) for p, cut, ids in zip(self.positions, self.cut, parts)}

    def left(self) -> list[np.ndarray]:
        """The tokens left at each position."""
        every = np.arange(self.size)
        return [np.delete(every, ids) if cut else ids for cut, ids in self.by_position().values()]

    def truncate(self, num_tokens: int) -> SamplingMask:
        """The mask of the trajectory's first ``num_tokens`` tokens."""
        return SamplingMask.of(self.size, {p: entry for p, entry in self.by_position().items() if p < num_tokens})

    def joined(self, later: SamplingMask, turn: int) -> SamplingMask:
        """The mask of a trajectory after a further turn.

        Args:
            later: of the turn that begins at position ``turn``.
            turn: positions from here on are the later turn's.
        """
        both = {p: entry for p, entry in self.by_position().items() if p < turn}
        both |= {p: entry for p, entry in later.by_position().items() if p >= turn}
        return SamplingMask.of(later.size, both)

    def to_bytes(self) -> bytes:
        """Serialises without loss: one to two bytes an id, at most V/2 bytes a position, and a checksum at the end."""
        starts = np.cumsum(self.counts) - self.counts
        gaps = np.diff(self.ids, prepend=0)
        first = starts[self.counts > 0]
        gaps[first] = self.ids[first]
        head = [np.array([self.size, len(self)]), np.diff(self.positions, prepend=0), 2 * self.counts + self.cut]
        return packing.sealed([_varints(np.concatenate([*head, gaps]))], _VERSION)

    @classmethod
    def from_bytes(cls, data: bytes) -> SamplingMask:
        """Reads what :meth:`to_bytes` wrote.

        Raises:
            ValueError: where the bytes were cut or altered.
        """
        numbers = _from_varints(packing.unsealed(data, _VERSION, "sampling mask").rest())
        if len(numbers) < 2 or len(numbers) < 2 + 2 * numbers[1]:
            raise ValueError(f"sampling mask is cut short: {len(numbers)} numbers.")
        size, n = int(numbers[0]), int(numbers[1])
        gaps, packed, deltas = numbers[2 : 2 + n], numbers[2 + n : 2 + 2 * n], numbers[2 + 2 * n :]
        counts = packed // 2
        if len(deltas) != counts.sum():
            raise ValueError(f"sampling mask is cut short: {counts.sum()} ids wanted, {len(deltas)} there.")
        total = np.cumsum(deltas)
        before = np.concatenate([np.zeros(1, dtype=np.int64), total])[np.cumsum(counts) - counts]
        return cls(size, np.cumsum(gaps), packed % 2 == 1, counts, total - np.repeat(before, counts))


def _varints(values: np.ndarray) -> bytes:
    """Seven bits a byte, the lowest first; the high bit says that more follow. Values below 2^28."""
    width = 1 + sum((values >= 1 << bits).astype(np.int64) for bits in (7, 14, 21))
    place = np.arange(4)
    data = (values[:, None] >> 7 * place & 0x7F) | (place < width[:, None] - 1) * 0x80
    return data[place < width[:, None]].astype(np.uint8).tobytes()


def _from_varints(data: bytes) -> np.ndarray:
    raw = np.frombuffer(data, dtype=np.uint8).astype(np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.flatnonzero(raw < 0x80) + 1])[:-1]
    place = np.arange(len(raw)) - np.repeat(starts, np.diff(starts, append=len(raw)))
    return np.add.reduceat((raw & 0x7F) << 7 * place, starts)


class SamplingMaskStore:
    """The masks of a worker's live trajectories, by slot."""

    def __init__(self, size: int) -> None:
        """
        Args:
            size: V.
        """
        self._size = size
        self._left: defaultdict[int, dict[int, tuple[bool, np.ndarray]]] = defaultdict(dict)

    def write(self, slots: Sequence[int], positions: Sequence[int], bits: np.ndarray, counts: np.ndarray) -> None:
        """Notes the tokens left at one position of each of several slots.

        Args:
            slots: (N,).
            positions: (N,).
            bits: as :func:`pack` makes them, (N, ⌈V/8⌉).
            counts: likewise, (N,).
        """
        cut = 2 * counts > self._size
        # Eight bytes at once: of a large vocabulary nearly all of them are 0.
        words = np.zeros((len(bits), -(-bits.shape[1] // 8)), dtype=np.uint64)
        sparse = words.view(np.uint8)
        sparse[:, : bits.shape[1]] = bits
        sparse[cut, : bits.shape[1]] ^= 0xFF
        rows, places = np.nonzero(words)
        found = sparse.reshape(*words.shape, 8)[rows, places]
        which, bit = np.nonzero(np.unpackbits(found, axis=1, bitorder="little"))
        rows, ids = rows[which], 64 * places[which] + bit
        inside = ids < self._size  # inverted, the last byte has bits beyond the vocabulary
        parts = np.split(ids[inside], np.searchsorted(rows[inside], np.arange(1, len(slots))))
        for slot, position, is_cut, part in zip(slots, positions, cut, parts):
            if is_cut and not len(part):
                self._left[int(slot)].pop(int(position), None)
            else:
                self._left[int(slot)][int(position)] = (bool(is_cut), part)

    def read(self, slot: int) -> SamplingMask:
        """The mask of a slot's trajectory so far."""
        return SamplingMask.of(self._size, self._left[slot])

    def clear(self, slot: int) -> None:
        """A trajectory begins or ends."""
        self._left.pop(slot, None)
