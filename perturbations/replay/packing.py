# SPDX-License-Identifier: Apache-2.0
"""Numbers as bytes with a checksum, and back; names of the parts of a trajectory on their way between processes."""

import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np

MOST_CANDIDATES = 4096
"""Candidates of a position: they take as much memory as the vector of a dense edit in a large model."""

RECORD, LOG_PROBS, MASK = "perturbation_record", "perturbation_log_probs", "sampling_mask"
COUNTS, EXPERTS = "perturbation_counts", "routed_experts"
UNPERTURBED, UNPERTURBED_EXPERTS = "unperturbed_answer", "unperturbed_experts"
PARTS = (RECORD, LOG_PROBS, MASK, COUNTS, EXPERTS, UNPERTURBED, UNPERTURBED_EXPERTS)

_CHECKSUM = struct.Struct("<I")
_VARINT_BYTES = 5


def sealed(parts: Sequence[bytes], version: int) -> bytes:
    """Parts joined, with their CRC-32 behind them, which begins with the format's version."""
    joined = b"".join(parts)
    return joined + _CHECKSUM.pack(zlib.crc32(joined, version))


def unsealed(data: bytes, version: int, what: str) -> "Reader":
    """Checks the checksum of :func:`sealed`; ``ValueError`` with ``what`` for altered bytes or another version."""
    data = bytes(data)
    end = len(data) - _CHECKSUM.size
    if end < 0 or _CHECKSUM.unpack_from(data, end)[0] != zlib.crc32(memoryview(data)[:end], version):
        why = "They were cut or altered, or written by another version of this project. Sample again"
        raise ValueError(f"{what} is damaged: its {len(data)} bytes do not have their checksum. {why}.")
    return Reader(data, end, what)


def floats(values: np.ndarray) -> bytes:
    """float32, four bytes each."""
    return np.ascontiguousarray(values, "<f4").tobytes()


def experts(array: np.ndarray) -> list[bytes]:
    """An array of three dimensions, of one or two bytes a number."""
    sizes = (*array.shape, array.itemsize)
    return [*map(varint, sizes), array.astype(f"<u{array.itemsize}", copy=False).tobytes()]


def varint(value: int) -> bytes:
    """One number of :func:`varints`."""
    return varints(np.array([value]))


def varints(values: np.ndarray) -> bytes:
    """Numbers in [0, 2^35): seven bits a byte, the lowest first; the high bit is set where more follow."""
    if values.max(initial=0) < 0x80:
        return values.astype(np.uint8).tobytes()
    places = np.arange(_VARINT_BYTES)
    rest = values[:, None] >> 7 * places
    parts = rest & 0x7F | np.where(rest >= 0x80, 0x80, 0)
    return parts[(rest > 0) | (places == 0)].astype(np.uint8).tobytes()


class Reader:
    """Takes slices off a byte string; ``ValueError`` where it is too short or too long, before memory is taken."""

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
        return int(self.varints(1)[0])

    def varints(self, count: int) -> np.ndarray:
        """The next numbers of :func:`varints`, (count,) int64."""
        there = np.frombuffer(self._data, np.uint8, self._end - self._offset, self._offset)
        size, needed = 0, count
        while size < needed:  # a byte more for each that is not a number's last
            size, needed = needed, count + int(np.count_nonzero(there[:needed] & 0x80))
        raw = np.frombuffer(self.take(size), np.uint8)
        if size == count:
            return raw.astype(np.int64)
        sizes = np.diff((raw < 0x80).nonzero()[0], prepend=-1)
        if sizes.max() > _VARINT_BYTES:
            raise ValueError(f"{self._what}: a number of more than {_VARINT_BYTES} bytes.")
        starts = sizes.cumsum() - sizes
        places = np.arange(size) - np.repeat(starts, sizes)
        return np.add.reduceat((raw & 0x7F).astype(np.int64) << 7 * places, starts)

    def floats(self, *shape: int) -> np.ndarray:
        """The next ones, float32 of this shape."""
        return np.frombuffer(self.take(4 * math.prod(shape)), dtype="<f4").astype(np.float32).reshape(shape)

    def all_floats(self) -> np.ndarray:
        """What is left, as float32."""
        return np.frombuffer(self.take(self._end - self._offset), dtype="<f4").astype(np.float32)

    def experts(self) -> np.ndarray:
        """What is left, as the array of :func:`experts`."""
        *shape, size = self.varints(4).tolist()
        array = np.frombuffer(self.take(math.prod(shape) * size), f"<u{size}").reshape(shape)
        self.finish()
        return array

    def finish(self) -> None:
        """``ValueError`` where bytes are left over."""
        if self._offset != self._end:
            raise ValueError(f"{self._what} has {self._end - self._offset} bytes too many.")
