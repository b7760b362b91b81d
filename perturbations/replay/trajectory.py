# SPDX-License-Identifier: Apache-2.0
"""A trajectory after its rollout: record, sampling mask and log-probabilities, also as bytes between processes."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from perturbations.replay import packing
from perturbations.seeds import SEED_BYTES

# Flags, the model and the seed. A short response's record is mostly header, so every byte counts.
_HEADER = struct.Struct("<BH6s")
_WEIGHTS, _SIGMA, _ONE_SIGMA, _WIDE_IDS, _VECTORS, _NORMALIZER = (1 << bit for bit in range(6))
_RECORD_VERSION, _MASK_VERSION = 5, 2
_TRAJECTORY_VERSION = 1  # of log-probabilities, counts and an unperturbed response
_32_BITS = 0xFFFFFFFF
_BYTE_VALUES = np.array([1, 1 << 8, 1 << 16], dtype=np.int32)

# Bytes of a trajectory's name and objects: the growth of a process (Python 3.11, numpy 2) that holds 50,000 of them.
OVERHEAD = 1300
# A word of this value skips as many tokens and names none.
_SKIP = 0xFFFF


def model_fingerprint(vocabulary: int, hidden: int, module: bool = False) -> int:
    """A hash in [1, 2^16) of the embedding matrix's shape (V, D), and whether inputs pass a perturbation's module."""
    return zlib.crc32(f"{vocabulary} {hidden}{' module' * module}".encode()) % 0xFFFF + 1


@dataclass(frozen=True, eq=False)
class ReplayRecord:
    """The perturbed inputs of one trajectory of N perturbed positions.

    Attributes:
        seed: in [0, 2^48), from which noise is drawn again.
        prompt_tokens, num_tokens: length of the prompt, and of the trajectory with it.
        positions: ascending, counted from the first prompt token, (N,) int32.
        ids, weights: candidates, (N, K) int32, and their weights, (N, K) float32.
        sigma: noise scales, (N,) float32, or None without noise.
        agreed: whether the text has the token that was sampled without perturbation, (N,) bool.
        vectors: added to the mixture, (N, D) float32, or None: 4·D bytes per perturbed position.
        normalizer: of the weights, (N,) float32, or None where no density needs it.
        model: :func:`model_fingerprint` of the model with the tokens ``ids``; 0 where it is not known.
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
        prompt = min(self.prompt_tokens, num_tokens)
        return dataclasses.replace(self, prompt_tokens=prompt, num_tokens=num_tokens, **arrays)

    def check_model(self, vocabulary: int, hidden: int, module: bool | None = None) -> None:
        """Raises ``ValueError`` for a record of another model; ``module``: whether a perturbation's is attached."""
        here = f"a model with {vocabulary} tokens and {hidden} dimensions"
        known = {model_fingerprint(vocabulary, hidden, given): given for given in (False, True)}
        made_with = known.get(self.model, module)
        if module is not None and made_with != module:
            what, fix = "no learned module, and this model has one", "Detach it"
            if made_with:
                what = "the perturbation's learned module, and this model has none"
                fix = "Attach it: perturbations.parameters.attach(model, perturbation)"
            raise ValueError(f"replay record: its inputs passed {what}. {fix}.")
        if self.model and self.model not in known:
            needed = "Rollout and replay must have the same vocabulary and the same hidden size"
            raise ValueError(f"replay record: it is of another model, and cannot be replayed in {here}. {needed}.")
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
        """As bytes, without loss: per position K ids of 2 or 3 bytes, K float32 weights, mostly 1 byte of position.

        ``ValueError`` for more than 4096 candidates, a token id of 2^24 or more, or a seed outside [0, 2^48).
        """
        if not 0 <= self.seed < 1 << 8 * SEED_BYTES:
            raise ValueError(f"replay record: seed {self.seed} must be in [0, 2^48); take one of trajectory_seed().")
        count, width = self.ids.shape
        if width > packing.MOST_CANDIDATES:
            most = f"there may be 1 to {packing.MOST_CANDIDATES}. Mix fewer tokens, often the option k"
            raise ValueError(f"replay record: {width} candidates of a position; {most}.")
        largest = int(self.ids.max(initial=0))
        if largest >= 1 << 24:
            raise ValueError(f"replay record: token id {largest} is too large; ids below {1 << 24} are supported.")
        size = 3 if largest >= 1 << 16 else 2
        ids = np.ascontiguousarray(self.ids, "<u4").view(np.uint8).reshape(-1, 4)[:, :size]
        steps = self.positions.astype(np.int64)
        steps[1:] -= self.positions[:-1]
        steps[:1] = (steps[:1] - self.prompt_tokens) & _32_BITS  # modulo 2^32: it may be of an earlier turn
        one_sigma = self.sigma is not None and count > 0 and bool((self.sigma == self.sigma[0]).all())
        optional = {
            _WEIGHTS: None if width == 1 and bool((self.weights == 1.0).all()) else self.weights,
            _SIGMA: self.sigma[:1] if self.sigma is not None and one_sigma else self.sigma,
            _NORMALIZER: self.normalizer,
            _VECTORS: self.vectors,
        }
        present = {flag: part for flag, part in optional.items() if part is not None}
        flags = sum(present) | (_ONE_SIGMA if one_sigma else 0) | (_WIDE_IDS if size == 3 else 0)
        numbers = [width, self.prompt_tokens, self.num_tokens - self.prompt_tokens, count]
        numbers += [] if self.vectors is None else [self.vectors.shape[1]]
        header = _HEADER.pack(flags, self.model, self.seed.to_bytes(SEED_BYTES, "little"))
        parts = [packing.varints(2 * steps + self.agreed), ids.tobytes(), *map(packing.floats, present.values())]
        return packing.sealed([header, packing.varints(np.array(numbers)), *parts], _RECORD_VERSION)

    @classmethod
    def from_bytes(cls, data: bytes) -> ReplayRecord:
        """Reads what :meth:`to_bytes` wrote; ``ValueError`` for anything but a whole record of this version."""
        reader = packing.unsealed(data, _RECORD_VERSION, "replay record")
        flags, model, seed = _HEADER.unpack(reader.take(_HEADER.size))
        width, prompt, generated, count = reader.varints(4).tolist()
        dense = reader.varint() if flags & _VECTORS else 0
        if width > packing.MOST_CANDIDATES or (count and not width):
            most = packing.MOST_CANDIDATES
            raise ValueError(f"replay record: {count} positions with {width} candidates each; there are 1 to {most}.")
        numbers, length = reader.varints(count), prompt + generated
        steps = numbers >> 1
        if count:
            steps[0] = (int(steps[0]) + prompt) & _32_BITS
        positions = steps.cumsum()
        if length >= 1 << 31 or (count and (positions[-1] >= length or not steps[1:].all())):
            raise ValueError(f"replay record: positions that do not ascend, or that are outside of {length} tokens.")
        size = 3 if flags & _WIDE_IDS else 2
        raw = np.frombuffer(reader.take(count * width * size), dtype=np.uint8).reshape(-1, size)

        def optional(flag: int, *shape: int) -> np.ndarray | None:
            return reader.floats(*shape) if flags & flag else None

        weights = optional(_WEIGHTS, count, width)
        sigma = optional(_SIGMA, 1 if flags & _ONE_SIGMA else count)
        if weights is None:
            weights = np.ones((count, width), dtype=np.float32)
        if sigma is not None and flags & _ONE_SIGMA:
            sigma = np.repeat(sigma, count)
        ids = (raw.astype(np.int32) @ _BYTE_VALUES[:size]).reshape(count, width)
        agreed, normalizer, vectors = numbers % 2 == 1, optional(_NORMALIZER, count), optional(_VECTORS, count, dense)
        reader.finish()
        inputs = positions.astype(np.int32), ids, weights, sigma, agreed, vectors, normalizer
        return cls(int.from_bytes(seed, "little"), prompt, length, *inputs, model)


def as_words(ids: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """N sets of tokens, (Σ counts,) ids ascending within each, as words (Σ lengths,) uint16 and lengths (N,) int64.

    A word is the number of tokens between one and the next, with one more before a token for each 65,535 skipped.
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
    """The arguments of :func:`as_words`, int64, from its results."""
    named = words != _SKIP
    total = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(words.astype(np.int64) + named)])
    starts, ends = np.cumsum(lengths) - lengths, np.cumsum(lengths)
    ids = total[1:] - np.repeat(total[starts], lengths) - 1
    count = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(named)])
    return ids[named], count[ends] - count[starts]


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The tokens that top-p, top-k, min-p or a grammar left at the N positions where they cut some."""

    size: int  # V
    positions: np.ndarray  # of the tokens drawn, ascending, (N,) int64
    cut: np.ndarray  # whether the words name the tokens cut, where these are fewer than those left, (N,) bool
    lengths: np.ndarray  # with ``words`` the tokens, as of :func:`as_words`
    words: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, np.ndarray))

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
        """The mask of a trajectory after a further turn; ``later`` has the positions from ``turn`` on."""
        both = self.truncate(turn), later._of(slice(int(np.searchsorted(later.positions, turn)), len(later)))
        names = ("positions", "cut", "lengths", "words")
        return SamplingMask(later.size, *(np.concatenate([getattr(part, name) for part in both]) for name in names))

    def to_bytes(self) -> bytes:
        """As bytes, without loss: two bytes an id, at most V bytes a position."""
        numbers = [[self.size, len(self)], np.diff(self.positions, prepend=0), 2 * self.lengths + self.cut]
        parts = [packing.varints(np.concatenate(numbers)), self.words.astype("<u2").tobytes()]
        return packing.sealed(parts, _MASK_VERSION)

    @classmethod
    def from_bytes(cls, data: bytes) -> SamplingMask:
        """Reads what :meth:`to_bytes` wrote; ``ValueError`` where the bytes were cut or altered."""
        reader = packing.unsealed(data, _MASK_VERSION, "sampling mask")
        size, count = reader.varints(2).tolist()
        positions, packed = np.cumsum(reader.varints(count)), reader.varints(count)
        words = np.frombuffer(reader.take(2 * int((packed // 2).sum())), "<u2").astype(np.uint16)
        reader.finish()
        return cls(size, positions, packed % 2 == 1, packed // 2, words)


@dataclass(frozen=True)
class UnperturbedAnswer:
    """A short response without a perturbation."""

    tokens: np.ndarray  # prompt and response, (T,) int32
    log_probs: np.ndarray  # of the response at the rollout, (A,) float32
    experts: np.ndarray | None = None  # as a trajectory's


@dataclass(frozen=True, eq=False)
class FinishedTrajectory:
    """A trajectory after its rollout.

    Attributes:
        record: its perturbed inputs.
        log_probs: log π at the rollout of the trajectory's last L tokens, (L,) float32, at the request's temperature,
            before its top-k, top-p and min-p, and after what else changed its logits (penalties, biases, lists of
            tokens). From a worker these are the generated ones; of a whole conversation all, NaN where none was
            generated.
        sampling_mask: the tokens that sampling left; None where these are not recorded.
        dropped: edits of earlier turns on tokens that an agent or a chat template has changed.
        prompted, cached: tokens of the prompts of all turns, and those in the engine's prefix cache.
        unperturbed: a short response of the same engine with the perturbation off, mostly None.
        experts: in a mixture of experts, the K experts of each of its L layers for the first P tokens, (P, L, K) uint8,
            or uint16 for more than 256 experts: L·K or 2·L·K bytes a token; None where they are not recorded.
    """

    record: ReplayRecord
    log_probs: np.ndarray
    sampling_mask: SamplingMask | None = None
    dropped: int = 0
    prompted: int = 0
    cached: int = 0
    unperturbed: UnperturbedAnswer | None = None
    experts: np.ndarray | None = None

    @property
    def size(self) -> int:
        """Bytes of memory that holding it takes."""
        further = (part.nbytes for part in (self.sampling_mask, self.experts) if part is not None)
        return OVERHEAD + self.record.size + self.log_probs.nbytes + sum(further)

    def truncate(self, num_tokens: int) -> FinishedTrajectory:
        """The trajectory's first ``num_tokens`` tokens."""
        beyond = self.record.num_tokens - num_tokens
        if beyond <= 0:
            return self
        return dataclasses.replace(
            self,
            record=self.record.truncate(num_tokens),
            log_probs=self.log_probs[: max(len(self.log_probs) - beyond, 0)],
            sampling_mask=None if self.sampling_mask is None else self.sampling_mask.truncate(num_tokens),
            experts=None if self.experts is None else self.experts[:num_tokens],
        )

    def pack(self) -> dict[str, bytes]:
        """As plain bytes by name, without loss, which no trainer moves to a device."""
        counts, answer = (self.dropped, self.prompted, self.cached), self.unperturbed
        parts = {packing.LOG_PROBS: [packing.floats(self.log_probs)]}
        if any(counts):
            parts[packing.COUNTS] = [packing.varints(np.array(counts))]
        if answer is not None:
            tokens = [packing.varint(len(answer.tokens)), answer.tokens.astype("<i4").tobytes()]
            parts[packing.UNPERTURBED] = [*tokens, packing.floats(answer.log_probs)]
            if answer.experts is not None:
                parts[packing.UNPERTURBED_EXPERTS] = packing.experts(answer.experts)
        if self.experts is not None:
            parts[packing.EXPERTS] = packing.experts(self.experts)
        packed = {name: packing.sealed(part, _TRAJECTORY_VERSION) for name, part in parts.items()}
        if self.sampling_mask is not None:
            packed[packing.MASK] = self.sampling_mask.to_bytes()
        return {packing.RECORD: self.record.to_bytes(), **packed}

    @classmethod
    def unpack(cls, parts: Mapping[str, bytes]) -> FinishedTrajectory:
        """Reads what :meth:`pack` wrote; ``ValueError`` where bytes were cut or altered on their way."""

        def reader(name: str) -> packing.Reader:
            return packing.unsealed(parts[name], _TRAJECTORY_VERSION, name)

        mask, answer = parts.get(packing.MASK), None
        experts, unperturbed = (
            reader(name).experts() if name in parts else None for name in (packing.EXPERTS, packing.UNPERTURBED_EXPERTS)
        )
        if packing.UNPERTURBED in parts:
            rest = reader(packing.UNPERTURBED)
            tokens = np.frombuffer(rest.take(4 * rest.varint()), "<i4").astype(np.int32)
            answer = UnperturbedAnswer(tokens, rest.all_floats(), unperturbed)
        return cls(
            ReplayRecord.from_bytes(parts[packing.RECORD]),
            reader(packing.LOG_PROBS).all_floats(),
            None if mask is None else SamplingMask.from_bytes(mask),
            *(reader(packing.COUNTS).varints(3).tolist() if packing.COUNTS in parts else (0, 0, 0)),
            unperturbed=answer,
            experts=experts,
        )
