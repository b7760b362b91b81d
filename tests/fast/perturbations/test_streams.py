# SPDX-License-Identifier: Apache-2.0
"""The random streams: known values, distributions, independence, draws tied to tokens."""

import hashlib
import math

import pytest
import torch
from torch import Tensor

from perturbations import streams
from perturbations.seeds import trajectory_seed
from perturbations.streams import Stream
from tests.support.density_steps import generator

N = 200_000
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """The finaliser of SplitMix64 in unbounded integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def reference_key(seed: int, position: int, stream: int) -> int:
    mixed = mix64((seed + GOLDEN) & MASK)
    mixed = mix64((mixed + position * 0xD1342543DE82EF95) & MASK)
    return mix64((mixed + stream * 0xDA942042E4DD58B5) & MASK)


def keys_of_trajectory(seed: int, count: int, stream: Stream = Stream.WEIGHTS) -> Tensor:
    """The keys of the first ``count`` positions of a trajectory."""
    return streams.keys(torch.tensor(seed), torch.arange(count), stream)


def uniform_draws(seed: int = 1, stream: Stream = Stream.WEIGHTS) -> Tensor:
    """N draws, one at each position of a trajectory."""
    keys = keys_of_trajectory(seed, N, stream)
    return streams.uniform(keys, 1).squeeze(-1).double()


def correlation(x: Tensor, y: Tensor) -> float:
    return torch.corrcoef(torch.stack([x, y]))[0, 1].item()


def kolmogorov_smirnov(cumulative: Tensor) -> Tensor:
    """The largest deviation of sorted draws, mapped by their distribution function, from the uniform distribution."""
    count = len(cumulative)
    uniform = torch.arange(count, dtype=torch.float64) / count
    return (cumulative - uniform).abs().max()


def test_bits_are_splitmix64() -> None:
    """Its first three outputs from state 0, as published with the generator."""
    bits = streams._bits(torch.tensor(0), 3)
    unsigned = [signed & MASK for signed in bits.tolist()]
    assert unsigned == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


SEEDS = [
    0,
    -1,
    12345,
    2**63 - 1,
    -(2**63),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("position", [0, 2**31])
def test_keys_equal_integer_arithmetic(seed: int, position: int) -> None:
    for stream in Stream:
        key = streams.keys(torch.tensor(seed), torch.tensor(position), stream)
        assert key.dtype == torch.int64
        assert key.item() & MASK == reference_key(seed, position, int(stream))


def test_the_numbers_of_the_streams_are_pinned() -> None:
    """Records made by one version replay in another only while these stay."""
    assert [int(stream) for stream in Stream] == [1, 2, 3, 4, 5, 6, 7]


def test_draws_are_pinned() -> None:
    """Records made by one version replay in another only while these stay."""
    keys = streams.keys(torch.tensor(7), torch.tensor(11), Stream.NOISE)
    key = reference_key(7, 11, 3)
    assert keys.item() & MASK == key

    first_bits = mix64((key + GOLDEN) & MASK)
    second_bits = mix64((key + 2 * GOLDEN) & MASK)
    first_uniform = (first_bits >> 41) * 2.0**-23 + 2.0**-24
    second_uniform = (second_bits >> 41) * 2.0**-23 + 2.0**-24
    assert streams.uniform(keys, 2).tolist() == [first_uniform, second_uniform]

    # The two normal draws are one Box–Muller pair from the first 64 bits.
    radius = math.sqrt(-2 * math.log(((first_bits >> 40) + 0.5) / 2**24))
    angle = 2 * math.pi * (first_bits & 0xFFFFFF) / 2**24
    normals = [radius * math.cos(angle), radius * math.sin(angle)]
    assert streams.normal(keys, 2).tolist() == pytest.approx(normals, abs=1e-5)

    gumbel = -math.log(-math.log(first_uniform))
    assert streams.gumbel(keys, 1).item() == pytest.approx(gumbel, rel=1e-5)


def test_trajectory_seed_hashes_parts_with_their_boundaries() -> None:
    """The first 48 bits of BLAKE2b of the parts, each after its length in eight bytes."""
    hashed = b""
    for part in (b"1", b"ab", b"c"):
        hashed += len(part).to_bytes(8, "little") + part
    digest = hashlib.blake2b(hashed, digest_size=6).digest()
    assert trajectory_seed(1, "ab", b"c") == int.from_bytes(digest, "little")
    assert trajectory_seed("ab", "c") != trajectory_seed("a", "bc")
    assert trajectory_seed("a", "b") != trajectory_seed("b", "a")


def test_trajectory_seeds_are_48_bits_and_differ() -> None:
    seeds = [trajectory_seed(number) for number in range(1000)]
    assert len(set(seeds)) == 1000
    assert 0 <= min(seeds) < 2**40
    assert 2**47 < max(seeds) < 2**48


def test_uniform_is_never_0_or_1_even_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([0, -1])  # all bits 0, all bits 1
    monkeypatch.setattr(streams, "_bits", lambda keys, n: ends.unsqueeze(-1).expand(2, n))
    low, high = streams.uniform(ends, 1).flatten().tolist()
    assert low == 2.0**-24
    assert high == 1.0 - 2.0**-24
    assert torch.isfinite(streams.gumbel(ends, 1)).all()
    assert torch.isfinite(streams.normal(ends, 2)).all()


@pytest.mark.parametrize(
    ("seed", "stream", "shift"),
    [
        pytest.param(1, Stream.WEIGHTS, 1, id="the next position"),
        pytest.param(-1, Stream.WEIGHTS, 0, id="another seed"),
        pytest.param(2, Stream.WEIGHTS, -1, id="seed and position moved against each other"),
        pytest.param(1, Stream.GATE, 0, id="another stream"),
    ],
)
def test_neighboring_draws_are_independent(seed: int, stream: Stream, shift: int) -> None:
    draws = uniform_draws()
    neighbors = uniform_draws(seed, stream).roll(shift)
    assert not torch.equal(draws, neighbors)
    assert abs(correlation(draws, neighbors)) < 4 / math.sqrt(N)

    # Joint distribution over an 8 × 8 grid: chi-squared with 63 degrees of freedom.
    cells = (draws * 8).long() * 8 + (neighbors * 8).long()
    counts = cells.bincount(minlength=64).double()
    expected = N / 64
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_squared < 63 + 4 * math.sqrt(2 * 63)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        # The largest 40 bits are cut to a share of 1 − 2^-24.
        pytest.param(-1, -math.log(2.0**-24), id="all bits"),
        # Of the smallest, all 40 bits count.
        pytest.param(1 << 24, 1.5 * 2.0**-40, id="the lowest of 40 bits"),
        pytest.param(0, 0.5 * 2.0**-40, id="no bit"),
    ],
)
def test_exponential_at_the_ends_of_its_bits(bits: int, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_bits", lambda keys, n: torch.full((1, n), bits))
    draw = streams.exponential(torch.zeros(1), 1).item()
    assert draw == pytest.approx(expected, rel=1e-6)


def test_a_draw_is_not_below_itself() -> None:
    """It is below the next number that a draw can be."""
    keys = keys_of_trajectory(5, 50, Stream.GATE)
    draws = streams.uniform(keys, 1)[:, 0].tolist()
    for key, draw in zip(keys.numpy(), draws):
        assert not streams.below(key[None], draw).any()
        assert streams.below(key[None], draw + 2.0**-23).all()


# --- draws tied to tokens, Gamma draws -------------------------------------------------------------------


@pytest.mark.gpu
def test_uniform_normal_and_gumbel_on_cuda_equal_those_on_the_cpu() -> None:
    keys = streams.keys(torch.arange(2000), torch.arange(2000), Stream.NOISE)
    keys_on_gpu = keys.cuda()
    assert torch.equal(streams.uniform(keys, 16), streams.uniform(keys_on_gpu, 16).cpu())
    for draw in (streams.normal, streams.gumbel):
        on_cpu = draw(keys, 16)
        on_gpu = draw(keys_on_gpu, 16).cpu()
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-6, atol=2e-6)


@pytest.mark.gpu
def test_log_gamma_on_cuda_equals_that_on_the_cpu() -> None:
    """A comparison that falls on its threshold may accept another round: once in millions of draws."""
    keys = streams.keys(torch.arange(2000), torch.arange(2000), Stream.NOISE)
    ids = torch.arange(16).expand(2000, 16).contiguous()
    shape = torch.full((2000, 16), 0.3)
    on_cpu = streams.log_gamma(keys, ids, shape)
    on_gpu = streams.log_gamma(keys.cuda(), ids.cuda(), shape.cuda()).cpu()
    differs = (on_cpu - on_gpu).abs() > 1e-4 * (1 + on_cpu.abs())
    assert differs.double().mean() < 1e-4


@pytest.mark.parametrize("shape", [0.05, 0.3, 1.0, 2.5, 40.0])
def test_log_gamma_distribution(shape: float) -> None:
    """Kolmogorov-Smirnov against the incomplete gamma function, 100,000 draws over 20 tokens."""
    positions = 5000
    width = 20
    keys = keys_of_trajectory(8, positions)
    tokens = torch.randperm(5000, generator=generator())[:width]
    ids = tokens.expand(positions, width).contiguous()
    draws = streams.log_gamma(keys, ids, torch.full((positions, width), shape))
    assert draws.dtype == torch.float32
    assert torch.isfinite(draws).all()

    ordered = draws.flatten().double().sort().values
    cumulative = torch.special.gammainc(torch.full_like(ordered, shape), ordered.exp())
    assert kolmogorov_smirnov(cumulative) < 1.95 / math.sqrt(len(ordered))  # exceeded by 0.1% of fair samples

    correlations = torch.corrcoef(draws.double().T)
    correlations.fill_diagonal_(0.0)
    assert correlations.abs().max() < 5.0 / math.sqrt(positions)


def test_log_gamma_is_tied_to_the_token() -> None:
    """Neither the order of the tokens nor the other rows and columns of a batch matter."""
    keys = keys_of_trajectory(8, 50)
    ids = torch.tensor([[3, 17, 49151]]).expand(50, 3).contiguous()
    shape = torch.tensor([[0.2, 1.0, 3.0]]).expand(50, 3).contiguous()
    draws = streams.log_gamma(keys, ids, shape)

    flipped = streams.log_gamma(keys, ids.flip(-1), shape.flip(-1))
    assert torch.equal(flipped, draws.flip(-1))

    row = slice(4, 5)
    column = slice(1, 2)
    alone = streams.log_gamma(keys[row], ids[row, column], shape[row, column])
    assert torch.equal(alone, draws[row, column])


def test_normal_draws_at_counters_are_tied_to_the_counters() -> None:
    keys = keys_of_trajectory(8, N)
    draws = streams.normal(keys, torch.tensor([[6, 7]]).expand(N, 2))
    alone = streams.normal(keys, torch.tensor([[7]]).expand(N, 1))
    assert torch.equal(alone[:, 0], draws[:, 1])


def test_normal_draws_at_counters_are_normal_and_independent() -> None:
    n = 100_000
    keys = keys_of_trajectory(8, n)
    counters = torch.tensor([[6, 7]]).expand(n, 2)
    draws = streams.normal(keys, counters).double()
    cumulative = torch.special.ndtr(draws[:, 0].sort().values)
    assert kolmogorov_smirnov(cumulative) < 1.95 / math.sqrt(n)
    assert abs(correlation(draws[:, 0], draws[:, 1])) < 4 / math.sqrt(n)
