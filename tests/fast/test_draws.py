# SPDX-License-Identifier: Apache-2.0
"""Draws tied to tokens, Gamma draws, and noise drawn again from a record: the same wherever they are computed."""

from __future__ import annotations

import math

import pytest
import torch

from perturbations import streams
from tests.fast.density_steps import generator


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
