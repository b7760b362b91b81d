# SPDX-License-Identifier: Apache-2.0
"""Which tokens a request's sampling left to be drawn: recorded at the rollout, for the trainer's log-probabilities.

Top-p, top-k, min-p, a grammar and the like cut tokens before one is drawn. `SamplingMask` holds the tokens that were
left at each position of a trajectory, exactly and sparsely; a position where nothing was cut takes no space.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perturbations.replay import packing

# A word of this value stands for so many tokens skipped, and for none that is named.
_SKIP = 0xFFFF


def as_words(ids: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sets of tokens as 16-bit words: how many tokens lie between one and the next, the first one's from the start.

    Args:
        ids: ascending within each set, (Σ counts,).
        counts: tokens of each set, (N,).

    Returns:
        Words, (Σ lengths,) uint16, of which one more stands before a token for each 65,535 skipped; and how many words
        each set has, (N,) int64.
    """
    gaps = np.diff(ids, prepend=ids[:1])
    gaps -= 1
    starts = (np.cumsum(counts) - counts)[counts > 0]
    gaps[starts] = ids[starts]
    if not len(gaps) or int(gaps.max()) < _SKIP:
        return gaps.astype(np.uint16), counts
    skips = gaps // _SKIP
    ends = np.cumsum(skips + 1, dtype=np.int64)
    words = np.full(ends[-1], _SKIP, dtype=np.uint16)
    words[ends - 1] = gaps - _SKIP * skips
    total = np.concatenate([np.zeros(1, dtype=np.int64), ends])[np.cumsum(counts)]
    return words, np.diff(total, prepend=0)


def as_ids(words: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What :func:`as_words` was given: ids, (Σ counts,) int64, and counts, (N,) int64."""
    named = words != _SKIP
    total = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(words.astype(np.int64) + named)])
    starts, ends = np.cumsum(lengths) - lengths, np.cumsum(lengths)
    ids = total[1:] - np.repeat(total[starts], lengths) - 1
    count = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(named)])
    return ids[named], count[ends] - count[starts]


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The tokens left at each of the N positions of one trajectory where some were cut.

    Attributes:
        size: V.
        positions: of the tokens drawn, ascending, (N,) int64.
        cut: whether the words name the tokens that were cut, being fewer, and not those left, (N,) bool.
        lengths: how many words belong to each position, (N,) int64.
        words: the tokens, as of :func:`as_words`, (Σ lengths,) uint16.
    """

    size: int
    positions: np.ndarray
    cut: np.ndarray
    lengths: np.ndarray
    words: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.positions.nbytes + self.cut.nbytes + self.lengths.nbytes + self.words.nbytes

    @classmethod
    def of(cls, size: int, left: dict[int, tuple[bool, np.ndarray]]) -> SamplingMask:
        """From each position's ``cut`` and ids."""
        positions = np.array(sorted(left), dtype=np.int64)
        pairs = [left[int(position)] for position in positions]
        ids = np.concatenate([np.zeros(0, dtype=np.int64), *(ids for _, ids in pairs)]).astype(np.int64)
        words, lengths = as_words(ids, np.array([len(part) for _, part in pairs], dtype=np.int64))
        return cls(size, positions, np.array([cut for cut, _ in pairs], dtype=bool), lengths, words)

    def __len__(self) -> int:
        return len(self.positions)

    def by_position(self) -> dict[int, tuple[bool, np.ndarray]]:
        """What :meth:`of` takes."""
        ids, counts = as_ids(self.words, self.lengths)
        parts = np.split(ids, np.cumsum(counts)[:-1]) if len(self) else []
        return {int(p): (bool(cut), ids) for p, cut, ids in zip(self.positions, self.cut, parts)}

    def left(self) -> list[np.ndarray]:
        """The tokens left at each position."""
        every = np.arange(self.size)
        return [np.delete(every, ids) if cut else ids for cut, ids in self.by_position().values()]

    def _of(self, span: slice) -> SamplingMask:
        """The mask of some of the positions, by their index."""
        ends = np.cumsum(self.lengths)
        first, last, _ = span.indices(len(self))
        words = slice(int(ends[first - 1]) if first else 0, int(ends[last - 1]) if last else 0)
        return SamplingMask(self.size, self.positions[span], self.cut[span], self.lengths[span], self.words[words])

    def truncate(self, num_tokens: int) -> SamplingMask:
        """The mask of the trajectory's first ``num_tokens`` tokens."""
        return self._of(slice(0, int(np.searchsorted(self.positions, num_tokens))))

    def joined(self, later: SamplingMask, turn: int) -> SamplingMask:
        """The mask of a trajectory after a further turn.

        Args:
            later: of the turn that begins at position ``turn``.
            turn: positions from here on are the later turn's.
        """
        both = self.truncate(turn), later._of(slice(int(np.searchsorted(later.positions, turn)), len(later)))
        names = ("positions", "cut", "lengths", "words")
        return SamplingMask(later.size, *(np.concatenate([getattr(part, name) for part in both]) for name in names))

    def to_bytes(self) -> bytes:
        """As bytes, without loss: see :func:`perturbations.replay.packing.mask_bytes`."""
        return packing.mask_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> SamplingMask:
        """Reads what :meth:`to_bytes` wrote.

        Raises:
            ValueError: where the bytes were cut or altered.
        """
        return cls(**packing.mask_fields(data))
