# SPDX-License-Identifier: Apache-2.0
"""Densities of continuous inputs, for the policy loss: pure functions in the float dtype of their arguments.

``probabilities`` are the policy's, renormalised over the recorded candidates; ``kept``: which candidates were mixed.
"""

import math

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from perturbations.errors import require

LOG_FLOOR = 1e-6  # added to probabilities inside the logarithm, as in SofT-GRPO's release
SMALLEST = torch.finfo(torch.float32).tiny  # a smaller weight is lost in float32

# The constants of SofT-GRPO's paper and release. A MASK is a bound: candidates below it are left out of the mean.
GUMBEL_RANGE = (-1.5, 3.0)  # noise is clamped to it
GUMBEL_MASK = -3.0  # of log p
DIRICHLET_RANGE = (-5.0, 3.0)  # log-densities are clamped to it
DIRICHLET_MASK = 0.05  # of p
NORMAL_SIGMA = 0.05
NORMAL_REACH = 0.15  # draws are clamped to p ± this
NORMAL_MASK = 0.05  # of p

_FINITE_NOISE = (-40.0, 60.0)  # within it exp(−n) and log(1 − exp(−exp(−n))) are finite in float32

PerPosition = Float[Tensor, " positions"]
PerCandidate = Float[Tensor, "positions candidates"]
Vectors = Float[Tensor, "positions hidden"]
Which = Bool[Tensor, "positions candidates"]


def gaussian(x: Vectors, mean: Vectors, sigma: PerPosition) -> PerPosition:
    """log N(x; mean, σ² I), normalised; 0 where σ is 0, since nothing was drawn there."""
    has_noise = sigma > 0.0
    scale = torch.where(has_noise, sigma, 1.0)
    constant = x.shape[-1] * (torch.log(scale) + 0.5 * math.log(2.0 * math.pi))
    log_density = -(x - mean).square().sum(dim=-1) / (2.0 * scale.square()) - constant
    return torch.where(has_noise, log_density, 0.0)


def gumbel(
    scores: PerCandidate, probabilities: PerCandidate, kept: Which, unclamped: PerCandidate | None = None
) -> PerPosition:
    """SofT-GRPO's density of scores y: g_i = clamp(y_i − log p_i, −1.5, 3), mean of −g_i − exp(−g_i) over log p_i > −3.

    Clamped noise has no gradient. ``unclamped`` is the noise before the clamp: where it lies beyond a bound, the bound
    counts.
    """
    low, high = GUMBEL_RANGE
    log_p = torch.log(probabilities + LOG_FLOOR)
    noise = scores - log_p
    noise = torch.where((noise > low) & (noise < high), noise, noise.detach().clamp(low, high))
    if unclamped is not None:
        noise = torch.where((unclamped > low) & (unclamped < high), noise, unclamped.clamp(low, high))
    return mean_of_used(-noise - torch.exp(-noise), kept & (log_p > GUMBEL_MASK))


def dirichlet(log_draws: PerCandidate, probabilities: PerCandidate, alpha: float, kept: Which) -> PerPosition:
    """Gamma(α p_i, 1) log-densities of draws, from their logarithms, clamped to [−5, 3]; mean over p_i > 0.05."""
    used = kept & (probabilities > DIRICHLET_MASK)
    shape = torch.where(used, alpha * probabilities, 1.0)
    terms = (shape - 1.0) * log_draws - log_draws.exp() - torch.lgamma(shape)
    return mean_of_used(terms.clamp(*DIRICHLET_RANGE), used)


def normal(draws: PerCandidate, probabilities: PerCandidate, kept: Which) -> PerPosition:
    """log N(y_i; p_i, 0.05²) of draws y, clamped to p_i ± 0.15; mean over p_i > 0.05."""
    distance = (draws - probabilities).clamp(-NORMAL_REACH, NORMAL_REACH) / NORMAL_SIGMA
    terms = -0.5 * distance.square() - math.log(NORMAL_SIGMA * math.sqrt(2.0 * math.pi))
    return mean_of_used(terms, kept & (probabilities > NORMAL_MASK))


def censored_gumbel(noise: PerCandidate, below: Which, above: Which, counted: Which) -> PerPosition:
    """The sum of the log-densities of Gumbel(0, 1) noise g, of which some is known by a bound alone (a Tobit model).

    Args:
        noise: n, the noise or its bound.
        below: where the noise lies below n, which has log P(g < n) = −exp(−n).
        above: where the noise lies above n, which has log P(g > n) = log(1 − exp(−exp(−n))).
        counted: which candidates count; another one adds 0. One that is neither below nor above has g = n, with
            log-density −n − exp(−n).
    """
    noise = torch.where(counted, noise, 0.0).clamp(*_FINITE_NOISE)
    exp_minus_noise = torch.exp(-noise)
    terms = torch.where(below, -exp_minus_noise, -noise - exp_minus_noise)
    terms = torch.where(above, torch.log(-torch.expm1(-exp_minus_noise)), terms)
    return torch.where(counted, terms, 0.0).sum(dim=-1)


def concrete(weights: PerCandidate, log_p: PerCandidate, tau: float, kept: Which) -> PerPosition:
    """Log-density of Gumbel-softmax weights w = softmax((log p + g) / τ) (Maddison et al., arXiv 1611.00712, eq. 10).

    Σ_i log p_i − n log Σ_i p_i w_i^−τ, up to what does not depend on p; log p up to a constant in each row. A weight
    below float32's smallest number stays in the second sum at that bound, and n counts the others.
    """
    seen = kept & (weights >= SMALLEST)
    powers = log_p - tau * weights.clamp_min(SMALLEST).log()
    log_total = torch.logsumexp(torch.where(kept, powers, -torch.inf), dim=-1)
    return torch.where(seen, log_p, 0.0).sum(dim=-1) - seen.sum(dim=-1) * log_total


def dirichlet_weights(weights: PerCandidate, probabilities: PerCandidate, alpha: float, kept: Which) -> PerPosition:
    """Log-density of weights drawn from Dirichlet(α p), up to what does not depend on p: a sum, unclamped.

    A weight below float32's smallest number s has the probability P(γ < s T) = (s T)^a / Γ(a + 1) of its Gamma draw,
    with a = α p and T = Σγ. It leaves the factor s^a / Γ(a + 1), since the integral over T has no p: the powers of T
    multiply to T^(α − 1).
    """
    shape = torch.where(kept, (alpha * probabilities).clamp_min(1e-20), 1.0)
    log_weights = weights.clamp_min(SMALLEST).log()
    seen = (shape - 1.0) * log_weights - torch.lgamma(shape)
    lost = shape * log_weights - torch.lgamma(shape + 1.0)
    terms = torch.where(weights < SMALLEST, lost, seen)
    return torch.where(kept, terms, 0.0).sum(dim=-1)


def mean_of_used(terms: Tensor, used: Tensor) -> Tensor:
    """The mean of each row's used terms, (N, K) to (N,); 0 where none is used."""
    return torch.where(used, terms, 0.0).sum(dim=-1) / used.sum(dim=-1).clamp_min(1)


def unnormalised(weights: PerCandidate, normalizer: PerPosition | None, tau: float = 1.0) -> PerCandidate:
    """y of weights w = softmax(y / τ): τ log w + normalizer. A lost weight counts as float32's smallest number."""
    log_weights = weights.clamp_min(SMALLEST).log()
    return tau * log_weights + require(normalizer, "edit.normalizer").unsqueeze(-1)


def renormalised(logits: PerCandidate, kept: Which) -> PerCandidate:
    """Probabilities among the kept candidates, at least one in each row, from their z̃; 0 for the others."""
    return torch.softmax(torch.where(kept, logits, -torch.inf), dim=-1)


def distinct(ids: Int64[Tensor, "positions candidates"]) -> Which:
    """Which candidates are the first of their id in the row; a repeated id fills an unused place."""
    same = ids.unsqueeze(-1) == ids.unsqueeze(-2)  # (N, K, K)
    repeats_an_earlier_one = torch.tril(same, diagonal=-1).any(dim=-1)
    return ~repeats_an_earlier_one
