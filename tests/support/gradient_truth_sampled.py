# SPDX-License-Identifier: Apache-2.0
"""Steps of methods with noise in several dimensions, by a sample: one row, many draws; or one draw for each row.

Shares no code with the product but the perturbations' options.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.gradient_branches import (
    SAMPLES,
    Branches,
    gumbel_noise,
    mixture,
    one_with_gradient,
    ratio,
    standard_gumbel,
)
from tests.support.gradient_problem import TEMPERATURE, D, V

# SofT-GRPO's bounds of Gumbel noise.
LOW = -1.5
HIGH = 3.0


def fuzzy_truth(z: Tensor, E: Tensor, perturbation: Any, generator: torch.Generator) -> Branches:
    """N(e'; h, σ²)/N(e'; h_old, σ²) of a fixed e', or E[x] + σ ε. The next step's argmax has a kink: hence a sample."""
    rows = z.expand(SAMPLES, V)
    sigma = perturbation.sigma * E.detach().square().mean().sqrt()
    tokens = rows.argmax(dim=-1, keepdim=True)
    noise = torch.randn(SAMPLES, 1, D, generator=generator, dtype=E.dtype)
    mean = E[tokens]
    fed = mean + sigma * noise
    if not perturbation.has_density:
        return ratio(rows, tokens), tokens, fed
    fixed = fed.detach()
    exponent = -(fixed - mean).square().sum(-1) / (2 * sigma**2)
    return one_with_gradient(exponent), tokens, fixed


def tobit(noise: Tensor, drawn: Tensor) -> Tensor:
    """log f, log F or log(1 − F) of Gumbel(0, 1) ``noise``: where the noise drawn lay within [-1.5, 3] or beyond it."""
    law = standard_gumbel(noise.dtype)
    density = torch.where(drawn <= LOW, law.cdf(noise).log(), law.log_prob(noise))
    return torch.where(drawn >= HIGH, torch.log1p(-law.cdf(noise)), density)


class Nucleus(NamedTuple):
    """The top-k of each sample after top-p, (SAMPLES, k) each.

    Attributes:
        ids: of the candidates, the likeliest first.
        kept: which of them top-p leaves.
        old: their probabilities in the rollout, among those that are kept.
        now: the same with their dependence on the policy.
    """

    ids: Tensor
    kept: Tensor
    old: Tensor
    now: Tensor


def _nucleus(z: Tensor, perturbation: Any) -> Nucleus:
    values, ids = z.topk(perturbation.k, dim=-1)
    share = torch.softmax(z.detach(), dim=-1).gather(-1, ids)
    share = share / share.sum(-1, keepdim=True)  # the releases cut by the share of the k likeliest
    kept = share.cumsum(-1) - share < perturbation.top_p
    old = share * kept / (share * kept).sum(-1, keepdim=True)
    now = torch.softmax(torch.where(kept, values, -torch.inf), dim=-1)
    return Nucleus(ids, kept, old, now)


class Draw(NamedTuple):
    """SofT-GRPO's noise on a nucleus, (SAMPLES, k) each.

    Attributes:
        scores: the largest one's token is the text's.
        weights: of the mixture.
        terms: of the log-density as the paper's release has it.
        likely: which terms the release counts.
        exact: the terms of the exact log-density; None for noise without one.
    """

    scores: Tensor
    weights: Tensor
    terms: Tensor
    likely: Tensor
    exact: Tensor | None


def _gumbel_draw(nucleus: Nucleus, perturbation: Any, generator: torch.Generator) -> Draw:
    noise = gumbel_noise(nucleus.old, generator)
    clamped = noise.clamp(LOW, HIGH) if perturbation.clamp else noise
    scores = torch.where(nucleus.kept, (nucleus.old + 1e-6).log() + clamped, -torch.inf)
    log_now = (nucleus.now + 1e-6).log()
    noise_now = scores.nan_to_num(neginf=0.0) - log_now
    # What was clamped in the rollout has no gradient.
    was_inside = (noise > LOW) & (noise < HIGH)
    released_noise = torch.where(was_inside, noise_now, clamped)
    return Draw(
        scores=scores,
        weights=torch.softmax(scores / perturbation.tau, dim=-1),
        terms=-released_noise - torch.exp(-released_noise),
        likely=log_now > -3.0,
        exact=tobit(noise_now, noise),
    )


def _dirichlet_draw(nucleus: Nucleus, perturbation: Any, generator: torch.Generator) -> Draw:
    shape = torch.where(nucleus.kept, perturbation.alpha * nucleus.old, 1.0)
    scores = torch.where(nucleus.kept, torch._standard_gamma(shape, generator=generator), 0.0)
    positive_scores = scores.clamp_min(1e-300)
    concentration = torch.where(nucleus.kept, perturbation.alpha * nucleus.now, 1.0)
    terms = (concentration - 1.0) * positive_scores.log() - scores - torch.lgamma(concentration)
    # The exact density is that of the Gamma draws, whose sum the fed weights do not show.
    gamma = torch.distributions.Gamma(concentration, 1.0, validate_args=False)
    return Draw(
        scores=scores,
        weights=scores / scores.sum(-1, keepdim=True),
        terms=terms.clamp(-5.0, 3.0),
        likely=nucleus.now > 0.05,
        exact=gamma.log_prob(positive_scores),
    )


def _normal_draw(nucleus: Nucleus, perturbation: Any, generator: torch.Generator) -> Draw:
    noise = torch.randn(nucleus.old.shape, generator=generator, dtype=nucleus.now.dtype)
    scores = torch.where(nucleus.kept, nucleus.old + 0.05 * noise, 0.0)
    noise_now = (scores - nucleus.now).clamp(-0.15, 0.15) / 0.05
    return Draw(
        scores=scores,
        weights=scores / scores.sum(-1, keepdim=True),
        terms=-0.5 * noise_now**2,
        likely=nucleus.now > 0.05,
        exact=None,
    )


_DRAWS: dict[str, Callable[[Nucleus, Any, torch.Generator], Draw]] = {
    "dirichlet": _dirichlet_draw,
    "gumbel": _gumbel_draw,
    "normal": _normal_draw,
}


def drawn_truth(z: Tensor, E: Tensor, perturbation: Any, generator: torch.Generator) -> Branches:
    """SofT-GRPO's three noises on the top-k after top-p."""
    rows = z.expand(SAMPLES, V)
    nucleus = _nucleus(rows, perturbation)
    draw = _DRAWS[perturbation.name](nucleus, perturbation, generator)
    tokens = nucleus.ids.gather(-1, draw.scores.argmax(-1, keepdim=True))
    fed = mixture(draw.weights, nucleus.ids, E)
    if not perturbation.has_density:
        return ratio(rows, tokens), tokens, fed
    if perturbation.density == "exact":
        log_density = torch.where(nucleus.kept, draw.exact, 0.0).sum(-1, keepdim=True)
    else:
        counted = nucleus.kept & draw.likely
        total = torch.where(counted, draw.terms, 0.0).sum(-1, keepdim=True)
        log_density = total / counted.sum(-1, keepdim=True).clamp_min(1)
    return one_with_gradient(log_density), tokens, fed


def lepo_truth(z: Tensor, E: Tensor, perturbation: Any, generator: torch.Generator) -> Branches:
    rows = z.expand(SAMPLES, V)
    share = torch.softmax(rows.detach(), dim=-1)
    ordered, ids = share.sort(dim=-1, descending=True)
    share_of_top = ordered / ordered[:, : perturbation.k].sum(-1, keepdim=True)
    in_nucleus = share_of_top.cumsum(-1) - share_of_top < perturbation.top_p
    left = in_nucleus & (torch.arange(V) < perturbation.k)
    noise = gumbel_noise(share, generator)
    noisy_scores = ordered.log() + noise
    scores = torch.where(left, noisy_scores, -torch.inf)
    weights = torch.softmax(scores / perturbation.tau, dim=-1)
    tokens = ids[:, :1]
    fed = mixture(weights, ids, E)
    if not perturbation.has_density:
        return ratio(rows, tokens), tokens, fed
    log_probs = torch.log_softmax(rows, dim=-1).gather(-1, ids)
    if perturbation.density == "exact":
        # Of all noise, whose common shift the fed weights do not show.
        terms = standard_gumbel(z.dtype).log_prob(noisy_scores - log_probs)
        log_density = torch.where(left, terms, 0.0).sum(-1, keepdim=True)
    else:
        log_density = (weights * log_probs).sum(-1, keepdim=True)
    return one_with_gradient(log_density), tokens, fed


def latent_truth(z: Tensor, E: Tensor, perturbation: Any, generator: torch.Generator) -> Branches:
    rows = z.expand(SAMPLES, V)
    log_p = torch.log_softmax(rows * TEMPERATURE, dim=-1)
    log_p_old = log_p.detach()
    rank = log_p_old.argsort(dim=-1, descending=True).argsort(dim=-1)
    is_likelier = log_p_old.unsqueeze(-2) > log_p_old.unsqueeze(-1)
    mass_before = (log_p_old.exp().unsqueeze(-2) * is_likelier).sum(-1)
    in_nucleus = (mass_before < perturbation.top_p) | (rank < perturbation.k)
    noise = gumbel_noise(log_p_old, generator)
    all_scores = log_p_old + perturbation.scale * (noise.clamp(LOW, HIGH) + 1.5)
    scores, ids = torch.where(in_nucleus, all_scores, -torch.inf).topk(perturbation.k, dim=-1)
    tokens = ids[:, :1]
    fed = mixture(torch.softmax(scores / perturbation.tau, dim=-1), ids, E)
    if not perturbation.has_density:
        return ratio(rows, tokens), tokens, fed
    if perturbation.density == "exact":
        # Of all noise in the nucleus: what is not fed has no part in the reward, so its score averages out.
        terms = tobit((all_scores - log_p) / perturbation.scale - 1.5, noise)
        log_density = torch.where(in_nucleus, terms, 0.0).sum(-1, keepdim=True)
    else:
        delta = scores - log_p.gather(-1, ids)
        log_density = (-delta - torch.exp(-delta)).mean(-1, keepdim=True)
    return one_with_gradient(log_density), tokens, fed


SAMPLED = {
    "dirichlet": drawn_truth,
    "fuzzy": fuzzy_truth,
    "gumbel": drawn_truth,
    "latent": latent_truth,
    "lepo": lepo_truth,
    "normal": drawn_truth,
}
