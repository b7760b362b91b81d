# SPDX-License-Identifier: Apache-2.0
"""Numbers as bytes with a checksum, and back; names of the parts of a trajectory on their way between processes."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np

MOST_CANDIDATES = 4096
"""Candidates of a position: they take as much memory as the vector of a dense edit in a large model."""

RECORD, LOG_PROBS, MASK = "perturbation_record", "perturbation_log_probs", "sampling_mask"
COUNTS, UNPERTURBED = "perturbation_counts", "unperturbed_answer"
PARTS = (RECORD, LOG_PROBS, MASK, COUNTS, UNPERTURBED)

_CHECKSUM = struct.Struct("<I")
_VARINT_BYTES = 5


def sealed(parts: Sequence[bytes], version: int) -> bytes:
    """Parts joined, with their CRC-32 behind them, which begins with the format's version."""
    joined = b"".join(parts)
    return joined + _CHECKSUM.pack(zlib.crc32(joined, version))


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


def floats(values: np.ndarray) -> bytes:
    """float32, four bytes each."""
    return np.ascontiguousarray(values, "<f4").tobytes()


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the high bit is set where more follow."""
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])


def varints(values: np.ndarray) -> bytes:
    """Many of :func:`varint`, each in [0, 2^35)."""
    if values.max(initial=0) < 0x80:
        return values.astype(np.uint8).tobytes()
    place = np.arange(_VARINT_BYTES)
    rest = values[:, None] >> 7 * place
    more = 0x80 * (rest[:, 1:] > 0)
    rest &= 0x7F
    used = np.concatenate([np.ones((len(values), 1), dtype=bool), more > 0], axis=1)
    rest[:, :-1] |= more
    return rest[used].astype(np.uint8).tobytes()


class Reader:
    """Takes slices off a byte string; ``ValueError`` where it is too short or too long.

    No memory is taken for a length before so many bytes are there.
    """

    def __init__(self, data: bytes, end: int, what: str) -> None:
        self._data, self._offset, self._end, self._what = data, 0, end, what

    def take(self, size: int) -> bytes:
        """The next bytes."""
        left = self._end - self._offset
        if size > left:
            raise ValueError(f"{self._what} is cut short: {size} bytes wanted at {self._offset}, {left} left.")
        self._offset += size
        return self._data[self._offset - size : self._offset]

    def varint(self) -> int:
        """The next number of :func:`varint`."""
        value = 0
        for place in range(_VARINT_BYTES):
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return value
        raise ValueError(f"{self._what}: a number of more than {_VARINT_BYTES} bytes.")

    def varints(self, count: int) -> np.ndarray:
        """The next numbers of :func:`varints`, (count,) int64."""
        size = min(self._end - self._offset, _VARINT_BYTES * count)
        raw = np.frombuffer(self._data, np.uint8, size, self._offset)
        ends = np.flatnonzero(raw < 0x80)[:count]
        if len(ends) < count:
            raise ValueError(f"{self._what} is cut short: {len(ends)} of {count} numbers.")
        raw = np.frombuffer(self.take(int(ends[-1]) + 1 if count else 0), np.uint8).astype(np.int64)
        if len(raw) == count:
            return raw
        starts = np.concatenate([[0], ends[:-1] + 1])
        place = np.arange(len(raw)) - np.repeat(starts, ends + 1 - starts)
        if place.max() >= _VARINT_BYTES:
            raise ValueError(f"{self._what}: a number of more than {_VARINT_BYTES} bytes.")
        return np.add.reduceat((raw & 0x7F) << 7 * place, starts)

    def floats(self, *shape: int) -> np.ndarray:
        """The next ones, float32 of this shape."""
        return np.frombuffer(self.take(4 * math.prod(shape)), dtype="<f4").astype(np.float32).reshape(shape)

    def all_floats(self) -> np.ndarray:
        """What is left, as float32."""
        return np.frombuffer(self.take(self._end - self._offset), dtype="<f4").astype(np.float32)

    def finish(self) -> None:
        """``ValueError`` where bytes are left over."""
        if self._offset != self._end:
            raise ValueError(f"{self._what} has {self._end - self._offset} bytes too many.")
