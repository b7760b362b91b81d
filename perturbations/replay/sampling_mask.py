# SPDX-License-Identifier: Apache-2.0
"""The tokens that a request's sampling left at each position, held in two bytes for each token named."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perturbations.replay import packing

_VERSION = 2  # of the format, which the checksum includes
# A word of this value skips as many tokens and names none.
_SKIP = 0xFFFF


def as_words(ids: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """N sets of tokens as words of two bytes: words (Σ lengths,) uint16 and lengths (N,) int64.

    A token's word is the number of tokens between the one before it in the set and itself; the set's first token counts
    from id 0. For each 65,535 tokens between the two, a word ``_SKIP`` comes before it. The sets {3, 5} and {65539} are
    the words 3, 1, and 65535, 4, with lengths 2, 2.

    ``ids``: of the sets one after the other, ascending within each, (Σ counts,). ``counts``: tokens in each, (N,).
    """
    tokens_between = np.diff(ids, prepend=ids[:1])
    tokens_between -= 1
    first_of_sets = (np.cumsum(counts) - counts)[counts > 0]
    tokens_between[first_of_sets] = ids[first_of_sets]
    if not len(tokens_between) or int(tokens_between.max()) < _SKIP:
        return tokens_between.astype(np.uint16), counts
    skips = tokens_between // _SKIP  # words before each token's own
    ends = np.cumsum(skips + 1, dtype=np.int64)
    words = np.full(ends[-1], _SKIP, dtype=np.uint16)
    words[ends - 1] = tokens_between - _SKIP * skips
    ends_of_sets = _with_leading_zero(ends)[np.cumsum(counts)]
    return words, np.diff(ends_of_sets, prepend=0)


def as_ids(words: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The arguments of :func:`as_words`, int64, from its results."""
    names_a_token = words != _SKIP
    ends = np.cumsum(lengths)
    starts = ends - lengths
    # A word moves the id on by the tokens that it passes, and by one more where it names a token.
    moved = _with_leading_zero(np.cumsum(words.astype(np.int64) + names_a_token))
    moved_before_set = np.repeat(moved[starts], lengths)
    ids = moved[1:] - moved_before_set - 1
    named = _with_leading_zero(np.cumsum(names_a_token))
    return ids[names_a_token], named[ends] - named[starts]


def _with_leading_zero(sums: np.ndarray) -> np.ndarray:
    """Cumulative sums, with the sum of nothing before them."""
    return np.concatenate([np.zeros(1, dtype=np.int64), sums])


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The tokens that top-p, top-k, min-p or a grammar left at the N positions where they cut some."""

    size: int  # V
    positions: np.ndarray  # of the tokens drawn, ascending, (N,) int64
    cut: np.ndarray  # whether the words name the tokens cut, where these are fewer than those left, (N,) bool
    lengths: np.ndarray  # the number of words of each position, as in :func:`as_words`, (N,) int64
    words: np.ndarray  # the tokens of all positions, as in :func:`as_words`, (Σ lengths,) uint16

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))

    @classmethod
    def of(cls, size: int, sets: dict[int, tuple[bool, np.ndarray]]) -> SamplingMask:
        """The mask from a pair for each position: whether the ids are those cut (else those left), and the ids."""
        positions = sorted(sets)
        cut = [sets[position][0] for position in positions]
        id_sets = [sets[position][1] for position in positions]
        all_ids = np.concatenate([np.zeros(0, dtype=np.int64), *id_sets]).astype(np.int64)
        counts = np.array([len(ids) for ids in id_sets], dtype=np.int64)
        words, lengths = as_words(all_ids, counts)
        return cls(
            size=size,
            positions=np.array(positions, dtype=np.int64),
            cut=np.array(cut, dtype=bool),
            lengths=lengths,
            words=words,
        )

    def __len__(self) -> int:
        return len(self.positions)

    def by_position(self) -> dict[int, tuple[bool, np.ndarray]]:
        """For each position whether its ids are those cut, and the ids: the argument ``sets`` of :meth:`of`."""
        all_ids, counts = as_ids(self.words, self.lengths)
        id_sets = np.split(all_ids, np.cumsum(counts)[:-1]) if len(self) else []
        positions = self.positions.tolist()
        ids_are_cut = self.cut.tolist()
        return {position: (is_cut, ids) for position, is_cut, ids in zip(positions, ids_are_cut, id_sets)}

    def left(self) -> list[np.ndarray]:
        """The tokens left at each position."""
        vocabulary = np.arange(self.size)
        return [np.delete(vocabulary, ids) if cut else ids for cut, ids in self.by_position().values()]

    def _slice(self, start: int, stop: int) -> SamplingMask:
        """The mask of the positions with index ``start`` to ``stop``."""
        ends = _with_leading_zero(np.cumsum(self.lengths))
        return SamplingMask(
            size=self.size,
            positions=self.positions[start:stop],
            cut=self.cut[start:stop],
            lengths=self.lengths[start:stop],
            words=self.words[ends[start] : ends[stop]],
        )

    def truncate(self, num_tokens: int) -> SamplingMask:
        """The mask of the trajectory's first ``num_tokens`` tokens."""
        count = int(np.searchsorted(self.positions, num_tokens))
        return self._slice(0, count)

    def joined(self, later: SamplingMask, turn: int) -> SamplingMask:
        """The mask of a trajectory after a further turn; ``later`` has the positions from ``turn`` on."""
        earlier = self.truncate(turn)
        first_of_turn = int(np.searchsorted(later.positions, turn))
        of_turn = later._slice(first_of_turn, len(later))
        return SamplingMask(
            size=later.size,
            positions=np.concatenate([earlier.positions, of_turn.positions]),
            cut=np.concatenate([earlier.cut, of_turn.cut]),
            lengths=np.concatenate([earlier.lengths, of_turn.lengths]),
            words=np.concatenate([earlier.words, of_turn.words]),
        )

    def to_bytes(self) -> bytes:
        """The mask as bytes, without loss: two bytes for each word, at most V bytes for each position. In this order:

        varints V, N, N steps from one position to the next, and N times 2 · length + cut; the words; the checksum.
        """
        steps = np.diff(self.positions, prepend=0)
        numbers = np.concatenate([[self.size, len(self)], steps, 2 * self.lengths + self.cut])
        words = self.words.astype("<u2").tobytes()
        return packing.sealed([packing.varints(numbers), words], _VERSION)

    @classmethod
    def from_bytes(cls, data: bytes) -> SamplingMask:
        """Reads what :meth:`to_bytes` wrote; ``ValueError`` where the bytes were cut or altered."""
        reader = packing.unsealed(data, _VERSION, "sampling mask")
        size, count = reader.varints(2).tolist()
        steps = reader.varints(count)
        lengths_and_cut = reader.varints(count)
        lengths = lengths_and_cut // 2
        words = np.frombuffer(reader.take(2 * int(lengths.sum())), "<u2").astype(np.uint16)
        reader.finish()
        return cls(
            size=size,
            positions=np.cumsum(steps),
            cut=lengths_and_cut % 2 == 1,
            lengths=lengths,
            words=words,
        )
