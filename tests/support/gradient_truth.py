# SPDX-License-Identifier: Apache-2.0
"""The true gradients of test_policy_gradient.py: each method written down again, in float64.

Shares no code with the product but the perturbations' options.
"""

import math
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perturbations.parameters import attached
from tests.support.gradient_problem import BANDIT, PROMPTS, TEMPERATURE, TWO_STEPS, D, Model, V

# A step of a method at logits z̃ (R, V): weights of its branches with their dependence on the policy, (R, n), the text's
# tokens (R, n) and the fed vectors (R, n, D). E is the policy's embedding; detached parts are the environment's.
Branches = tuple[Tensor, Tensor, Tensor]
SAMPLES, CHUNKS = 20_000, 20


def every_token(z: Tensor, vectors: Tensor) -> Branches:
    """Each token with its probability; vectors (R, V or 1, D) by token."""
    return torch.softmax(z, dim=-1), torch.arange(V).expand(len(z), V), vectors.expand(len(z), V, D)


def ratio(z: Tensor, tokens: Tensor) -> Tensor:
    """π(x)/π_old(x) of tokens (R, n): 1, with a gradient."""
    log_probs = torch.log_softmax(z, dim=-1).gather(-1, tokens)
    return (log_probs - log_probs.detach()).exp()


def gauss_hermite(nodes: int = 14) -> tuple[Tensor, Tensor]:
    """Points of ε ~ N(0, I_2), (Q, 2), and their weights, (Q,)."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    x, w = torch.from_numpy(x), torch.from_numpy(w / math.sqrt(2 * math.pi))
    return torch.cartesian_prod(x, x), torch.outer(w, w).flatten()


def noisy(branches: Branches, sigma: Tensor) -> Branches:
    """Each branch once for each quadrature point of its noise."""
    prob, tokens, vectors = branches
    points, weights = gauss_hermite()
    fed = vectors.unsqueeze(2) + sigma * points
    prob = (prob.unsqueeze(-1) * weights).flatten(1)
    return prob, tokens.repeat_interleave(len(weights), dim=1), fed.flatten(1, 2)


def gaussian_truth(z: Tensor, E: Tensor, perturbation: Any) -> Branches:
    sigma = perturbation.sigma * E.detach().square().mean().sqrt()
    if perturbation.base == "token":
        return noisy(every_token(z, E.unsqueeze(0)), sigma)
    values, ids = z.topk(perturbation.k, dim=-1)
    weights = torch.softmax(values * TEMPERATURE / perturbation.tau, dim=-1)
    weights = weights if perturbation.has_density else weights.detach()
    return noisy(every_token(z, (weights.unsqueeze(-1) * E[ids]).sum(1, keepdim=True)), sigma)


def fuzzy_truth(z: Tensor, E: Tensor, perturbation: Any, generator: torch.Generator) -> Branches:
    """A sample, since the next step's argmax has a kink: N(e'; h, σ²)/N(e'; h_old, σ²) of a fixed e', or E[x] + σ ε."""
    sigma = perturbation.sigma * E.detach().square().mean().sqrt()
    tokens = z.expand(SAMPLES, V).argmax(dim=-1, keepdim=True)
    noise = torch.randn(SAMPLES, 1, D, generator=generator, dtype=E.dtype)
    mean = E[tokens]
    if not perturbation.has_density:
        return ratio(z.expand(SAMPLES, V), tokens), tokens, mean + sigma * noise
    fixed = (mean + sigma * noise).detach()
    exponent = -(fixed - mean).square().sum(-1) / (2 * sigma**2)
    return (exponent - exponent.detach()).exp(), tokens, fixed


def soft_truth(z: Tensor, E: Tensor, perturbation: Any) -> Branches:
    values, ids = z.detach().topk(perturbation.k, dim=-1)
    weights = torch.softmax(values, dim=-1).unsqueeze(-1)
    return every_token(z, (weights * E[ids]).sum(1, keepdim=True))


def neighbor_truth(z: Tensor, E: Tensor, perturbation: Any) -> Branches:
    anchor = z.argmax(dim=-1)
    unit = nn.functional.normalize(E.detach(), dim=-1)
    similarity = (unit @ unit.T)[anchor].scatter(-1, anchor.unsqueeze(-1), torch.inf)
    ids = similarity.topk(perturbation.k, dim=-1).indices
    scores = z.detach() if perturbation.weights == "logits" else torch.softmax(z.detach(), dim=-1) / TEMPERATURE
    weights = torch.softmax(scores.gather(-1, ids), dim=-1).unsqueeze(-1)
    fed = (weights * E[ids]).sum(1, keepdim=True)
    if perturbation.realization == "sampled":
        return every_token(z, fed)
    return ratio(z, anchor.unsqueeze(-1)), anchor.unsqueeze(-1), fed


def orthogonal_truth(z: Tensor, E: Tensor, perturbation: Any) -> Branches:
    """Of two candidates: e' = (1 − n a) E[c_1] + n E[c_2], n ~ N(0, 1), a = ⟨E[c_2], E[c_1]⟩ / ‖E[c_1]‖²."""
    ids = z.topk(2, dim=-1).indices
    first, second = E[ids[:, 0]], E[ids[:, 1]]
    along = ((first * second).sum(-1) / first.square().sum(-1)).detach().view(-1, 1, 1)
    x, w = np.polynomial.hermite_e.hermegauss(30)
    noise, weights = torch.from_numpy(x).view(1, -1, 1), torch.from_numpy(w / math.sqrt(2 * math.pi))
    fed = (1.0 - noise * along) * first.unsqueeze(1) + noise * second.unsqueeze(1)
    probabilities = torch.softmax(z, dim=-1)
    prob = (probabilities.unsqueeze(-1) * weights).flatten(1)
    return prob, torch.arange(V).repeat_interleave(30).expand(len(z), -1), fed.repeat(1, V, 1)


def hrpo_truth(z: Tensor, E: Tensor, perturbation: Any, model: Model, parameters: dict[str, Tensor]) -> Branches:
    """a = exp(−8 softplus(Λ) σ(W_r e)), e' = a e + sqrt(1 − a²) σ(W_i e) r, r = Σ p E / ‖p‖."""
    start = attached(model).lambda_start.double()
    shares = torch.softmax(z.detach(), dim=-1)
    weights = shares / shares.norm(dim=-1, keepdim=True)
    mixture = (weights @ E).unsqueeze(1)
    w_r, w_i, shift = (parameters[f"perturbation.{name}"] for name in ("w_r", "w_i", "lambda_shift"))
    rate = nn.functional.softplus(start + shift)
    a = torch.exp(-8.0 * rate * torch.sigmoid(E @ w_r.T))
    fed = a * E + (1.0 - a**2).sqrt() * torch.sigmoid(E @ w_i.T) * mixture
    return every_token(z, fed)


def tarpo_truth(z: Tensor, E: Tensor, perturbation: Any, model: Model, parameters: dict[str, Tensor]) -> Branches:
    """Each token with its own embedding and with the mixture, by softmax(W h + b); log π(decision) counts λ times.

    Of two rows of D = 2 the head has a left inverse: h follows from z̃.
    """
    head = parameters["head"]
    weight, shift = (parameters[f"perturbation.head.{name}"] for name in ("weight", "bias_shift"))
    counted = perturbation.decision_weight if perturbation.has_density else 0.0
    h = TEMPERATURE * z @ head @ torch.linalg.inv(head.T @ head)
    start = torch.tensor([perturbation.bias, 0.0], dtype=z.dtype)
    chosen = torch.log_softmax(h @ weight.T + shift + start, dim=-1)
    chosen = (chosen.detach() + counted * (chosen - chosen.detach())).exp()
    values, ids = z.detach().topk(perturbation.k, dim=-1)
    mixture = (torch.softmax(values, dim=-1).unsqueeze(-1) * E[ids]).sum(1, keepdim=True)
    probabilities, tokens, own = every_token(z, E.unsqueeze(0))
    both = torch.cat([probabilities * chosen[:, :1], probabilities * chosen[:, 1:]], dim=1)
    return both, tokens.repeat(1, 2), torch.cat([own, mixture.expand_as(own)], dim=1)


def tobit(noise: Tensor, drawn: Tensor) -> Tensor:
    """log f, log F or log(1 − F) of Gumbel(0, 1) ``noise``: where the noise drawn lay within [-1.5, 3] or beyond it."""
    law = torch.distributions.Gumbel(torch.zeros((), dtype=noise.dtype), 1.0, validate_args=False)
    density = torch.where(drawn <= -1.5, law.cdf(noise).log(), law.log_prob(noise))
    return torch.where(drawn >= 3.0, torch.log1p(-law.cdf(noise)), density)


def drawn_truth(z: Tensor, E: Tensor, perturbation: Any, generator: torch.Generator) -> Branches:
    """SofT-GRPO's three noises on the top-k after top-p, by a sample: one row, many draws; or one draw for each row."""
    z = z.expand(SAMPLES, V)
    values, ids = z.topk(perturbation.k, dim=-1)
    share = torch.softmax(z.detach(), dim=-1).gather(-1, ids)
    share = share / share.sum(-1, keepdim=True)  # the releases cut by the share of the k likeliest
    kept = share.cumsum(-1) - share < perturbation.top_p
    p_old = share * kept / (share * kept).sum(-1, keepdim=True)
    p = torch.softmax(torch.where(kept, values, -torch.inf), dim=-1)
    if perturbation.name == "gumbel":
        g = -torch.log(torch.empty_like(p_old).exponential_(generator=generator))
        clamped = g.clamp(-1.5, 3.0) if perturbation.clamp else g
        scores = torch.where(kept, (p_old + 1e-6).log() + clamped, -torch.inf)
        weights = torch.softmax(scores / perturbation.tau, dim=-1)
        # What was clamped in the rollout has no gradient.
        noise = torch.where((g > -1.5) & (g < 3.0), scores.nan_to_num(neginf=0.0) - (p + 1e-6).log(), clamped)
        terms, likely = -noise - torch.exp(-noise), (p + 1e-6).log() > -3.0
    elif perturbation.name == "dirichlet":
        shape = torch.where(kept, perturbation.alpha * p_old, 1.0)
        scores = torch.where(kept, torch._standard_gamma(shape, generator=generator), 0.0)
        weights = scores / scores.sum(-1, keepdim=True)
        concentration, log_draws = torch.where(kept, perturbation.alpha * p, 1.0), scores.clamp_min(1e-300).log()
        terms = (concentration - 1.0) * log_draws - scores - torch.lgamma(concentration)
        terms, likely = terms.clamp(-5.0, 3.0), p > 0.05
    else:
        scores = p_old + 0.05 * torch.randn(p_old.shape, generator=generator, dtype=p.dtype)
        scores = torch.where(kept, scores, 0.0)
        weights = scores / scores.sum(-1, keepdim=True)
        terms, likely = -0.5 * ((scores - p).clamp(-0.15, 0.15) / 0.05) ** 2, p > 0.05
    tokens = ids.gather(-1, scores.argmax(-1, keepdim=True))
    used = kept & likely
    density = torch.where(used, terms, 0.0).sum(-1, keepdim=True) / used.sum(-1, keepdim=True).clamp_min(1)
    if perturbation.density == "exact" and perturbation.name == "gumbel":
        y = scores.nan_to_num(neginf=0.0)
        density = torch.where(kept, tobit(y - (p + 1e-6).log(), g), 0.0).sum(-1, keepdim=True)
    elif perturbation.density == "exact":
        # Of the Gamma draws, whose sum the fed weights do not show.
        terms = torch.distributions.Gamma(concentration, 1.0, validate_args=False).log_prob(scores.clamp_min(1e-300))
        density = torch.where(kept, terms, 0.0).sum(-1, keepdim=True)
    factor = (density - density.detach()).exp() if perturbation.has_density else ratio(z, tokens)
    return factor, tokens, (weights.unsqueeze(-1) * E[ids]).sum(1, keepdim=True)


def multiplex_truth(z: Tensor, E: Tensor, perturbation: Any) -> Branches:
    """All tuples of k draws; where the loss has the first one's probability alone, the others are the environment's."""
    draws = torch.cartesian_prod(*[torch.arange(V)] * perturbation.k)
    p = torch.softmax(z, dim=-1)[:, draws]
    weights = p.detach() / p.detach().sum(-1, keepdim=True)
    if perturbation.weights == "average":
        weights = torch.full_like(p, 1.0 / perturbation.k).detach()
    if perturbation.draws == "distinct":
        # Without replacement: each among what the ones before leave, and no token twice.
        gone = p.detach().cumsum(-1)[..., :-1]
        once = torch.tensor([len(set(each)) == len(each) for each in draws.tolist()])
        rest = torch.where(once.unsqueeze(-1), p.detach()[..., 1:] / (1.0 - gone), 0.0).prod(-1)
        fed = (weights.unsqueeze(-1) * E[draws]).sum(-2)
        return p[..., 0] * rest, draws[:, 0].expand(len(z), -1), fed
    others = p[..., 1:] if perturbation.has_density else p[..., 1:].detach()
    fed = (weights.unsqueeze(-1) * E[draws]).sum(-2)
    return p[..., 0] * others.prod(-1), draws[:, 0].expand(len(z), -1), fed


def moi_truth(z: Tensor, E: Tensor, perturbation: Any) -> Branches:
    p = torch.softmax(z.detach(), dim=-1)
    h = -(p * p.log()).sum(-1) / math.log(V)
    values, ids = z.detach().topk(perturbation.k, dim=-1)
    prior = (torch.softmax(values, dim=-1).unsqueeze(-1) * E[ids]).sum(1, keepdim=True)
    h, beta = h.view(-1, 1, 1), perturbation.beta
    return every_token(z, (h * prior + (beta + 1.0 - h) * E) / (beta + 1.0))


def selar_truth(z: Tensor, E: Tensor, perturbation: Any) -> Branches:
    values, ids = z.detach().topk(perturbation.k, dim=-1)
    p = torch.softmax(values, dim=-1)
    h = -(p * p.log()).sum(-1, keepdim=True) / math.log(perturbation.k)
    mixed = (((1.0 + h) * p).unsqueeze(-1) * E[ids]).sum(1, keepdim=True) - h.unsqueeze(-1) * E[ids[:, :1]]
    soft = h.unsqueeze(-1) >= perturbation.threshold
    return every_token(z, torch.where(soft, mixed, E))


def cuts_truth(z: Tensor, E: Tensor, perturbation: Any) -> Branches:
    p, ids = torch.softmax(z.detach() * TEMPERATURE, dim=-1).topk(perturbation.k, dim=-1)
    kept = p >= perturbation.delta
    kept |= ~kept.any(-1, keepdim=True)
    return kept / kept.sum(-1, keepdim=True) * ratio(z, ids), ids, E[ids]


def lepo_truth(z: Tensor, E: Tensor, perturbation: Any, generator: torch.Generator) -> Branches:
    z = z.expand(SAMPLES, V)
    share = torch.softmax(z.detach(), dim=-1)
    ordered, ids = share.sort(dim=-1, descending=True)
    of_top = ordered / ordered[:, : perturbation.k].sum(-1, keepdim=True)
    left = (of_top.cumsum(-1) - of_top < perturbation.top_p) & (torch.arange(V) < perturbation.k)
    noise = -torch.log(torch.empty_like(share).exponential_(generator=generator))
    scores = torch.where(left, ordered.log() + noise, -torch.inf)
    weights = torch.softmax(scores / perturbation.tau, dim=-1)
    if perturbation.density == "exact":
        # Of all noise, whose common shift the fed weights do not show.
        noise_now = (ordered.log() + noise) - torch.log_softmax(z, dim=-1).gather(-1, ids)
        law = torch.distributions.Gumbel(torch.zeros((), dtype=z.dtype), 1.0, validate_args=False)
        density = torch.where(left, law.log_prob(noise_now), 0.0).sum(-1, keepdim=True)
        factor = (density - density.detach()).exp()
    elif perturbation.has_density:
        density = (weights * torch.log_softmax(z, dim=-1).gather(-1, ids)).sum(-1, keepdim=True)
        factor = (density - density.detach()).exp()
    else:
        factor = ratio(z, ids[:, :1])
    return factor, ids[:, :1], (weights.unsqueeze(-1) * E[ids]).sum(1, keepdim=True)


def latent_truth(z: Tensor, E: Tensor, perturbation: Any, generator: torch.Generator) -> Branches:
    z = z.expand(SAMPLES, V)
    log_p = torch.log_softmax(z * TEMPERATURE, dim=-1)
    old = log_p.detach()
    place = old.argsort(dim=-1, descending=True).argsort(dim=-1)
    before = (old.exp().unsqueeze(-2) * (old.unsqueeze(-2) > old.unsqueeze(-1))).sum(-1)
    noise = -torch.log(torch.empty_like(old).exponential_(generator=generator))
    taking = (before < perturbation.top_p) | (place < perturbation.k)
    all_y = old + perturbation.scale * (noise.clamp(-1.5, 3.0) + 1.5)
    y, ids = torch.where(taking, all_y, -torch.inf).topk(perturbation.k, dim=-1)
    delta = y - log_p.gather(-1, ids)
    density = (-delta - torch.exp(-delta)).mean(-1, keepdim=True)
    if perturbation.density == "exact":
        # Of all noise in the nucleus: what is not fed has no part in the reward, so its score averages out.
        terms = tobit((all_y - log_p) / perturbation.scale - 1.5, noise)
        density = torch.where(taking, terms, 0.0).sum(-1, keepdim=True)
    factor = (density - density.detach()).exp() if perturbation.has_density else ratio(z, ids[:, :1])
    weights = torch.softmax(y / perturbation.tau, dim=-1)
    return factor, ids[:, :1], (weights.unsqueeze(-1) * E[ids]).sum(1, keepdim=True)


EXACT = {
    "cuts": cuts_truth,
    "gaussian": gaussian_truth,
    "hrpo": hrpo_truth,
    "moi": moi_truth,
    "multiplex": multiplex_truth,
    "neighbor": neighbor_truth,
    "orthogonal": orthogonal_truth,
    "selar": selar_truth,
    "soft": soft_truth,
    "tarpo": tarpo_truth,
}
SAMPLED = {
    "dirichlet": drawn_truth,
    "fuzzy": fuzzy_truth,
    "gumbel": drawn_truth,
    "latent": latent_truth,
    "lepo": lepo_truth,
    "normal": drawn_truth,
}


@cache
def truth(perturbation: Any, steps: int) -> dict[str, Tensor]:
    """True gradients by name: (1, …) where they are exact, (CHUNKS, …) where they are means of independent samples."""
    model, found = Model(perturbation), {}
    parameters = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    E, head = parameters["embedding.weight"], parameters["head"]
    generator = torch.Generator().manual_seed(7)
    name = "fuzzy" if getattr(perturbation, "base", None) == "fuzzy" else perturbation.name
    sampled = name in SAMPLED
    given = {"generator": generator} if sampled else {}
    if attached(model) is not None:
        given = {"model": model, "parameters": parameters}
    branches = partial((SAMPLED if sampled else EXACT)[name], perturbation=perturbation, **given)
    # What is fed: through the policy's embedding, or constant.
    mixed = E if perturbation.input_gradient == "full" or perturbation.density_of_vector else E.detach()
    for _ in range(CHUNKS if sampled else 1):
        value = torch.zeros((), dtype=torch.float64)
        for prompt in range(PROMPTS):
            first, tokens, fed = branches(torch.tanh(E[[prompt]]) @ head.T / TEMPERATURE, mixed)
            if steps == 1:
                outcomes = first * BANDIT.double()[tokens]
            else:
                flat = fed.flatten(0, 1)
                second, then, _ = branches(torch.tanh(flat) @ head.T / TEMPERATURE, mixed)
                rewards = TWO_STEPS.double()[tokens.reshape(-1, 1), then]
                outcomes = first * (second * rewards).sum(-1).view_as(first)
            value = value + (outcomes.mean() if sampled else outcomes.sum()) / PROMPTS
        for name, gradient in zip(parameters, torch.autograd.grad(value, [*parameters.values()], allow_unused=True)):
            found.setdefault(name, []).append(torch.zeros_like(parameters[name]) if gradient is None else gradient)
    return {name: torch.stack(parts) for name, parts in found.items()}
