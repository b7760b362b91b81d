# SPDX-License-Identifier: Apache-2.0
"""Numbers as bytes with a checksum, and back; the names under which a trajectory's byte strings travel."""

import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np

MOST_CANDIDATES = 4096
"""The most candidates of a position: so many take as much memory as the vector of a dense edit in a large model."""

RECORD = "perturbation_record"
LOG_PROBS = "perturbation_log_probs"
MASK = "sampling_mask"
COUNTS = "perturbation_counts"
EXPERTS = "routed_experts"
UNPERTURBED = "unperturbed_answer"
UNPERTURBED_EXPERTS = "unperturbed_experts"
PARTS = (RECORD, LOG_PROBS, MASK, COUNTS, EXPERTS, UNPERTURBED, UNPERTURBED_EXPERTS)

_CHECKSUM = struct.Struct("<I")
_VARINT_BYTES = 5


def sealed(parts: Sequence[bytes], version: int) -> bytes:
    """The parts joined, followed by their CRC-32; the format's version is the checksum's starting value."""
    joined = b"".join(parts)
    return joined + _CHECKSUM.pack(zlib.crc32(joined, version))


def unsealed(data: bytes, version: int, what: str) -> "Reader":
    """Checks the checksum of :func:`sealed`; ``ValueError`` with ``what`` for altered bytes or another version."""
    data = bytes(data)
    end = len(data) - _CHECKSUM.size
    is_intact = False
    if end >= 0:
        (checksum,) = _CHECKSUM.unpack_from(data, end)
        is_intact = checksum == zlib.crc32(memoryview(data)[:end], version)
    if not is_intact:
        raise ValueError(
            f"{what} is damaged: its {len(data)} bytes do not have their checksum. They were cut or altered, or written"
            " by another version of this project. Sample again."
        )
    return Reader(data, end, what)


def floats(values: np.ndarray) -> bytes:
    """float32, four bytes each."""
    return np.ascontiguousarray(values, "<f4").tobytes()


def experts(array: np.ndarray) -> list[bytes]:
    """An array of three dimensions with numbers of one or two bytes: its shape and item size, then the numbers."""
    sizes = [varint(size) for size in (*array.shape, array.itemsize)]
    numbers = array.astype(f"<u{array.itemsize}", copy=False).tobytes()
    return [*sizes, numbers]


def varint(value: int) -> bytes:
    """One number of :func:`varints`."""
    return varints(np.array([value]))


def varints(values: np.ndarray) -> bytes:
    """Whole numbers in [0, 2^35), (N,): seven bits in each byte, the lowest first.

    The high bit of a byte says that another byte of the number follows: 300 = 0b10_0101100 is 0b1_0101100, 0b0_0000010.
    """
    if values.max(initial=0) < 0x80:
        return values.astype(np.uint8).tobytes()
    places = np.arange(_VARINT_BYTES)
    remaining = values[:, None] >> 7 * places  # (N, 5): each number without the bits of its earlier bytes
    high_bits = np.where(remaining >= 0x80, 0x80, 0)
    number_bytes = remaining & 0x7F | high_bits
    is_used = (remaining > 0) | (places == 0)
    return number_bytes[is_used].astype(np.uint8).tobytes()


class Reader:
    """Takes slices off a byte string; ``ValueError`` where it is too short or too long, before memory is taken."""

    def __init__(self, data: bytes, end: int, what: str) -> None:
        """``end``: where the numbers end and the checksum begins. ``what``: what the bytes are, for messages."""
        self._data = data
        self._offset = 0
        self._end = end
        self._what = what

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
        remaining = np.frombuffer(self._data, np.uint8, self._end - self._offset, self._offset)
        # The numbers take ``count`` bytes, and one more for every byte of theirs that is not a number's last one.
        size = 0
        needed = count
        while size < needed:
            size = needed
            needed = count + int(np.count_nonzero(remaining[:size] & 0x80))
        raw = np.frombuffer(self.take(size), np.uint8)
        if size == count:
            return raw.astype(np.int64)
        last_bytes = (raw < 0x80).nonzero()[0]
        sizes = np.diff(last_bytes, prepend=-1)  # the bytes of each number
        if sizes.max() > _VARINT_BYTES:
            raise ValueError(f"{self._what}: a number of more than {_VARINT_BYTES} bytes.")
        starts = sizes.cumsum() - sizes
        places = np.arange(size) - np.repeat(starts, sizes)  # of each byte within its number
        shifted = (raw & 0x7F).astype(np.int64) << 7 * places
        return np.add.reduceat(shifted, starts)

    def floats(self, *shape: int) -> np.ndarray:
        """The next numbers of :func:`floats`, float32 of this shape."""
        data = self.take(4 * math.prod(shape))
        return np.frombuffer(data, dtype="<f4").astype(np.float32).reshape(shape)

    def all_floats(self) -> np.ndarray:
        """All remaining bytes, as float32."""
        data = self.take(self._end - self._offset)
        return np.frombuffer(data, dtype="<f4").astype(np.float32)

    def experts(self) -> np.ndarray:
        """All remaining bytes, as the array of :func:`experts`."""
        *shape, item_size = self.varints(4).tolist()
        data = self.take(math.prod(shape) * item_size)
        self.finish()
        return np.frombuffer(data, f"<u{item_size}").reshape(shape)

    def finish(self) -> None:
        """``ValueError`` where bytes are left over."""
        if self._offset != self._end:
            raise ValueError(f"{self._what} has {self._end - self._offset} bytes too many.")
