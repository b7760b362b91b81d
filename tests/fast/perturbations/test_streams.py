# SPDX-License-Identifier: Apache-2.0
"""The random streams: known values, distributions, independence, draws tied to tokens."""

import hashlib
import math

import pytest
import torch

from perturbations import streams
from perturbations.seeds import trajectory_seed
from perturbations.streams import Stream
from tests.support.density_steps import generator

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


def test_bits_are_splitmix64() -> None:
    """Its first three outputs from state 0, as published with the generator."""
    bits = streams._bits(torch.tensor(0), 3)
    assert [b & MASK for b in bits.tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("seed", [0, -1, 12345, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("position", [0, 2**31])
def test_keys_equal_integer_arithmetic(seed: int, position: int) -> None:
    for stream in Stream:
        key = streams.keys(torch.tensor(seed), torch.tensor(position), stream)
        assert key.dtype == torch.int64
        assert key.item() & MASK == reference_key(seed, position, int(stream))


def test_pinned_values() -> None:
    """Records made by one version replay in another only while these stay."""
    assert [int(s) for s in Stream] == [1, 2, 3, 4, 5, 6, 7]
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


def test_uniform_is_never_0_or_1_even_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([0, -1])  # all bits 0, all bits 1
    monkeypatch.setattr(streams, "_bits", lambda keys, n: ends.unsqueeze(-1).expand(2, n))
    low, high = streams.uniform(ends, 1).flatten().tolist()
    assert (low, high) == (2.0**-24, 1.0 - 2.0**-24)
    assert torch.isfinite(streams.gumbel(ends, 1)).all() and torch.isfinite(streams.normal(ends, 2)).all()


@pytest.mark.parametrize(
    ("other", "shift"),
    [
        (dict(seed=1), 1),  # the next position
        (dict(seed=-1), 0),
        (dict(seed=2), -1),  # seed and position moved against each other
        (dict(seed=1, stream=Stream.GATE), 0),
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


def test_exponential_at_the_ends_of_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest 40 bits are cut to a share of 1 − 2^-24; of the smallest, all 40 count."""
    for bits, expected in ((-1, -math.log(2.0**-24)), (1 << 24, 1.5 * 2.0**-40), (0, 0.5 * 2.0**-40)):
        monkeypatch.setattr(streams, "_bits", lambda keys, n, bits=bits: torch.full((1, n), bits))
        assert streams.exponential(torch.zeros(1), 1).item() == pytest.approx(expected, rel=1e-6)


def test_a_draw_is_not_below_itself() -> None:
    keys = streams.keys(torch.tensor(5), torch.arange(50), Stream.GATE)
    for key, draw in zip(keys.numpy(), streams.uniform(keys, 1)[:, 0].tolist()):
        assert not streams.below(key[None], draw).any() and streams.below(key[None], draw + 2.0**-23).all()


# --- draws tied to tokens, Gamma draws -------------------------------------------------------------------


@pytest.mark.gpu
def test_streams_on_cuda_equal_those_on_the_cpu() -> None:
    keys = streams.keys(torch.arange(2000), torch.arange(2000), streams.Stream.NOISE)
    ids = torch.arange(16).expand(2000, 16).contiguous()
    shape = torch.full((2000, 16), 0.3)
    there = keys.cuda()
    assert torch.equal(streams.uniform(keys, 16), streams.uniform(there, 16).cpu())
    for name in ("normal", "gumbel"):
        here, other = getattr(streams, name)(keys, 16), getattr(streams, name)(there, 16).cpu()
        torch.testing.assert_close(here, other, rtol=1e-6, atol=2e-6)
    here, other = streams.log_gamma(keys, ids, shape), streams.log_gamma(there, ids.cuda(), shape.cuda()).cpu()
    # A comparison that falls on its threshold may accept another round: once in millions of draws.
    assert ((here - other).abs() > 1e-4 * (1 + here.abs())).double().mean() < 1e-4


@pytest.mark.parametrize("shape", [0.05, 0.3, 1.0, 2.5, 40.0])
def test_log_gamma_distribution(shape: float) -> None:
    """Kolmogorov-Smirnov against the incomplete gamma function, 100,000 draws over 20 tokens."""
    n, width = 5000, 20
    keys = streams.keys(torch.tensor(8), torch.arange(n), streams.Stream.WEIGHTS)
    ids = torch.randperm(5000, generator=generator())[:width].expand(n, width).contiguous()
    draws = streams.log_gamma(keys, ids, torch.full((n, width), shape))
    assert draws.dtype == torch.float32 and torch.isfinite(draws).all()
    ordered = draws.flatten().double().sort().values
    want = torch.special.gammainc(torch.full_like(ordered, shape), ordered.exp())
    steps = torch.arange(len(ordered), dtype=torch.float64) / len(ordered)
    assert (want - steps).abs().max() < 1.95 / math.sqrt(len(ordered))  # exceeded by 0.1% of fair samples
    correlation = torch.corrcoef(draws.double().T)
    correlation.fill_diagonal_(0.0)
    assert correlation.abs().max() < 5.0 / math.sqrt(n)


def test_log_gamma_is_tied_to_the_token() -> None:
    keys = streams.keys(torch.tensor(8), torch.arange(50), streams.Stream.WEIGHTS)
    ids = torch.tensor([[3, 17, 49151]]).expand(50, 3).contiguous()
    shape = torch.tensor([[0.2, 1.0, 3.0]]).expand(50, 3).contiguous()
    draws = streams.log_gamma(keys, ids, shape)
    assert torch.equal(streams.log_gamma(keys, ids.flip(-1), shape.flip(-1)), draws.flip(-1))
    assert torch.equal(streams.log_gamma(keys[4:5], ids[:1, 1:2], shape[:1, 1:2]), draws[4:5, 1:2])


def test_normal_at_given_counters() -> None:
    """Tied to tokens, normal as ever, and independent of the neighboring token's."""
    n = 100_000
    keys = streams.keys(torch.tensor(8), torch.arange(n), streams.Stream.WEIGHTS)
    x = streams.normal(keys, torch.tensor([[6, 7]]).expand(n, 2)).double()
    assert torch.equal(streams.normal(keys, torch.tensor([[7]]).expand(n, 1)).double()[:, 0], x[:, 1])
    want = torch.special.ndtr(x[:, 0].sort().values)
    assert (want - torch.arange(n) / n).abs().max() < 1.95 / math.sqrt(n)
    assert abs(torch.corrcoef(x.T)[0, 1].item()) < 4 / math.sqrt(n)
