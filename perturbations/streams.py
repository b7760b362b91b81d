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

    GATE = 1  # whether `rate` selects the position
    TOKEN = 2  # the token that sampling draws
    NOISE = 3  # ε of σ · ε
    WEIGHTS = 4  # a perturbation's own draws: `Step.uniform` and the like
    GATE_PLAN = 5  # `Positions.uniform`, in a gate's plan()
    GATE_OPEN = 6  # `GateStep.uniform` and the like, in a gate's open()
    CREDIT = 7  # a credit's draws in the trainer


def _signed(value: int) -> int:
    """An unsigned number of 64 bits as the int64 with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_GOLDEN_INVERSE = _signed(pow(0x9E3779B97F4A7C15, -1, 1 << 64))
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
_POSITION = _signed(0xD1342543DE82EF95)
_OFFSETS = {stream: _signed(int(stream) * 0xDA942042E4DD58B5 % (1 << 64)) for stream in Stream}


def _shift_right(x: Any, bits: int) -> Any:
    """Logical right shift of int64, whose own shift is arithmetic and fills up with the sign."""
    lower_bits = (1 << (64 - bits)) - 1
    return (x >> bits) & lower_bits


def _mix(integers: _Integers) -> _Integers:
    """SplitMix64's finaliser, modulo 2^64."""
    x: Any = integers  # tensors and arrays share these operators, but no type that has them
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def of_positions(seeds: _Integers, positions: _Integers) -> _Integers:
    """One key for each (trajectory, position), for :func:`of_stream`."""
    mixed_seeds = _mix(seeds + _GOLDEN)
    return _mix(mixed_seeds + positions * _POSITION)


def of_stream(mixed: _Integers, stream: Stream) -> _Integers:
    """The keys of one stream, from those of :func:`of_positions`."""
    return _mix(mixed + _OFFSETS[stream])


def of_streams(mixed: np.ndarray, streams: Sequence[Stream]) -> np.ndarray:
    """The keys of several streams: (N,) int64 of :func:`of_positions` to (streams, N)."""
    offsets = np.array([[_OFFSETS[stream]] for stream in streams])  # (streams, 1)
    return _mix(mixed + offsets)


def keys(seeds: _Integers, positions: _Integers, stream: Stream) -> _Integers:
    """One int64 key for each (trajectory, position) of a stream; ``positions`` count the prompt, and broadcast."""
    return of_stream(of_positions(seeds, positions), stream)


def below(keys_: _Integers, probability: float) -> _Integers:
    """Whether the first uniform draw of each key (…,) is below a probability, exactly as float32 compares them."""
    # A uniform draw is (2 n + 1) · 2^-24 with a whole n < 2^23, which float32 holds exactly. So it is below the
    # probability where n is below this bound.
    bound = math.ceil((float(np.float32(probability)) * 2.0**24 - 1.0) / 2.0)
    first_bits = _mix(keys_ + _GOLDEN)
    return _shift_right(first_bits, 41) < bound


def _bits(keys_: Tensor, n: int | Tensor) -> Tensor:
    """64 random bits for each key and counter, (…, n) int64 for keys (…,).

    ``n``: the number of draws, whose counters are 0 to n − 1; or the counters themselves, (…, n) int64.
    """
    counters = n if isinstance(n, Tensor) else torch.arange(n, dtype=torch.int64, device=keys_.device)
    # The sum keys + (counters + 1) · golden, modulo 2^64, with golden factored out. Inductor takes a counter times a
    # constant for an index. On a GPU it computes indices in 32 bits, and refuses a constant of 64.
    offset_keys = keys_.unsqueeze(-1) * _GOLDEN_INVERSE + (counters + 1)
    return _mix(offset_keys * _GOLDEN)


def uniform(keys_: Tensor, n: int | Tensor) -> Tensor:
    """Uniform draws in (0, 1), on a grid of 2^-24, (…, n) float32 for keys (…,).

    ``n``: the number of draws for each key, or the counters of the draws, (…, n) int64.
    """
    whole_numbers = _shift_right(_bits(keys_, n), 41).float()  # below 2^23
    return whole_numbers * 2.0**-23 + 2.0**-24


def normal(keys_: Tensor, n: int | Tensor) -> Tensor:
    """Standard normal draws, as :func:`uniform`: two from each 64 bits, but one where ``n`` has the counters."""
    if isinstance(n, Tensor):
        first, _ = _box_muller(_bits(keys_, n))
        return first
    first, second = _box_muller(_bits(keys_, (n + 1) // 2))
    return torch.cat([first, second], dim=-1)[..., :n]


def _box_muller(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent standard normal draws from each 64 bits, by the method of Box and Muller."""
    uniform_draws = (_shift_right(bits, 40).float() + 0.5) * 2.0**-24  # from the upper 24 bits
    radius = torch.sqrt(-2.0 * torch.log(uniform_draws))
    angle = (bits & 0xFFFFFF).float() * (2.0 * math.pi * 2.0**-24)  # from the lower 24 bits
    return radius * torch.cos(angle), radius * torch.sin(angle)


def gumbel(keys_: Tensor, n: int | Tensor) -> Tensor:
    """Gumbel(0, 1) draws, -log(-log(u)), as :func:`uniform`."""
    return -torch.log(-torch.log(uniform(keys_, n)))


def exponential(keys_: Tensor, n: int | Tensor) -> Tensor:
    """Exponential(1) draws as :func:`uniform`, finite and above 0; ``n`` may be counters that all keys share, (n,)."""
    # A grid of 2^-40, since a token is drawn by the smallest of some 10^5 exponential draws.
    uniform_draws = (_shift_right(_bits(keys_, n), 24).float() + 0.5) * 2.0**-40
    return -torch.log1p(-uniform_draws.clamp_max(1.0 - 2.0**-24))


# Attempts of the rejection sampling below: a loop until all are accepted would wait for the device. An attempt is
# accepted with probability 0.95 or more, so that all seven fail for one draw in 10^9. That draw takes v = 1, which is
# about the median of Gamma(shape + 1).
_GAMMA_ROUNDS = 7


def log_gamma(keys_: Tensor, ids: Tensor, shape: Tensor) -> Tensor:
    """Logarithms of Gamma(shape, 1) draws, by Marsaglia and Tsang (ACM TOMS 26, 2000) with their boost below 1.

    In logarithms, since one of 80 draws of shape 0.05 is below float32's smallest number. The names are the paper's.

    ``ids``: the counters of the draws, as in :func:`uniform`, (…, n). ``shape`` > 0: (…, n) float32, as the result.
    """
    # Each draw has 2 R + 1 counters of its own, R = _GAMMA_ROUNDS: R normal draws x, R uniform draws u, one boost.
    rounds = torch.arange(_GAMMA_ROUNDS, device=ids.device)
    counters = ids.unsqueeze(-1) * (2 * _GAMMA_ROUNDS + 1)  # (…, n, 1)
    normal_counters = (counters + rounds).reshape(*ids.shape[:-1], -1)  # (…, n · R)
    uniform_counters = (counters + _GAMMA_ROUNDS + rounds).reshape(*ids.shape[:-1], -1)
    x = normal(keys_, normal_counters).view(*ids.shape, -1)  # (…, n, R)
    u = uniform(keys_, uniform_counters).view(*ids.shape, -1)

    # Gamma(a = shape + 1) is d · v with d = a − 1/3 and v = (1 + x / √(9 d))³, of the first accepted round.
    d = shape.unsqueeze(-1) + 2.0 / 3.0
    root = 1.0 + x / torch.sqrt(9.0 * d)
    log_v = 3.0 * torch.log(root.clamp_min(1e-30))
    bound = 0.5 * x * x + d * (1.0 - log_v.exp() + log_v)
    accepted = (root > 0.0) & (torch.log(u) < bound)
    first_accepted = accepted.int().argmax(dim=-1, keepdim=True)
    log_v_accepted = log_v.gather(-1, first_accepted).squeeze(-1)
    log_v_accepted = torch.where(accepted.any(dim=-1), log_v_accepted, 0.0)

    # Gamma(shape) is Gamma(shape + 1) · U^(1 / shape).
    boost = uniform(keys_, counters.squeeze(-1) + 2 * _GAMMA_ROUNDS)
    return torch.log(d.squeeze(-1)) + log_v_accepted + torch.log(boost) / shape
