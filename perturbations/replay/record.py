# SPDX-License-Identifier: Apache-2.0
"""What was fed to the model: one sparse record per trajectory."""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass

import numpy as np

from perturbations.streams import SEED_BYTES

# First byte: version in the two high bits, flags in the others. Then K, the seed, and three lengths as varints: a
# short answer's record is mostly header, so every byte counts.
_VERSION = 3 << 6
_HEADER = struct.Struct("<BB6s")
_HAS_WEIGHTS, _HAS_SIGMA, _ONE_SIGMA, _WIDE_IDS, _HAS_VECTORS, _HAS_NORMALIZER = (1 << bit for bit in range(6))


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
        parts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[3:]}
        kept = {name: None if part is None else part[:count] for name, part in parts.items()}
        return ReplayRecord(self.seed, min(self.prompt_tokens, num_tokens), num_tokens, **kept)

    def to_bytes(self) -> bytes:
        """Serialises without loss: per position K ids of 2 or 3 bytes, K float32 weights, mostly 1 byte of position.

        Raises:
            ValueError: for a token id of 2^24 or more, or a seed outside [0, 2^48).
        """
        if not 0 <= self.seed < 1 << 8 * SEED_BYTES:
            raise ValueError(f"replay record: seed {self.seed} must be in [0, 2^48); take one of trajectory_seed().")
        count, width = self.ids.shape
        largest = int(self.ids.max(initial=0))
        if largest >= 1 << 24:
            raise ValueError(f"replay record: token id {largest} is too large; ids below {1 << 24} are supported.")
        flags = _WIDE_IDS if largest >= 1 << 16 else 0
        parts = [_pack_gaps(self.positions), _pack_ids(self.ids, 3 if flags else 2)]
        if not (width == 1 and bool((self.weights == 1.0).all())):
            flags |= _HAS_WEIGHTS
            parts.append(np.ascontiguousarray(self.weights, "<f4").tobytes())
        if self.sigma is not None:
            flags |= _HAS_SIGMA
            same = bool(count) and bool((self.sigma == self.sigma[0]).all())
            flags |= _ONE_SIGMA if same else 0
            parts.append(np.ascontiguousarray(self.sigma[:1] if same else self.sigma, "<f4").tobytes())
        parts.append(np.packbits(self.agreed).tobytes())
        lengths = b"".join(map(_varint, (self.prompt_tokens, self.num_tokens, count)))
        if self.normalizer is not None:
            flags |= _HAS_NORMALIZER
            parts.append(np.ascontiguousarray(self.normalizer, "<f4").tobytes())
        if self.vectors is not None:
            flags |= _HAS_VECTORS
            parts.append(_varint(self.vectors.shape[1]) + np.ascontiguousarray(self.vectors, "<f4").tobytes())
        header = _HEADER.pack(_VERSION | flags, width, self.seed.to_bytes(SEED_BYTES, "little"))
        return header + lengths + b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> ReplayRecord:
        """Reads what :meth:`to_bytes` wrote.

        Raises:
            ValueError: where the bytes are not a whole record of this version.
        """
        if len(data) < _HEADER.size or data[0] & _VERSION != _VERSION:
            raise ValueError(
                f"not a replay record of this version: {len(data)} bytes that begin with {bytes(data[:1])!r}."
                " Records are not kept across versions; sample again."
            )
        flags, width, seed = _HEADER.unpack_from(data)
        seed = int.from_bytes(seed, "little")
        reader = _Reader(data, _HEADER.size)
        prompt, length, count = reader.varint(), reader.varint(), reader.varint()
        positions = _unpack_gaps(reader, count)
        if not 0 <= prompt <= length < 1 << 31 or (count and not positions[-1] < length):
            raise ValueError(f"replay record: {prompt} prompt tokens of {length}, and positions outside of them.")
        id_bytes = 3 if flags & _WIDE_IDS else 2
        ids = _unpack_ids(reader.take(count * width * id_bytes), id_bytes).reshape(count, width)
        if flags & _HAS_WEIGHTS:
            weights = reader.floats(count * width).reshape(count, width)
        else:
            weights = np.ones((count, width), dtype=np.float32)
        sigma = None
        if flags & _HAS_SIGMA:
            values = reader.floats(1 if flags & _ONE_SIGMA else count)
            sigma = np.repeat(values, count) if flags & _ONE_SIGMA else values
        bits = np.frombuffer(reader.take((count + 7) // 8), dtype=np.uint8)
        agreed = np.unpackbits(bits, count=count).astype(bool)
        normalizer = reader.floats(count) if flags & _HAS_NORMALIZER else None
        vectors = None
        if flags & _HAS_VECTORS:
            size = reader.varint()
            vectors = reader.floats(count * size).reshape(count, size)
        reader.end()
        return cls(seed, prompt, length, positions, ids, weights, sigma, agreed, vectors, normalizer)


class _Reader:
    """Takes slices off a byte string and notices when it is too short or too long."""

    def __init__(self, data: bytes, offset: int) -> None:
        self._data, self._offset = data, offset

    def take(self, size: int) -> bytes:
        part = self._data[self._offset : self._offset + size]
        if len(part) != size:
            raise ValueError(f"replay record is cut short: {size} bytes wanted at {self._offset}, {len(part)} left.")
        self._offset += size
        return part

    def varint(self) -> int:
        value = shift = 0
        while shift < 63:
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise ValueError("replay record: a length of more than 63 bits.")

    def floats(self, count: int) -> np.ndarray:
        return np.frombuffer(self.take(4 * count), dtype="<f4").astype(np.float32)

    def end(self) -> None:
        if self._offset != len(self._data):
            raise ValueError(f"replay record has {len(self._data) - self._offset} bytes too many.")


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the high bit says that more follow."""
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])


def _pack_gaps(positions: np.ndarray) -> bytes:
    """Ascending positions as gaps of one byte; 255 says that four bytes follow."""
    gaps = np.diff(positions.astype(np.int64), prepend=0)
    small = np.minimum(gaps, 255).astype(np.uint8)
    return small.tobytes() + gaps[gaps >= 255].astype("<u4").tobytes()


def _unpack_gaps(reader: _Reader, count: int) -> np.ndarray:
    gaps = np.frombuffer(reader.take(count), dtype=np.uint8).astype(np.int64)
    large = gaps == 255
    gaps[large] = np.frombuffer(reader.take(4 * int(large.sum())), dtype="<u4")
    positions = np.cumsum(gaps)
    if count and positions[-1] >= 1 << 31:
        raise ValueError(f"replay record: position {positions[-1]} is too large.")
    return positions.astype(np.int32)


def _pack_ids(ids: np.ndarray, id_bytes: int) -> bytes:
    raw = np.ascontiguousarray(ids, "<u4").view(np.uint8).reshape(*ids.shape, 4)
    return raw[..., :id_bytes].tobytes()


def _unpack_ids(data: bytes, id_bytes: int) -> np.ndarray:
    raw = np.frombuffer(data, dtype=np.uint8).reshape(-1, id_bytes)
    wide = np.zeros((len(raw), 4), dtype=np.uint8)
    wide[:, :id_bytes] = raw
    return wide.view("<u4").reshape(-1).astype(np.int32)
