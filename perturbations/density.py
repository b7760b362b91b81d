# SPDX-License-Identifier: Apache-2.0
"""Densities of continuous inputs: what stands in the policy loss where an input, not a token, was drawn.

Pure functions of tensors, in whatever float dtype they are given; N positions, K candidates, D elements.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG_FLOOR = 1e-6
"""Added to probabilities inside the logarithm, as SofT-GRPO's release does."""

GUMBEL_RANGE = (-1.5, 3.0)
GUMBEL_MASK = -3.0
ROUNDING = 1e-4
"""How far float32 may move a score that is taken back from a weight."""

DIRICHLET_RANGE = (-5.0, 3.0)
DIRICHLET_MASK = 0.05
NORMAL_SIGMA, NORMAL_REACH = 0.05, 0.15
NORMAL_MASK = 0.05


def gaussian(x: Tensor, mean: Tensor, sigma: Tensor) -> Tensor:
    """log N(x; mean, σ² I), normalised.

    Args:
        x: (N, D).
        mean: (N, D).
        sigma: σ ≥ 0, (N,). At 0 nothing was drawn, and the result is 0.

    Returns:
        (N,).
    """
    drawn = sigma > 0.0
    scale = torch.where(drawn, sigma, 1.0)
    constant = x.shape[-1] * (torch.log(scale) + 0.5 * math.log(2.0 * math.pi))
    log_density = -(x - mean).square().sum(dim=-1) / (2.0 * scale.square()) - constant
    return torch.where(drawn, log_density, 0.0)


def gumbel(scores: Tensor, probabilities: Tensor, kept: Tensor) -> Tensor:
    """SofT-GRPO's reparameterised density: g_i = clamp(y_i − log p_i, −1.5, 3), mean of −g_i − exp(−g_i).

    Noise at a bound counts as clamped: it has no gradient.

    Args:
        scores: y, (N, K).
        probabilities: p under the policy at hand, renormalised over the recorded candidates, (N, K).
        kept: which candidates were mixed, (N, K) bool.

    Returns:
        (N,): the mean over candidates with log p_i > −3, 0 where there are none.
    """
    log_p = torch.log(probabilities + LOG_FLOOR)
    noise, (low, high) = scores - log_p, GUMBEL_RANGE
    # At the policy that drew it, clamped noise stands at a bound, and rounding would decide whether it has a gradient.
    free = (noise > low + ROUNDING) & (noise < high - ROUNDING)
    noise = torch.where(free, noise, noise.detach().clamp(low, high))
    return _mean(-noise - torch.exp(-noise), kept & (log_p > GUMBEL_MASK))


def dirichlet(log_draws: Tensor, probabilities: Tensor, alpha: float, kept: Tensor) -> Tensor:
    """Gamma(α p_i, 1) log-densities of the draws γ_i, each clamped to [−5, 3], mean over p_i > 0.05.

    Args:
        log_draws: log γ, (N, K).
        probabilities: as in :func:`gumbel`.
        alpha: α > 0.
        kept: as in :func:`gumbel`.

    Returns:
        (N,).
    """
    used = kept & (probabilities > DIRICHLET_MASK)
    shape = torch.where(used, alpha * probabilities, 1.0)
    terms = (shape - 1.0) * log_draws - log_draws.exp() - torch.lgamma(shape)
    return _mean(terms.clamp(*DIRICHLET_RANGE), used)


def normal(draws: Tensor, probabilities: Tensor, kept: Tensor) -> Tensor:
    """log N(y_i; p_i, 0.05²) with y_i clamped to p_i ± 0.15, mean over p_i > 0.05.

    Args:
        draws: y, (N, K).
        probabilities: as in :func:`gumbel`.
        kept: as in :func:`gumbel`.

    Returns:
        (N,): 0 where no candidate is that likely.
    """
    distance = (draws - probabilities).clamp(-NORMAL_REACH, NORMAL_REACH) / NORMAL_SIGMA
    terms = -0.5 * distance.square() - math.log(NORMAL_SIGMA * math.sqrt(2.0 * math.pi))
    return _mean(terms, kept & (probabilities > NORMAL_MASK))


def _mean(terms: Tensor, used: Tensor) -> Tensor:
    return torch.where(used, terms, 0.0).sum(dim=-1) / used.sum(dim=-1).clamp_min(1)


def renormalised(logits: Tensor, kept: Tensor) -> Tensor:
    """Probabilities of the kept candidates among themselves, (N, K); 0 for the others.

    Args:
        logits: z̃ of the candidates, (N, K).
        kept: (N, K) bool, at least one in each row.
    """
    return torch.softmax(torch.where(kept, logits, -torch.inf), dim=-1)


def distinct(ids: Tensor) -> Tensor:
    """Which candidates stand for the first time in their row: a repeated one fills an unused place, (N, K) bool."""
    same = ids.unsqueeze(-1) == ids.unsqueeze(-2)
    return ~torch.tril(same, diagonal=-1).any(dim=-1)
