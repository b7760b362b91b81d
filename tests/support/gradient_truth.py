# SPDX-License-Identifier: Apache-2.0
"""The true gradients of test_policy_gradient.py: each method written down again, in float64.

Shares no code with the product but the perturbations' options. Methods whose noise has many dimensions are in
gradient_truth_sampled.py.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perturbations.parameters import attached
from tests.support.gradient_branches import Branches, every_token, mixture, ratio
from tests.support.gradient_problem import BANDIT, PROMPTS, TEMPERATURE, TWO_STEPS, Model, V
from tests.support.gradient_truth_sampled import SAMPLED

CHUNKS = 20
"""Independent samples of a method that is sampled."""


def gauss_hermite(nodes: int) -> tuple[Tensor, Tensor]:
    """Points of ε ~ N(0, 1) and their weights, (nodes,) each."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    return torch.from_numpy(points), torch.from_numpy(weights / math.sqrt(2 * math.pi))


def noisy(branches: Branches, sigma: Tensor) -> Branches:
    """Each branch once for each quadrature point of its noise ε ~ N(0, I_2)."""
    branch_weights, tokens, vectors = branches
    points, weights = gauss_hermite(14)
    points_of_two = torch.cartesian_prod(points, points)
    weights_of_two = torch.outer(weights, weights).flatten()
    fed = vectors.unsqueeze(2) + sigma * points_of_two
    branch_weights = (branch_weights.unsqueeze(-1) * weights_of_two).flatten(1)
    return branch_weights, tokens.repeat_interleave(len(weights_of_two), dim=1), fed.flatten(1, 2)


def gaussian_truth(z: Tensor, E: Tensor, perturbation: Any) -> Branches:
    sigma = perturbation.sigma * E.detach().square().mean().sqrt()
    if perturbation.base == "token":
        return noisy(every_token(z, E.unsqueeze(0)), sigma)
    values, ids = z.topk(perturbation.k, dim=-1)
    weights = torch.softmax(values * TEMPERATURE / perturbation.tau, dim=-1)
    if not perturbation.has_density:
        weights = weights.detach()
    return noisy(every_token(z, mixture(weights, ids, E)), sigma)


def soft_truth(z: Tensor, E: Tensor, perturbation: Any) -> Branches:
    values, ids = z.detach().topk(perturbation.k, dim=-1)
    return every_token(z, mixture(torch.softmax(values, dim=-1), ids, E))


def neighbor_truth(z: Tensor, E: Tensor, perturbation: Any) -> Branches:
    anchor = z.argmax(dim=-1)
    unit = nn.functional.normalize(E.detach(), dim=-1)
    similarity = (unit @ unit.T)[anchor].scatter(-1, anchor.unsqueeze(-1), torch.inf)
    ids = similarity.topk(perturbation.k, dim=-1).indices
    scores = z.detach()
    if perturbation.weights != "logits":
        scores = torch.softmax(scores, dim=-1) / TEMPERATURE
    weights = torch.softmax(scores.gather(-1, ids), dim=-1)
    fed = mixture(weights, ids, E)
    if perturbation.realization == "sampled":
        return every_token(z, fed)
    return ratio(z, anchor.unsqueeze(-1)), anchor.unsqueeze(-1), fed


def orthogonal_truth(z: Tensor, E: Tensor, perturbation: Any) -> Branches:
    """Of two candidates: e' = (1 − n a) E[c_1] + n E[c_2], n ~ N(0, 1), a = ⟨E[c_2], E[c_1]⟩ / ‖E[c_1]‖²."""
    ids = z.topk(2, dim=-1).indices
    first = E[ids[:, 0]]
    second = E[ids[:, 1]]
    squared_norm = first.square().sum(-1)
    along = ((first * second).sum(-1) / squared_norm).detach().view(-1, 1, 1)
    points, weights = gauss_hermite(30)
    noise = points.view(1, -1, 1)
    fed = (1.0 - noise * along) * first.unsqueeze(1) + noise * second.unsqueeze(1)
    probabilities = torch.softmax(z, dim=-1)
    branch_weights = (probabilities.unsqueeze(-1) * weights).flatten(1)
    tokens = torch.arange(V).repeat_interleave(len(points)).expand(len(z), -1)
    return branch_weights, tokens, fed.repeat(1, V, 1)


def hrpo_truth(z: Tensor, E: Tensor, perturbation: Any, model: Model, parameters: dict[str, Tensor]) -> Branches:
    """a = exp(−8 softplus(Λ) σ(W_r e)), e' = a e + sqrt(1 − a²) σ(W_i e) r, r = Σ p E / ‖p‖."""
    start = attached(model).lambda_start.double()
    probabilities = torch.softmax(z.detach(), dim=-1)
    weights = probabilities / probabilities.norm(dim=-1, keepdim=True)
    residual = (weights @ E).unsqueeze(1)
    w_r = parameters["perturbation.w_r"]
    w_i = parameters["perturbation.w_i"]
    rate = nn.functional.softplus(start + parameters["perturbation.lambda_shift"])
    a = torch.exp(-8.0 * rate * torch.sigmoid(E @ w_r.T))
    fed = a * E + (1.0 - a**2).sqrt() * torch.sigmoid(E @ w_i.T) * residual
    return every_token(z, fed)


def tarpo_truth(z: Tensor, E: Tensor, perturbation: Any, model: Model, parameters: dict[str, Tensor]) -> Branches:
    """Each token with its own embedding and with the mixture, by softmax(W h + b); log π(decision) counts λ times.

    Of two rows of D = 2 the head has a left inverse: h follows from z̃.
    """
    head = parameters["head"]
    weight = parameters["perturbation.head.weight"]
    shift = parameters["perturbation.head.bias_shift"]
    h = TEMPERATURE * z @ head @ torch.linalg.inv(head.T @ head)
    start = torch.tensor([perturbation.bias, 0.0], dtype=z.dtype)
    log_decision = torch.log_softmax(h @ weight.T + shift + start, dim=-1)
    counted = perturbation.decision_weight if perturbation.has_density else 0.0
    constant = log_decision.detach()
    decision = (constant + counted * (log_decision - constant)).exp()
    values, ids = z.detach().topk(perturbation.k, dim=-1)
    mixed = mixture(torch.softmax(values, dim=-1), ids, E)
    probabilities, tokens, own_embeddings = every_token(z, E.unsqueeze(0))
    own_weights = probabilities * decision[:, :1]
    mixed_weights = probabilities * decision[:, 1:]
    fed = torch.cat([own_embeddings, mixed.expand_as(own_embeddings)], dim=1)
    return torch.cat([own_weights, mixed_weights], dim=1), tokens.repeat(1, 2), fed


def multiplex_truth(z: Tensor, E: Tensor, perturbation: Any) -> Branches:
    """All tuples of k draws; where the loss has the first one's probability alone, the others are the environment's."""
    tuples = torch.cartesian_prod(*[torch.arange(V)] * perturbation.k)  # (V^k, k)
    p = torch.softmax(z, dim=-1)[:, tuples]
    constant_p = p.detach()
    if perturbation.weights == "average":
        weights = torch.full_like(constant_p, 1.0 / perturbation.k)
    else:
        weights = constant_p / constant_p.sum(-1, keepdim=True)
    if perturbation.draws == "distinct":
        # Without replacement: each among what the ones before leave, and no token twice.
        left = 1.0 - constant_p.cumsum(-1)[..., :-1]
        is_distinct = torch.tensor([len(set(tokens)) == len(tokens) for tokens in tuples.tolist()])
        further = torch.where(is_distinct.unsqueeze(-1), constant_p[..., 1:] / left, 0.0)
    elif perturbation.has_density:
        further = p[..., 1:]
    else:
        further = constant_p[..., 1:]
    fed = (weights.unsqueeze(-1) * E[tuples]).sum(-2)
    return p[..., 0] * further.prod(-1), tuples[:, 0].expand(len(z), -1), fed


def moi_truth(z: Tensor, E: Tensor, perturbation: Any) -> Branches:
    p = torch.softmax(z.detach(), dim=-1)
    entropy = -(p * p.log()).sum(-1) / math.log(V)
    values, ids = z.detach().topk(perturbation.k, dim=-1)
    prior = mixture(torch.softmax(values, dim=-1), ids, E)
    h = entropy.view(-1, 1, 1)
    beta = perturbation.beta
    return every_token(z, (h * prior + (beta + 1.0 - h) * E) / (beta + 1.0))


def selar_truth(z: Tensor, E: Tensor, perturbation: Any) -> Branches:
    values, ids = z.detach().topk(perturbation.k, dim=-1)
    p = torch.softmax(values, dim=-1)
    entropy = -(p * p.log()).sum(-1, keepdim=True) / math.log(perturbation.k)
    h = entropy.unsqueeze(-1)
    likeliest = E[ids[:, :1]]
    contrasted = mixture((1.0 + entropy) * p, ids, E) - h * likeliest
    return every_token(z, torch.where(h >= perturbation.threshold, contrasted, E))


def cuts_truth(z: Tensor, E: Tensor, perturbation: Any) -> Branches:
    p, ids = torch.softmax(z.detach() * TEMPERATURE, dim=-1).topk(perturbation.k, dim=-1)
    kept = p >= perturbation.delta
    kept |= ~kept.any(-1, keepdim=True)
    uniform = kept / kept.sum(-1, keepdim=True)
    return uniform * ratio(z, ids), ids, E[ids]


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


@cache
def truth(perturbation: Any, steps: int) -> dict[str, Tensor]:
    """True gradients by name: (1, …) where they are exact, (CHUNKS, …) where they are means of independent samples."""
    model = Model(perturbation)
    parameters = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    method = "fuzzy" if getattr(perturbation, "base", None) == "fuzzy" else perturbation.name
    if method in SAMPLED:
        generator = torch.Generator().manual_seed(7)
        branches = partial(SAMPLED[method], perturbation=perturbation, generator=generator)
    elif attached(model) is not None:
        branches = partial(EXACT[method], perturbation=perturbation, model=model, parameters=parameters)
    else:
        branches = partial(EXACT[method], perturbation=perturbation)
    # What is fed: through the policy's embedding, or constant.
    E = parameters["embedding.weight"]
    has_input_gradient = perturbation.input_gradient == "full" or perturbation.density_of_vector
    fed_from = E if has_input_gradient else E.detach()
    gradients: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for _ in range(CHUNKS if method in SAMPLED else 1):
        value = _expected_reward(branches, fed_from, parameters, steps, is_sampled=method in SAMPLED)
        of_parameters = torch.autograd.grad(value, [*parameters.values()], allow_unused=True)
        for name, gradient in zip(parameters, of_parameters):
            gradients[name].append(torch.zeros_like(parameters[name]) if gradient is None else gradient)
    return {name: torch.stack(chunks) for name, chunks in gradients.items()}


def _expected_reward(
    branches: Callable[[Tensor, Tensor], Branches],
    fed_from: Tensor,
    parameters: dict[str, Tensor],
    steps: int,
    is_sampled: bool,
) -> Tensor:
    """The objective: the mean reward over prompts and branches.

    Args:
        branches: of a step, by its logits and the embedding that is fed from.
        fed_from: the policy's embedding, or a constant one.
        parameters: of the policy.
        steps: 1 for the bandit, 2 for the problem of two steps.
        is_sampled: branches are a sample, whose mean counts; else all of them, whose weighted sum counts.
    """
    head = parameters["head"]

    def logits(inputs: Tensor) -> Tensor:
        return torch.tanh(inputs) @ head.T / TEMPERATURE

    value = torch.zeros((), dtype=torch.float64)
    for prompt in range(PROMPTS):
        first, tokens, fed = branches(logits(parameters["embedding.weight"][[prompt]]), fed_from)
        if steps == 1:
            outcomes = first * BANDIT.double()[tokens]
        else:
            second, second_tokens, _ = branches(logits(fed.flatten(0, 1)), fed_from)
            rewards = TWO_STEPS.double()[tokens.reshape(-1, 1), second_tokens]
            outcomes = first * (second * rewards).sum(-1).view_as(first)
        value = value + (outcomes.mean() if is_sampled else outcomes.sum()) / PROMPTS
    return value
