# SPDX-License-Identifier: Apache-2.0
"""What a rollout leaves of a trajectory: its record, sampling mask and log-probabilities, from the worker to the loss.

A trajectory is rows in the worker's store (at first on their way from the device,
`ngrpo.rollout.async_scheduling.Note`), then a `FinishedTrajectory`, its bytes between processes (`packing.py`), and
positions of a batch where a forward replays it (`flat_records.py`).
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from perturbations.replay import packing

# Bytes that a trajectory takes beside its numbers: its name, its objects and those of its arrays. Measured with Python
# 3.11 and numpy 2 as the growth of a process that holds 50,000 answers of three tokens: 1,300 each.
OVERHEAD = 1300
# A word of this value stands for so many tokens skipped, and for none that is named.
_SKIP = 0xFFFF


def model_fingerprint(vocabulary: int, hidden: int) -> int:
    """A hash of the embedding matrix's shape (V, D), in [1, 2^16): the weights change with every update."""
    return zlib.crc32(f"{vocabulary} {hidden}".encode()) % 0xFFFF + 1


@dataclass(frozen=True, eq=False)
class ReplayRecord:
    """The perturbed inputs of one trajectory of N perturbed positions.

    Attributes:
        seed: the trajectory's seed, in [0, 2^48), from which noise is drawn again.
        prompt_tokens: length of the prompt.
        num_tokens: length of the trajectory, prompt included.
        positions: perturbed positions, ascending, counted from the first prompt token, (N,) int32.
        ids: candidates, (N, K) int32.
        weights: weights of the candidates, (N, K) float32.
        sigma: noise scales, (N,) float32, or None where nothing is noisy.
        agreed: whether the token in the text is the ordinarily sampled one, (N,) bool.
        vectors: what was added to the mixture, (N, D) float32, or None: 4·D bytes per perturbed position.
        normalizer: what normalising the weights divided out, (N,) float32, or None where no density needs it.
        model: :func:`model_fingerprint` of the model whose tokens ``ids`` are; 0 where it is not known.
    """

    seed: int
    prompt_tokens: int
    num_tokens: int
    positions: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    sigma: np.ndarray | None
    agreed: np.ndarray
    vectors: np.ndarray | None = None
    normalizer: np.ndarray | None = None
    model: int = 0

    def __len__(self) -> int:
        return len(self.positions)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplayRecord) and self.to_bytes() == other.to_bytes()

    @property
    def size(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, np.ndarray))

    def truncate(self, num_tokens: int) -> ReplayRecord:
        """The record of the trajectory's first ``num_tokens`` tokens."""
        if num_tokens >= self.num_tokens:
            return self
        count = int(np.searchsorted(self.positions, num_tokens))
        arrays = {name: part[:count] for name, part in vars(self).items() if isinstance(part, np.ndarray)}
        return dataclasses.replace(
            self, prompt_tokens=min(self.prompt_tokens, num_tokens), num_tokens=num_tokens, **arrays
        )

    def check_model(self, vocabulary: int, hidden: int) -> None:
        """Raises ``ValueError`` unless the rollout's embedding matrix was (V, D) with a row for each candidate."""
        here = f"a model with {vocabulary} tokens and {hidden} dimensions"
        if self.model not in (0, model_fingerprint(vocabulary, hidden)):
            raise ValueError(
                f"replay record: it is of another model, and cannot be replayed in {here}. Rollout and replay must have"
                " the same vocabulary and the same hidden size."
            )
        self.check_tokens(vocabulary)
        if self.vectors is not None and self.vectors.shape[1] != hidden:
            raise ValueError(f"replay record: vectors of {self.vectors.shape[1]} dimensions do not fit {here}.")

    def check_tokens(self, vocabulary: int) -> None:
        """Raises ``ValueError`` where a candidate is none of the V tokens of a vocabulary."""
        lowest, highest = int(self.ids.min(initial=0)), int(self.ids.max(initial=0))
        if lowest < 0 or highest >= vocabulary:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"replay record: token id {wrong} is none of the model's: 0 to {vocabulary - 1}.")

    def to_bytes(self) -> bytes:
        """As bytes, without loss: :func:`perturbations.replay.packing.record_bytes`."""
        return packing.record_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> ReplayRecord:
        """Reads what :meth:`to_bytes` wrote; ``ValueError`` for anything but a whole record of this version."""
        return cls(*packing.record_fields(data))


def as_words(ids: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sets of tokens as 16-bit words, each the number of tokens between one and the next.

    Args:
        ids: ascending within each set, (Σ counts,).
        counts: tokens of each set, (N,).

    Returns:
        Words, (Σ lengths,) uint16, with one more before a token for each 65,535 skipped; and how many words each set
        has, (N,) int64.
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
    """The tokens that top-p, top-k, min-p, a grammar and the like left at the N positions where they cut some.

    Attributes:
        size: V.
        positions: of the tokens drawn, ascending, (N,) int64.
        cut: whether the words name the tokens that were cut, where these are fewer than those left, (N,) bool.
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
        """The mask of a trajectory after a further turn, whose mask ``later`` holds the positions from ``turn`` on."""
        both = self.truncate(turn), later._of(slice(int(np.searchsorted(later.positions, turn)), len(later)))
        names = ("positions", "cut", "lengths", "words")
        return SamplingMask(later.size, *(np.concatenate([getattr(part, name) for part in both]) for name in names))

    def to_bytes(self) -> bytes:
        """As bytes, without loss: :func:`perturbations.replay.packing.mask_bytes`."""
        return packing.mask_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> SamplingMask:
        """Reads what :meth:`to_bytes` wrote; ``ValueError`` where the bytes were cut or altered."""
        return cls(**packing.mask_fields(data))


@dataclass(frozen=True)
class UnperturbedAnswer:
    """A short answer without a perturbation.

    Attributes:
        tokens: prompt and answer, (T,) int32.
        log_probs: log π of the answer's tokens at the rollout, (A,) float32.
    """

    tokens: np.ndarray
    log_probs: np.ndarray


@dataclass(frozen=True, eq=False)
class FinishedTrajectory:
    """What a rollout leaves of one trajectory.

    Attributes:
        record: its perturbed inputs.
        log_probs: log π at the rollout of the trajectory's last L tokens, (L,) float32. From a worker these are the
            generated ones; of a whole conversation all, NaN where none was generated.
        sampling_mask: the tokens that sampling left at each position; None where this is not recorded.
        dropped: edits of earlier turns whose tokens an agent or a chat template has changed.
        prompted: tokens of the prompts of all turns.
        cached: how many of these the engine found in its prefix cache.
        unperturbed: a short answer of the same engine with the perturbation off, None beside most answers.
    """

    record: ReplayRecord
    log_probs: np.ndarray
    sampling_mask: SamplingMask | None = None
    dropped: int = 0
    prompted: int = 0
    cached: int = 0
    unperturbed: UnperturbedAnswer | None = None

    @property
    def size(self) -> int:
        """Bytes of memory that holding it takes."""
        mask = 0 if self.sampling_mask is None else self.sampling_mask.nbytes
        return OVERHEAD + self.record.size + self.log_probs.nbytes + mask

    def truncate(self, num_tokens: int) -> FinishedTrajectory:
        """What there is of the trajectory's first ``num_tokens`` tokens."""
        beyond = self.record.num_tokens - num_tokens
        if beyond <= 0:
            return self
        return dataclasses.replace(
            self,
            record=self.record.truncate(num_tokens),
            log_probs=self.log_probs[: max(len(self.log_probs) - beyond, 0)],
            sampling_mask=None if self.sampling_mask is None else self.sampling_mask.truncate(num_tokens),
        )

    def pack(self) -> dict[str, bytes]:
        """As bytes by name, without loss: :func:`perturbations.replay.packing.trajectory_parts`."""
        return packing.trajectory_parts(self)

    @classmethod
    def unpack(cls, parts: Mapping[str, bytes]) -> FinishedTrajectory:
        """Reads what :meth:`pack` wrote; ``ValueError`` where bytes were cut or altered on their way."""
        mask, answer = parts.get(packing.MASK), parts.get(packing.UNPERTURBED)
        return cls(
            record=ReplayRecord.from_bytes(parts[packing.RECORD]),
            sampling_mask=None if mask is None else SamplingMask.from_bytes(mask),
            unperturbed=None if answer is None else UnperturbedAnswer(**packing.answer_fields(answer)),
            **packing.trajectory_fields(parts),
        )
