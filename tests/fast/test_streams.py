# SPDX-License-Identifier: Apache-2.0
"""The random streams: known values, distributions, independence."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from perturbations import streams
from perturbations.seeds import trajectory_seed
from perturbations.streams import Stream

N = 200_000
MASK = (1 << 64) - 1


def mix64(x: int) -> int:
    """The finaliser of SplitMix64 in unbounded integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def reference_key(seed: int, position: int, stream: int) -> int:
    mixed = mix64((seed + 0x9E3779B97F4A7C15) & MASK)
    mixed = mix64((mixed + position * 0xD1342543DE82EF95) & MASK)
    return mix64((mixed + stream * 0xDA942042E4DD58B5) & MASK)


def draws(kind: str, seed: int = 1, stream: Stream = Stream.WEIGHTS) -> torch.Tensor:
    """N draws, one at each position of a trajectory."""
    keys = streams.keys(torch.tensor(seed), torch.arange(N), stream)
    return getattr(streams, kind)(keys, 1).squeeze(-1).double()


def ks_distance(sample: torch.Tensor, cdf) -> float:
    """Kolmogorov-Smirnov: the largest gap between the sample's distribution and the claimed one."""
    want = cdf(sample.sort().values)
    n = len(sample)
    steps = torch.arange(n, dtype=torch.float64)
    return torch.maximum((steps + 1) / n - want, want - steps / n).max().item()


def test_bits_are_splitmix64() -> None:
    """Its first three outputs from state 0, as published with the generator."""
    bits = streams._bits(torch.tensor(0), 3)
    assert [b & MASK for b in bits.tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("seed", [0, 1, -1, 12345, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("position", [0, 1, 2**31])
def test_keys_equal_integer_arithmetic(seed: int, position: int) -> None:
    for stream in Stream:
        key = streams.keys(torch.tensor(seed), torch.tensor(position), stream)
        assert key.dtype == torch.int64
        assert key.item() & MASK == reference_key(seed, position, int(stream))


def test_pinned_values() -> None:
    """Records made by one version replay in another only while these stay."""
    assert [int(s) for s in Stream] == [1, 2, 3, 4, 5, 6]
    key = reference_key(7, 11, 3)
    assert streams.keys(torch.tensor(7), torch.tensor(11), Stream.NOISE).item() & MASK == key
    first, second = mix64((key + 0x9E3779B97F4A7C15) & MASK), mix64((key + 2 * 0x9E3779B97F4A7C15) & MASK)
    keys = streams.keys(torch.tensor(7), torch.tensor(11), Stream.NOISE)
    want = [(first >> 41) * 2.0**-23 + 2.0**-24, (second >> 41) * 2.0**-23 + 2.0**-24]
    assert streams.uniform(keys, 2).tolist() == want
    radius = math.sqrt(-2 * math.log(((first >> 40) + 0.5) / 2**24))
    angle = 2 * math.pi * (first & 0xFFFFFF) / 2**24
    normals = [radius * math.cos(angle), radius * math.sin(angle)]
    assert streams.normal(keys, 2).tolist() == pytest.approx(normals, abs=1e-5)
    assert streams.gumbel(keys, 1).item() == pytest.approx(-math.log(-math.log(want[0])), rel=1e-5)


def test_trajectory_seed_hashes_parts_with_their_boundaries() -> None:
    def want(*parts: bytes) -> int:
        data = b"".join(len(p).to_bytes(8, "little") + p for p in parts)
        return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "little")

    assert trajectory_seed(1, "ab", b"c") == want(b"1", b"ab", b"c")
    assert trajectory_seed("ab", "c") != trajectory_seed("a", "bc")
    assert trajectory_seed("a", "b") != trajectory_seed("b", "a")
    seeds = [trajectory_seed(i) for i in range(1000)]
    assert len(set(seeds)) == 1000
    assert 0 <= min(seeds) < 2**40 and 2**47 < max(seeds) < 2**48


def test_uniform_distribution() -> None:
    u = draws("uniform")
    assert u.min() > 0.0 and u.max() < 1.0
    assert ks_distance(u, lambda x: x) < 1.63 / math.sqrt(N)  # exceeded by 1% of fair samples
    assert (u < 0.1).double().mean().item() == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / N))


def test_uniform_is_never_0_or_1_even_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([0, -1])  # all bits 0, all bits 1
    monkeypatch.setattr(streams, "_bits", lambda keys, n: ends.unsqueeze(-1).expand(2, n))
    low, high = streams.uniform(ends, 1).flatten().tolist()
    assert (low, high) == (2.0**-24, 1.0 - 2.0**-24)
    assert torch.isfinite(streams.gumbel(ends, 1)).all() and torch.isfinite(streams.normal(ends, 2)).all()


def test_normals_of_one_key_are_independent_and_normal() -> None:
    """Both halves of Box-Muller, an odd count too: 401 draws at each of 500 positions."""
    keys = streams.keys(torch.tensor(2), torch.arange(500), Stream.NOISE)
    x = streams.normal(keys, 401)
    assert x.shape == (500, 401) and x.dtype == torch.float32
    assert ks_distance(x.double().flatten(), torch.special.ndtr) < 1.63 / math.sqrt(x.numel())
    correlation = torch.corrcoef(x.double().T)
    correlation.fill_diagonal_(0.0)
    assert correlation.abs().max() < 6 / math.sqrt(500)


@pytest.mark.parametrize(
    ("other", "shift"),
    [
        (dict(seed=1), 1),  # the next position
        (dict(seed=1), 2),
        (dict(seed=2), 0),  # the next seed
        (dict(seed=-1), 0),
        (dict(seed=2), -1),  # seed and position moved against each other
        (dict(seed=1, stream=Stream.GATE), 0),
        (dict(seed=1, stream=Stream.TOKEN), 0),
        (dict(seed=1, stream=Stream.NOISE), 0),
        (dict(seed=1, stream=Stream.NOISE), 1),
    ],
)
def test_neighboring_draws_are_independent(other: dict, shift: int) -> None:
    one, two = draws("uniform"), draws("uniform", **other).roll(shift)
    assert not torch.equal(one, two)
    assert abs(torch.corrcoef(torch.stack([one, two]))[0, 1].item()) < 4 / math.sqrt(N)
    # Joint distribution over an 8 × 8 grid: chi-squared with 63 degrees of freedom.
    cells = ((one * 8).long() * 8 + (two * 8).long()).bincount(minlength=64).double()
    chi = ((cells - N / 64) ** 2 / (N / 64)).sum().item()
    assert chi < 63 + 4 * math.sqrt(2 * 63)


def test_draws_of_one_key_are_independent() -> None:
    keys = streams.keys(torch.tensor(3), torch.arange(20_000), Stream.WEIGHTS)
    u = streams.uniform(keys, 8).double()
    correlation = torch.corrcoef(u.T)
    correlation.fill_diagonal_(0.0)
    assert correlation.abs().max() < 4.5 / math.sqrt(20_000)


def test_seeds_of_successive_integers_give_fair_first_draws() -> None:
    keys = streams.keys(torch.arange(-N // 2, N // 2), torch.tensor(17), Stream.GATE)
    assert keys.unique().numel() == N
    assert ks_distance(streams.uniform(keys, 1).flatten().double(), lambda x: x) < 1.63 / math.sqrt(N)


def test_shapes_broadcast_and_rows_are_alone() -> None:
    seeds, positions = torch.tensor([[1], [2]]), torch.tensor([10, 11, 12])
    keys = streams.keys(seeds, positions, Stream.NOISE)
    assert keys.shape == (2, 3)
    assert keys[1, 2] == streams.keys(torch.tensor(2), torch.tensor(12), Stream.NOISE)
    assert streams.normal(keys, 5).shape == (2, 3, 5)
    assert torch.equal(streams.normal(keys, 5)[1, 2], streams.normal(keys[1, 2], 5))
    assert streams.uniform(keys, 2).dtype == torch.float32


def test_exponential_at_the_ends_of_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest 40 bits are cut to a share of 1 − 2^-24; of the smallest, all 40 count."""
    for bits, expected in ((-1, -math.log(2.0**-24)), (1 << 24, 1.5 * 2.0**-40), (0, 0.5 * 2.0**-40)):
        monkeypatch.setattr(streams, "_bits", lambda keys, n, bits=bits: torch.full((1, n), bits))
        assert streams.exponential(torch.zeros(1), 1).item() == pytest.approx(expected, rel=1e-6)


def test_a_draw_is_not_below_itself() -> None:
    keys = streams.keys(torch.tensor(5), torch.arange(50), Stream.GATE)
    for key, draw in zip(keys.numpy(), streams.uniform(keys, 1)[:, 0].tolist()):
        assert not streams.below(key[None], draw).any() and streams.below(key[None], draw + 2.0**-23).all()
