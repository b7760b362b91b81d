# SPDX-License-Identifier: Apache-2.0
"""Where a record is packed: what a rollout leaves of a trajectory as bytes with checksums, and back.

The classes' own ``to_bytes`` and ``pack`` call :func:`record_bytes`, :func:`mask_bytes` and :func:`trajectory_parts`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from perturbations.seeds import SEED_BYTES

if TYPE_CHECKING:
    from perturbations.replay.trajectory import FinishedTrajectory, ReplayRecord, SamplingMask, UnperturbedAnswer

# First byte: version in the two high bits, flags in the others. Then K, the model, the seed, and three lengths as
# varints: a short answer's record is mostly header, so every byte counts. A K that is no byte is 0 there, and a varint
# in front of the lengths.
_RECORD_VERSION = 4
_HEADER = struct.Struct("<BBH6s")
_HAS_WEIGHTS, _HAS_SIGMA, _ONE_SIGMA, _WIDE_IDS, _HAS_VECTORS, _HAS_NORMALIZER = (1 << bit for bit in range(6))
_MASK_VERSION = 2
_TRAJECTORY_VERSION = 1  # of the bytes of log-probabilities and counts, and of an unperturbed answer
_CHECKSUM = struct.Struct("<I")
_LONG_GAP = 127  # seven bits of a byte, the eighth is a flag
_32_BITS = 0xFFFFFFFF

MOST_CANDIDATES = 4096
"""Candidates of a position: they take as much memory as the vector of a dense edit in a large model."""

RECORD, LOG_PROBS, MASK = "perturbation_record", "perturbation_log_probs", "sampling_mask"
COUNTS, UNPERTURBED = "perturbation_counts", "unperturbed_answer"
PARTS = (RECORD, LOG_PROBS, MASK, COUNTS, UNPERTURBED)
"""The names under which the parts of a trajectory travel, from the worker to the rollout actor and the trainer."""


# --- a replay record ----------------------------------------------------------------------------------------------


def record_bytes(record: ReplayRecord) -> bytes:
    """A record without loss: per position K ids of 2 or 3 bytes, K float32 weights, mostly 1 byte of position.

    Raises:
        ValueError: for more than 4096 candidates, a token id of 2^24 or more, or a seed outside [0, 2^48).
    """
    if not 0 <= record.seed < 1 << 8 * SEED_BYTES:
        raise ValueError(f"replay record: seed {record.seed} must be in [0, 2^48); take one of trajectory_seed().")
    count, width = record.ids.shape
    if width > MOST_CANDIDATES:
        raise ValueError(
            f"replay record: {width} candidates of a position; there may be 1 to {MOST_CANDIDATES}. Mix fewer"
            " tokens: most perturbations call their number k."
        )
    largest = int(record.ids.max(initial=0))
    if largest >= 1 << 24:
        raise ValueError(f"replay record: token id {largest} is too large; ids below {1 << 24} are supported.")
    flags = _WIDE_IDS if largest >= 1 << 16 else 0
    parts = [gaps(record.positions, record.agreed, record.prompt_tokens), ids(record.ids, 3 if flags else 2)]
    if not (width == 1 and bool((record.weights == 1.0).all())):
        flags |= _HAS_WEIGHTS
        parts.append(floats(record.weights))
    if record.sigma is not None:
        flags |= _HAS_SIGMA
        same = bool(count) and bool((record.sigma == record.sigma[0]).all())
        flags |= _ONE_SIGMA if same else 0
        parts.append(floats(record.sigma[:1] if same else record.sigma))
    if record.normalizer is not None:
        flags |= _HAS_NORMALIZER
        parts.append(floats(record.normalizer))
    if record.vectors is not None:
        flags |= _HAS_VECTORS
        parts.append(varint(record.vectors.shape[1]) + floats(record.vectors))
    seed = record.seed.to_bytes(SEED_BYTES, "little")
    narrow = 0 < width < 256
    header = _HEADER.pack(_RECORD_VERSION % 4 << 6 | flags, width if narrow else 0, record.model, seed)
    numbers = (record.prompt_tokens, record.num_tokens - record.prompt_tokens, count)
    lengths = map(varint, numbers if narrow else (width, *numbers))
    return sealed([header, *lengths, *parts], _RECORD_VERSION)


def record_fields(data: bytes) -> tuple[Any, ...]:
    """The attributes of :func:`record_bytes`'s record, in order; ``ValueError`` unless it is whole, of this version."""
    if len(data) < _HEADER.size or data[0] >> 6 != _RECORD_VERSION % 4:
        raise ValueError(
            f"not a replay record of this version: {len(data)} bytes that begin with {bytes(data[:1])!r}."
            " Records are not kept across versions; sample again."
        )
    reader = unsealed(data, _RECORD_VERSION, "replay record")
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
    candidates = reader.ids(count * width, 3 if flags & _WIDE_IDS else 2).reshape(count, width)
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
    return seed, prompt, length, positions, candidates, weights, sigma, agreed, vectors, normalizer, model


# --- a sampling mask ----------------------------------------------------------------------------------------------


def mask_bytes(mask: SamplingMask) -> bytes:
    """A mask without loss: two bytes an id, at most V bytes a position, and a checksum at the end."""
    head = [np.array([mask.size, len(mask)]), np.diff(mask.positions, prepend=0), 2 * mask.lengths + mask.cut]
    return sealed([_varints(np.concatenate(head)), mask.words.astype("<u2").tobytes()], _MASK_VERSION)


def mask_fields(data: bytes) -> dict[str, Any]:
    """The attributes of :func:`mask_bytes`'s mask; ``ValueError`` where the bytes were cut or altered."""
    reader = unsealed(data, _MASK_VERSION, "sampling mask")
    size, n = reader.varint(), reader.varint()
    rest = reader.rest()
    # A number takes four bytes at most, so no more are read as numbers than there can be.
    raw = np.frombuffer(rest[: 8 * n], dtype=np.uint8)
    ends = np.flatnonzero(raw < 0x80)[: 2 * n]
    if len(ends) < 2 * n:
        raise ValueError(f"sampling mask is cut short: {len(ends)} of {2 * n} numbers.")
    used = int(ends[-1]) + 1 if n else 0
    numbers = _from_varints(rest[:used])
    steps, packed = numbers[:n], numbers[n:]
    words, lengths = rest[used:], packed // 2
    if len(words) != 2 * lengths.sum():
        raise ValueError(f"sampling mask is cut short: {2 * lengths.sum()} bytes wanted, {len(words)} there.")
    positions, words = np.cumsum(steps), np.frombuffer(words, "<u2").astype(np.uint16)
    return {"size": size, "positions": positions, "cut": packed % 2 == 1, "lengths": lengths, "words": words}


def _varints(values: np.ndarray) -> bytes:
    """Seven bits a byte, the lowest first; the high bit says that more follow. Values below 2^28."""
    width = np.ones(len(values), dtype=np.int64)
    for bits in (7, 14, 21):
        width += values >= 1 << bits
    place = np.arange(4)
    data = (values[:, None] >> 7 * place & 0x7F) | (place < width[:, None] - 1) * 0x80
    return data[place < width[:, None]].astype(np.uint8).tobytes()


def _from_varints(data: bytes) -> np.ndarray:
    raw = np.frombuffer(data, dtype=np.uint8).astype(np.int64)
    if not len(raw):
        return raw
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.flatnonzero(raw < 0x80) + 1])[:-1]
    place = np.arange(len(raw)) - np.repeat(starts, np.diff(starts, append=len(raw)))
    return np.add.reduceat((raw & 0x7F) << 7 * place, starts)


# --- a trajectory -------------------------------------------------------------------------------------------------


def trajectory_parts(trajectory: FinishedTrajectory) -> dict[str, bytes]:
    """A trajectory as plain bytes by name, which no trainer moves to a device."""
    parts = {RECORD: record_bytes(trajectory.record)}
    parts[LOG_PROBS] = sealed([floats(trajectory.log_probs)], _TRAJECTORY_VERSION)
    counts = (trajectory.dropped, trajectory.prompted, trajectory.cached)
    if any(counts):
        parts[COUNTS] = sealed([varint(count) for count in counts], _TRAJECTORY_VERSION)
    if trajectory.unperturbed is not None:
        parts[UNPERTURBED] = answer_bytes(trajectory.unperturbed)
    if trajectory.sampling_mask is not None:
        parts[MASK] = mask_bytes(trajectory.sampling_mask)
    return parts


def trajectory_fields(parts: Mapping[str, bytes]) -> dict[str, Any]:
    """The numbers of :func:`trajectory_parts`'s trajectory; ``ValueError`` where bytes were cut or altered."""
    fields: dict[str, Any] = {"log_probs": unsealed(parts[LOG_PROBS], _TRAJECTORY_VERSION, LOG_PROBS).all_floats()}
    if COUNTS in parts:
        counts = unsealed(parts[COUNTS], _TRAJECTORY_VERSION, COUNTS)
        fields |= {name: counts.varint() for name in ("dropped", "prompted", "cached")}
    return fields


def answer_bytes(answer: UnperturbedAnswer) -> bytes:
    """An unperturbed answer as bytes with a checksum."""
    tokens = [varint(len(answer.tokens)), answer.tokens.astype("<i4").tobytes()]
    return sealed([*tokens, floats(answer.log_probs)], _TRAJECTORY_VERSION)


def answer_fields(data: bytes) -> dict[str, Any]:
    """The attributes of :func:`answer_bytes`'s answer; ``ValueError`` where the bytes were cut or altered."""
    reader = unsealed(data, _TRAJECTORY_VERSION, "unperturbed answer")
    tokens = np.frombuffer(reader.take(4 * reader.varint()), "<i4").astype(np.int32)
    return {"tokens": tokens, "log_probs": reader.all_floats()}


# --- numbers as bytes ---------------------------------------------------------------------------------------------


def sealed(parts: Sequence[bytes], version: int) -> bytes:
    """Parts joined, with their CRC-32 behind them, which begins with the format's version."""
    checksum = version
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([*parts, _CHECKSUM.pack(checksum)])


def unsealed(data: bytes, version: int, what: str) -> Reader:
    """Checks the checksum of :func:`sealed`; ``ValueError`` with ``what`` for altered bytes or another version."""
    data = bytes(data)
    end = len(data) - _CHECKSUM.size
    if end < 0 or _CHECKSUM.unpack_from(data, end)[0] != zlib.crc32(memoryview(data)[:end], version):
        raise ValueError(
            f"{what} is damaged: its {len(data)} bytes do not have their checksum. They were cut or altered, or written"
            " by another version of this project. Sample again."
        )
    return Reader(data, end, what)


class Reader:
    """Takes slices off a byte string and notices when it is too short or too long; no length is believed unseen."""

    def __init__(self, data: bytes, end: int, what: str) -> None:
        self._data, self._offset, self._end, self._what = data, 0, end, what

    def take(self, size: int) -> bytes:
        """The next bytes; ``ValueError`` where fewer are left."""
        left = self._end - self._offset
        if size > left:
            raise ValueError(f"{self._what} is cut short: {size} bytes wanted at {self._offset}, {left} left.")
        self._offset += size
        return self._data[self._offset - size : self._offset]

    def varint(self) -> int:
        """What :func:`varint` wrote."""
        value = shift = 0
        while shift < 63:
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise ValueError(f"{self._what}: a length of more than 63 bits.")

    def floats(self, count: int) -> np.ndarray:
        """float32, (count,)."""
        return np.frombuffer(self.take(4 * count), dtype="<f4").astype(np.float32)

    def all_floats(self) -> np.ndarray:
        """What is left, as float32."""
        return np.frombuffer(self.rest(), dtype="<f4").astype(np.float32)

    def gaps(self, count: int, start: int) -> tuple[np.ndarray, np.ndarray]:
        """What :func:`gaps` wrote: positions (count,) int32, ascending or ``ValueError``, and flags (count,) bool."""
        packed = np.frombuffer(self.take(count), dtype=np.uint8)
        steps = (packed >> 1).astype(np.int64)
        long = steps == _LONG_GAP
        steps[long] = np.frombuffer(self.take(4 * int(long.sum())), dtype="<u4")
        if count:
            steps[0] = (steps[0] + start) & _32_BITS
        positions = np.cumsum(steps)
        if count and (positions[-1] >= 1 << 31 or not (steps[1:] > 0).all()):
            raise ValueError(f"{self._what}: positions up to {positions[-1]} that do not ascend or are too large.")
        return positions.astype(np.int32), (packed & 1).astype(bool)

    def ids(self, count: int, size: int) -> np.ndarray:
        """What :func:`ids` wrote, (count,) int32."""
        raw = np.frombuffer(self.take(count * size), dtype=np.uint8).reshape(-1, size)
        wide = np.zeros((len(raw), 4), dtype=np.uint8)
        wide[:, :size] = raw
        return wide.view("<u4").reshape(-1).astype(np.int32)

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(self._end - self._offset)

    def finish(self) -> None:
        """Raises ``ValueError`` where bytes are left over."""
        if self._offset != self._end:
            raise ValueError(f"{self._what} has {self._end - self._offset} bytes too many.")


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the high bit says that more follow."""
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])


def floats(values: np.ndarray) -> bytes:
    """float32, four bytes each."""
    return np.ascontiguousarray(values, "<f4").tobytes()


def gaps(positions: np.ndarray, flags: np.ndarray, start: int) -> bytes:
    """Ascending positions with a flag each, mostly in one byte: the flag, and seven bits of the step from the last one.

    The first step is counted from ``start``, modulo 2^32. Steps of 127 and more follow, in four bytes each.
    """
    steps = np.diff(positions.astype(np.int64), prepend=start) & _32_BITS
    short = np.minimum(steps, _LONG_GAP).astype(np.uint8)
    return (short << 1 | flags.astype(np.uint8)).tobytes() + steps[steps >= _LONG_GAP].astype("<u4").tobytes()


def ids(values: np.ndarray, size: int) -> bytes:
    """Non-negative integers (N, K) of ``size`` bytes each."""
    raw = np.ascontiguousarray(values, "<u4").view(np.uint8).reshape(*values.shape, 4)
    return raw[..., :size].tobytes()
