"""Counter-based random streams: each draw is a pure function of (trajectory seed, position, stream, index).

No state, so a draw does not depend on batch order, batch size, chunking, preemption or device. The mixing
function is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), in wrapping int64 arithmetic, which
is exact everywhere; only log, cos and exp may differ between devices, in the last bits of a float.
"""

from __future__ import annotations

import enum
import hashlib
import math

import torch
from torch import Tensor


class Stream(enum.IntEnum):
    """What a draw is for. Draws of different streams at one position are independent."""

    GATE = 1
    TOKEN = 2
    NOISE = 3
    WEIGHTS = 4


SEED_BYTES = 6


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
_POSITION = _signed(0xD1342543DE82EF95)
_STREAM = _signed(0xDA942042E4DD58B5)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def trajectory_seed(*parts: int | str | bytes) -> int:
    """Hashes any identifying parts (run seed, prompt, sample number, …) to one seed.

    Args:
        parts: integers, strings or bytes; their order and boundaries matter.

    Returns:
        An integer in [0, 2^48): two of a million trajectories share a seed with probability 0.002, and a
        record needs only six bytes for it.
    """
    digest = hashlib.blake2b(digest_size=SEED_BYTES)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


def keys(seeds: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """One key for each (trajectory, position) of a stream.

    Args:
        seeds: trajectory seeds, int64, any shape.
        positions: positions in the trajectory (prompt included), int64, broadcastable to ``seeds``.
        stream: what the draws are for.

    Returns:
        int64, the broadcast shape.
    """
    mixed = _mix(seeds + _GOLDEN)
    mixed = _mix(mixed + positions * _POSITION)
    return _mix(mixed + _signed(int(stream) * _STREAM % (1 << 64)))


def _bits(keys_: Tensor, n: int | Tensor) -> Tensor:
    """(…,) keys to (…, n) int64 of 64 random bits each; or the bits at given counters (…, n)."""
    counters = n if isinstance(n, Tensor) else torch.arange(n, dtype=torch.int64, device=keys_.device)
    return _mix(keys_.unsqueeze(-1) + (counters + 1) * _GOLDEN)


def uniform(keys_: Tensor, n: int | Tensor) -> Tensor:
    """Uniform draws in the open interval (0, 1), on a grid of 2^-24.

    Args:
        keys_: (…,) int64 from :func:`keys`.
        n: draws per key; or which of a key's draws, (…, n) int64 of at least 0, for example token ids.

    Returns:
        (…, n) float32.
    """
    return _shift_right(_bits(keys_, n), 41).float() * 2.0**-23 + 2.0**-24


def normal(keys_: Tensor, n: int) -> Tensor:
    """Standard normal draws by the Box-Muller transform, two from each 64 bits.

    Args:
        keys_: (…,) int64 from :func:`keys`.
        n: draws per key.

    Returns:
        (…, n) float32.
    """
    bits = _bits(keys_, (n + 1) // 2)
    radius = torch.sqrt(-2.0 * torch.log((_shift_right(bits, 40).float() + 0.5) * 2.0**-24))
    angle = (bits & 0xFFFFFF).float() * (2.0 * math.pi * 2.0**-24)
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)[..., :n]


def gumbel(keys_: Tensor, n: int | Tensor) -> Tensor:
    """Gumbel(0, 1) draws, -log(-log(u)).

    Args:
        keys_: (…,) int64 from :func:`keys`.
        n: as in :func:`uniform`.

    Returns:
        (…, n) float32.
    """
    return -torch.log(-torch.log(uniform(keys_, n)))
