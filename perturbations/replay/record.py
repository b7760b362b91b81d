# SPDX-License-Identifier: Apache-2.0
"""What was fed to the model: one sparse record per trajectory."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from dataclasses import dataclass

import numpy as np

from perturbations.replay import packing
from perturbations.streams import SEED_BYTES

# First byte: version in the two high bits, flags in the others. Then K, the model, the seed, and three lengths as
# varints: a short answer's record is mostly header, so every byte counts. A K that is no byte is 0 there, and a varint
# in front of the lengths.
_VERSION = 4
_HEADER = struct.Struct("<BBH6s")
_HAS_WEIGHTS, _HAS_SIGMA, _ONE_SIGMA, _WIDE_IDS, _HAS_VECTORS, _HAS_NORMALIZER = (1 << bit for bit in range(6))
_WHAT = "replay record"

# Candidates of a position. They take as much memory as the vector of a dense edit in a large model, and no more.
MOST_CANDIDATES = 4096


def model_fingerprint(vocabulary: int, hidden: int) -> int:
    """What a record keeps of its model: a hash of the embedding matrix's shape (V, D), in [1, 2^16).

    The shape and not the weights, which every update changes.
    """
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
        kept = {name: part[:count] for name, part in vars(self).items() if isinstance(part, np.ndarray)}
        return dataclasses.replace(
            self, prompt_tokens=min(self.prompt_tokens, num_tokens), num_tokens=num_tokens, **kept
        )

    def check_model(self, vocabulary: int, hidden: int) -> None:
        """Refuses a model that this record cannot be of.

        Args:
            vocabulary: V of the model that is to be fed.
            hidden: D, likewise.

        Raises:
            ValueError: where the rollout's embedding matrix had another shape, or there is no row for a candidate.
        """
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
        """Serialises without loss: per position K ids of 2 or 3 bytes, K float32 weights, mostly 1 byte of position.

        The last four bytes are a checksum of all others.

        Raises:
            ValueError: for more than 4096 candidates, a token id of 2^24 or more, or a seed outside [0, 2^48).
        """
        if not 0 <= self.seed < 1 << 8 * SEED_BYTES:
            raise ValueError(f"replay record: seed {self.seed} must be in [0, 2^48); take one of trajectory_seed().")
        count, width = self.ids.shape
        if width > MOST_CANDIDATES:
            raise ValueError(
                f"replay record: {width} candidates of a position; there may be 1 to {MOST_CANDIDATES}. Mix fewer"
                " tokens: most perturbations call their number k."
            )
        largest = int(self.ids.max(initial=0))
        if largest >= 1 << 24:
            raise ValueError(f"replay record: token id {largest} is too large; ids below {1 << 24} are supported.")
        flags = _WIDE_IDS if largest >= 1 << 16 else 0
        parts = [
            packing.gaps(self.positions, self.agreed, self.prompt_tokens),
            packing.ids(self.ids, 3 if flags else 2),
        ]
        if not (width == 1 and bool((self.weights == 1.0).all())):
            flags |= _HAS_WEIGHTS
            parts.append(packing.floats(self.weights))
        if self.sigma is not None:
            flags |= _HAS_SIGMA
            same = bool(count) and bool((self.sigma == self.sigma[0]).all())
            flags |= _ONE_SIGMA if same else 0
            parts.append(packing.floats(self.sigma[:1] if same else self.sigma))
        if self.normalizer is not None:
            flags |= _HAS_NORMALIZER
            parts.append(packing.floats(self.normalizer))
        if self.vectors is not None:
            flags |= _HAS_VECTORS
            parts.append(packing.varint(self.vectors.shape[1]) + packing.floats(self.vectors))
        seed = self.seed.to_bytes(SEED_BYTES, "little")
        narrow = 0 < width < 256
        header = _HEADER.pack(_VERSION % 4 << 6 | flags, width if narrow else 0, self.model, seed)
        numbers = (self.prompt_tokens, self.num_tokens - self.prompt_tokens, count)
        lengths = map(packing.varint, numbers if narrow else (width, *numbers))
        return packing.sealed([header, *lengths, *parts], _VERSION)

    @classmethod
    def from_bytes(cls, data: bytes) -> ReplayRecord:
        """Reads what :meth:`to_bytes` wrote.

        Raises:
            ValueError: where the bytes are not a whole record of this version, as it was written.
        """
        if len(data) < _HEADER.size or data[0] >> 6 != _VERSION % 4:
            raise ValueError(
                f"not a replay record of this version: {len(data)} bytes that begin with {bytes(data[:1])!r}."
                " Records are not kept across versions; sample again."
            )
        reader = packing.unsealed(data, _VERSION, _WHAT)
        flags, width, model, seed = _HEADER.unpack(reader.take(_HEADER.size))
        width = width or reader.varint()
        prompt, generated, count = reader.varint(), reader.varint(), reader.varint()
        length = prompt + generated
        positions, agreed = reader.gaps(count, prompt)
        if not length < 1 << 31 or (count and not positions[-1] < length):
            raise ValueError(f"replay record: {prompt} prompt tokens of {length}, and positions outside of them.")
        if width > MOST_CANDIDATES or (count and not width):
            raise ValueError(
                f"replay record: {count} positions with {width} candidates each; there are 1 to {MOST_CANDIDATES}."
            )
        ids = reader.ids(count * width, 3 if flags & _WIDE_IDS else 2).reshape(count, width)
        if flags & _HAS_WEIGHTS:
            weights = reader.floats(count * width).reshape(count, width)
        else:
            weights = np.ones((count, width), dtype=np.float32)
        sigma = None
        if flags & _HAS_SIGMA:
            values = reader.floats(1 if flags & _ONE_SIGMA else count)
            sigma = np.repeat(values, count) if flags & _ONE_SIGMA else values
        normalizer = reader.floats(count) if flags & _HAS_NORMALIZER else None
        vectors = None
        if flags & _HAS_VECTORS:
            size = reader.varint()
            vectors = reader.floats(count * size).reshape(count, size)
        reader.finish()
        seed = int.from_bytes(seed, "little")
        return cls(seed, prompt, length, positions, ids, weights, sigma, agreed, vectors, normalizer, model)
