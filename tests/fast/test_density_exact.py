# SPDX-License-Identifier: Apache-2.0
"""Exact densities of clamped noise, in plain numbers from the draws of their seeds."""

from __future__ import annotations

import math

import torch

from perturbations import density, streams
from perturbations.registry import create
from perturbations.testing.proposal import replayed
from tests.fast.density_steps import a_step, likely


def term(g: float) -> float:
    """log f, log F or log(1 − F) of Gumbel(0, 1), by where g lies."""
    if g <= -1.5:
        return -math.exp(1.5)
    return math.log(-math.expm1(-math.exp(-3.0))) if g >= 3.0 else -g - math.exp(-g)


def test_gumbel() -> None:
    """Of 500 positions with 5 candidates some 28 have noise below the clamp, and 120 above."""
    perturbation = create("gumbel", density="exact", top_p=1.0)
    step = a_step(likely(500))
    proposal = perturbation.propose(step)
    keys = streams.keys(step.seeds, step.positions, streams.Stream.WEIGHTS)
    got = perturbation.log_density(replayed(step, proposal, step.logits))
    want = [sum(map(term, row)) for row in streams.gumbel(keys, proposal.edit.ids).tolist()]
    torch.testing.assert_close(got, torch.tensor(want), rtol=2e-3, atol=2e-3)


def test_latent() -> None:
    """The 3 largest of the nucleus, and P(smaller) of each other one, but of none that its bound keeps smaller."""
    perturbation = create("latent", density="exact", k=3)
    step = a_step(likely(300))
    got = perturbation.log_density(replayed(step, perturbation.propose(step), step.logits))
    keys = streams.keys(step.seeds, step.positions, streams.Stream.WEIGHTS)
    want, kept_smaller = [], 0
    for row, z in enumerate(step.logits.double()):
        log_p = torch.log_softmax(z, dim=-1)
        ids = log_p.argsort(descending=True)
        before = log_p[ids].exp().cumsum(0) - log_p[ids].exp()
        ids = ids[(before < 0.95) | (torch.arange(len(ids)) < 3)]
        noise = streams.gumbel(keys[row : row + 1], ids.unsqueeze(0))[0].double()
        y = log_p[ids] + noise.clamp(-1.5, 3.0) + 1.5
        order = y.argsort(descending=True)
        last, total = y[order[2]], sum(term(noise[i].item()) for i in order[:3])
        for i in order[3:]:
            beyond = (last - log_p[ids[i]] - 1.5).item()
            kept_smaller += beyond >= 3.0
            total += -math.exp(-beyond) if beyond < 3.0 else 0.0
        want.append(total)
    assert kept_smaller > 10
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), rtol=2e-3, atol=2e-3)


def test_noise_far_beyond_every_draw_has_a_density_and_a_gradient() -> None:
    noise = torch.tensor([[-200.0, 300.0]], requires_grad=True)
    above = torch.tensor([[False, True]])
    value = density.censored_gumbel(noise, torch.zeros_like(above), above, torch.ones_like(above))
    value.sum().backward()
    assert value.isfinite().all() and noise.grad.isfinite().all()
