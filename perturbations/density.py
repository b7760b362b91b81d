# SPDX-License-Identifier: Apache-2.0
"""Densities of continuous inputs: what stands in the policy loss where an input, not a token, was drawn.

Pure functions of tensors, in whatever float dtype they are given; N positions, K candidates, D elements.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

LOG_FLOOR = 1e-6
"""Added to probabilities inside the logarithm, as SofT-GRPO's release does."""

GUMBEL_RANGE = (-1.5, 3.0)
GUMBEL_MASK = -3.0
_SMALLEST = torch.finfo(torch.float32).tiny
_REACH = (-40.0, 60.0)  # within which exponentials of noise are finite, and logarithms of them too

DIRICHLET_RANGE = (-5.0, 3.0)
DIRICHLET_MASK = 0.05
NORMAL_SIGMA, NORMAL_REACH = 0.05, 0.15
NORMAL_MASK = 0.05


def gaussian(
    x: Float[Tensor, "positions hidden"], mean: Float[Tensor, "positions hidden"], sigma: Float[Tensor, " positions"]
) -> Float[Tensor, " positions"]:
    """log N(x; mean, σ² I), normalised, (N,). Where σ is 0 nothing was drawn, and the result is 0."""
    has_noise = sigma > 0.0
    scale = torch.where(has_noise, sigma, 1.0)
    constant = x.shape[-1] * (torch.log(scale) + 0.5 * math.log(2.0 * math.pi))
    log_density = -(x - mean).square().sum(dim=-1) / (2.0 * scale.square()) - constant
    return torch.where(has_noise, log_density, 0.0)


def gumbel(
    scores: Float[Tensor, "positions candidates"],
    probabilities: Float[Tensor, "positions candidates"],
    kept: Bool[Tensor, "positions candidates"],
    drawn: Float[Tensor, "positions candidates"] | None = None,
) -> Float[Tensor, " positions"]:
    """SofT-GRPO's reparameterised density: g_i = clamp(y_i − log p_i, −1.5, 3), mean of −g_i − exp(−g_i), (N,).

    The mean is over candidates with log p_i > −3, 0 where there are none. Clamped noise has no gradient. What the
    rollout clamped stays at its bound, whatever y_i − log p_i is with the trainer's logits.

    Args:
        scores: y, (N, K).
        probabilities: p under the policy, renormalised over the recorded candidates, (N, K).
        kept: which candidates were mixed, (N, K) bool.
        drawn: the noise as it was drawn, before the clamp, (N, K); None where none was clamped.
    """
    log_p = torch.log(probabilities + LOG_FLOOR)
    noise, (low, high) = scores - log_p, GUMBEL_RANGE
    noise = torch.where((noise > low) & (noise < high), noise, noise.detach().clamp(low, high))
    if drawn is not None:
        noise = torch.where((drawn > low) & (drawn < high), noise, drawn.clamp(low, high))
    return _mean(-noise - torch.exp(-noise), kept & (log_p > GUMBEL_MASK))


def dirichlet(
    log_draws: Float[Tensor, "positions candidates"],
    probabilities: Float[Tensor, "positions candidates"],
    alpha: float,
    kept: Bool[Tensor, "positions candidates"],
) -> Float[Tensor, " positions"]:
    """Gamma(α p_i, 1) log-densities of the draws γ_i (N, K), each clamped to [−5, 3], mean over p_i > 0.05: (N,).

    ``log_draws``: log γ; ``probabilities`` and ``kept`` as in :func:`gumbel`.
    """
    used = kept & (probabilities > DIRICHLET_MASK)
    shape = torch.where(used, alpha * probabilities, 1.0)
    terms = (shape - 1.0) * log_draws - log_draws.exp() - torch.lgamma(shape)
    return _mean(terms.clamp(*DIRICHLET_RANGE), used)


def normal(
    draws: Float[Tensor, "positions candidates"],
    probabilities: Float[Tensor, "positions candidates"],
    kept: Bool[Tensor, "positions candidates"],
) -> Float[Tensor, " positions"]:
    """log N(y_i; p_i, 0.05²) of the draws y (N, K), clamped to p_i ± 0.15, mean over p_i > 0.05 or 0: (N,).

    ``probabilities`` and ``kept`` as in :func:`gumbel`.
    """
    distance = (draws - probabilities).clamp(-NORMAL_REACH, NORMAL_REACH) / NORMAL_SIGMA
    terms = -0.5 * distance.square() - math.log(NORMAL_SIGMA * math.sqrt(2.0 * math.pi))
    return _mean(terms, kept & (probabilities > NORMAL_MASK))


def censored_gumbel(
    noise: Float[Tensor, "positions candidates"],
    below: Bool[Tensor, "positions candidates"],
    above: Bool[Tensor, "positions candidates"],
    kept: Bool[Tensor, "positions candidates"],
) -> Float[Tensor, " positions"]:
    """Log-density of Gumbel(0, 1) noise that was drawn, some of it known by a bound alone (a Tobit model): a sum, (N,).

    Σ_i −n_i − exp(−n_i), log P(g < n_i) = −exp(−n_i) or log P(g > n_i). The rollout drew the bounds, which are no
    functions of the policy, so the mean of the gradient is 0.

    Args:
        noise: n, (N, K); the bound itself where nothing more is known.
        below: where the noise is known to lie below n, (N, K) bool.
        above: where it is known to lie above, (N, K) bool.
        kept: which of them were drawn, (N, K) bool.
    """
    noise = torch.where(kept, noise, 0.0).clamp(*_REACH)
    share = torch.exp(-noise)
    terms = torch.where(below, -share, -noise - share)
    terms = torch.where(above, torch.log(-torch.expm1(-share)), terms)
    return torch.where(kept, terms, 0.0).sum(dim=-1)


def concrete(
    weights: Float[Tensor, "positions candidates"],
    log_p: Float[Tensor, "positions candidates"],
    tau: float,
    kept: Bool[Tensor, "positions candidates"],
) -> Float[Tensor, " positions"]:
    """Log-density of Gumbel-softmax weights w = softmax((log p + g) / τ) (Maddison et al., arXiv 1611.00712, eq. 10).

    Σ_i log p_i − n log Σ_i p_i w_i^−τ, (N,), up to what does not depend on p. A weight below float32's smallest number
    stays in the second sum at that bound, and n counts the others.

    Args:
        weights: w, (N, K).
        log_p: log p up to a constant in each row, (N, K).
        tau: τ > 0.
        kept: which candidates were mixed, (N, K) bool, at least one in each row.
    """
    seen = kept & (weights >= _SMALLEST)
    powers = log_p - tau * weights.clamp_min(_SMALLEST).log()
    total = torch.logsumexp(torch.where(kept, powers, -torch.inf), dim=-1)
    return torch.where(seen, log_p, 0.0).sum(dim=-1) - seen.sum(dim=-1) * total


def dirichlet_weights(
    weights: Float[Tensor, "positions candidates"],
    probabilities: Float[Tensor, "positions candidates"],
    alpha: float,
    kept: Bool[Tensor, "positions candidates"],
) -> Float[Tensor, " positions"]:
    """Log-density of weights (N, K) drawn from Dirichlet(α p), up to what does not depend on p: a sum, unclamped, (N,).

    Of a weight below float32's smallest number s only P(γ < s Σγ) of its Gamma draw is known, (s Σγ)^a / Γ(a + 1) with
    a = α p. ``probabilities`` and ``kept`` as in :func:`gumbel`.
    """
    shape = torch.where(kept, (alpha * probabilities).clamp_min(1e-20), 1.0)
    log_weights = weights.clamp_min(_SMALLEST).log()
    seen = (shape - 1.0) * log_weights - torch.lgamma(shape)
    lost = shape * log_weights - torch.lgamma(shape + 1.0)
    terms = torch.where(weights < _SMALLEST, lost, seen)
    return torch.where(kept, terms, 0.0).sum(dim=-1)


def _mean(terms: Tensor, used: Tensor) -> Tensor:
    return torch.where(used, terms, 0.0).sum(dim=-1) / used.sum(dim=-1).clamp_min(1)


def renormalised(
    logits: Float[Tensor, "positions candidates"], kept: Bool[Tensor, "positions candidates"]
) -> Float[Tensor, "positions candidates"]:
    """Probabilities among the kept candidates, at least one in each row, from their z̃: (N, K); 0 for the others."""
    return torch.softmax(torch.where(kept, logits, -torch.inf), dim=-1)


def distinct(ids: Int64[Tensor, "positions candidates"]) -> Bool[Tensor, "positions candidates"]:
    """Which candidates are the first of their id in the row, (N, K) bool; a repeated id fills an unused place."""
    same = ids.unsqueeze(-1) == ids.unsqueeze(-2)
    return ~torch.tril(same, diagonal=-1).any(dim=-1)
