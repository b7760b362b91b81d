# SPDX-License-Identifier: Apache-2.0
"""Numbers as bytes, and the checksum that says whether they arrived as they were sent: what records are packed with."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np

_CHECKSUM = struct.Struct("<I")
_LONG_GAP = 127  # seven bits of a byte, the eighth is a flag
_32_BITS = 0xFFFFFFFF


def sealed(parts: Sequence[bytes], version: int) -> bytes:
    """Parts joined, with their CRC-32 behind them, which begins with the format's version."""
    checksum = version
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([*parts, _CHECKSUM.pack(checksum)])


def unsealed(data: bytes, version: int, what: str) -> Reader:
    """Reads what :func:`sealed` made, once its checksum has been found right: any altered byte makes another one.

    Raises:
        ValueError: that names ``what``, for bytes that were cut or altered, or are of another version.
    """
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
        """The next bytes.

        Raises:
            ValueError: where so many are not left.
        """
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

    def gaps(self, count: int, start: int) -> tuple[np.ndarray, np.ndarray]:
        """What :func:`gaps` wrote: ascending positions (count,) int32, and a flag of each (count,) bool.

        Raises:
            ValueError: for positions that do not ascend, or of 2^31 and more.
        """
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

    The first step is counted from ``start``, modulo 2^32. Steps of 127 and more stand behind, in four bytes each.
    """
    steps = np.diff(positions.astype(np.int64), prepend=start) & _32_BITS
    short = np.minimum(steps, _LONG_GAP).astype(np.uint8)
    return (short << 1 | flags.astype(np.uint8)).tobytes() + steps[steps >= _LONG_GAP].astype("<u4").tobytes()


def ids(values: np.ndarray, size: int) -> bytes:
    """Non-negative integers (N, K) of ``size`` bytes each."""
    raw = np.ascontiguousarray(values, "<u4").view(np.uint8).reshape(*values.shape, 4)
    return raw[..., :size].tobytes()
