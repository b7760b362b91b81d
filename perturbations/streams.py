# SPDX-License-Identifier: Apache-2.0
"""Counter-based random streams: each draw is a pure function of (trajectory seed, position, stream, index).

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), exact on every device.
"""

import enum
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

_Integers = TypeVar("_Integers", Tensor, np.ndarray)


class Stream(enum.IntEnum):
    """What a draw is for. Draws of different streams at one position are independent."""

    GATE = 1
    TOKEN = 2
    NOISE = 3
    WEIGHTS = 4
    GATE_PLAN = 5
    GATE_OPEN = 6
    CREDIT = 7


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_GOLDEN_INVERSE = _signed(pow(0x9E3779B97F4A7C15, -1, 1 << 64))
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
_POSITION = _signed(0xD1342543DE82EF95)
_OFFSETS = {stream: _signed(int(stream) * 0xDA942042E4DD58B5 % (1 << 64)) for stream in Stream}


def _shift_right(x: Any, bits: int) -> Any:
    """Logical right shift of int64 (the types' own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(integers: _Integers) -> _Integers:
    x: Any = integers  # tensors and arrays have these operators, and no type in common that says so
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def of_positions(seeds: _Integers, positions: _Integers) -> _Integers:
    """One key for each (trajectory, position), for :func:`of_stream`."""
    return _mix(_mix(seeds + _GOLDEN) + positions * _POSITION)


def of_stream(mixed: _Integers, stream: Stream) -> _Integers:
    return _mix(mixed + _OFFSETS[stream])


def of_streams(mixed: np.ndarray, streams: Sequence[Stream]) -> np.ndarray:
    """The keys of several streams: (N,) int64 of :func:`of_positions` to (streams, N)."""
    return _mix(mixed + np.array([[_OFFSETS[stream]] for stream in streams]))


def keys(seeds: _Integers, positions: _Integers, stream: Stream) -> _Integers:
    """One int64 key for each (trajectory, position) of a stream; ``positions`` count the prompt, and broadcast."""
    return of_stream(of_positions(seeds, positions), stream)


def below(keys_: _Integers, probability: float) -> _Integers:
    """Whether the first uniform draw of each key (…,) is below a probability, exactly as float32 compares them."""
    # The draw is (2n + 1) · 2^-24 with n < 2^23, which float32 holds exactly.
    least = math.ceil((float(np.float32(probability)) * 2.0**24 - 1.0) / 2.0)
    return _shift_right(_mix(keys_ + _GOLDEN), 41) < least


def _bits(keys_: Tensor, n: int | Tensor) -> Tensor:
    """(…,) keys to (…, n) int64 of 64 random bits each; or the bits at given counters (…, n)."""
    counters = n if isinstance(n, Tensor) else torch.arange(n, dtype=torch.int64, device=keys_.device)
    # keys + (counters + 1) · golden, modulo 2^64. A counter times a constant is an index to Inductor, which computes
    # indices in 32 bits on a GPU and refuses the constant.
    return _mix((keys_.unsqueeze(-1) * _GOLDEN_INVERSE + (counters + 1)) * _GOLDEN)


def uniform(keys_: Tensor, n: int | Tensor) -> Tensor:
    """Uniform draws in (0, 1), on a grid of 2^-24, (…, n) float32 for keys (…,); ``n``: how many, or which, (…, n)."""
    return _shift_right(_bits(keys_, n), 41).float() * 2.0**-23 + 2.0**-24


def normal(keys_: Tensor, n: int | Tensor) -> Tensor:
    """Standard normal draws (Box-Muller), as :func:`uniform`: two from each 64 bits, or one at each given counter."""
    if isinstance(n, Tensor):
        return _polar(_bits(keys_, n))[0]
    return torch.cat(_polar(_bits(keys_, (n + 1) // 2)), dim=-1)[..., :n]


def _polar(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent standard normal draws from each 64 bits."""
    radius = torch.sqrt(-2.0 * torch.log((_shift_right(bits, 40).float() + 0.5) * 2.0**-24))
    angle = (bits & 0xFFFFFF).float() * (2.0 * math.pi * 2.0**-24)
    return radius * torch.cos(angle), radius * torch.sin(angle)


def gumbel(keys_: Tensor, n: int | Tensor) -> Tensor:
    """Gumbel(0, 1) draws, -log(-log(u)), as :func:`uniform`."""
    return -torch.log(-torch.log(uniform(keys_, n)))


def exponential(keys_: Tensor, n: int | Tensor) -> Tensor:
    """Exponential(1) draws as :func:`uniform`, finite and above 0; all keys may share counters, (n,)."""
    # Small draws are resolved to 2^-40: the smallest decides a race of 10^5 tokens.
    share = (_shift_right(_bits(keys_, n), 24).float() + 0.5) * 2.0**-40
    return -torch.log1p(-share.clamp_max(1.0 - 2.0**-24))


_GAMMA_ROUNDS = 7


def log_gamma(keys_: Tensor, ids: Tensor, shape: Tensor) -> Tensor:
    """Logarithms of Gamma(shape, 1) draws, by Marsaglia and Tsang (ACM TOMS 26, 2000) with their boost below 1.

    ``ids``: which of a key's draws, as :func:`uniform`; ``shape`` > 0: (…, n) float32, as the result.
    """
    # Seven rounds, as nothing may wait for the device: a round accepts with probability at least 0.95, and the one draw
    # in 10^9 that no round accepts is the mode. One of 80 draws of shape 0.05 is below float32's smallest number, hence
    # logarithms.
    rounds = torch.arange(_GAMMA_ROUNDS, device=ids.device)
    counters = ids.unsqueeze(-1) * (2 * _GAMMA_ROUNDS + 1)
    flat = (*ids.shape[:-1], -1)
    x = normal(keys_, (counters + rounds).reshape(flat)).view(*ids.shape, -1)
    u = uniform(keys_, (counters + _GAMMA_ROUNDS + rounds).reshape(flat)).view(*ids.shape, -1)
    d = shape.unsqueeze(-1) + 2.0 / 3.0  # a - 1/3 of Gamma(a = shape + 1)
    root = 1.0 + x / torch.sqrt(9.0 * d)
    log_v = 3.0 * torch.log(root.clamp_min(1e-30))
    accepted = (root > 0.0) & (torch.log(u) < 0.5 * x * x + d * (1.0 - log_v.exp() + log_v))
    first = accepted.int().argmax(dim=-1, keepdim=True)
    log_v = torch.where(accepted.any(dim=-1), log_v.gather(-1, first).squeeze(-1), 0.0)
    boost = uniform(keys_, counters.squeeze(-1) + 2 * _GAMMA_ROUNDS)
    return torch.log(d.squeeze(-1)) + log_v + torch.log(boost) / shape
