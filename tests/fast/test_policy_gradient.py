"""Each objective's gradient by Monte Carlo, through the real rollout functions, scope, densities and OpenRLHF's loss.

Two problems, a bandit and one of two steps, on a model with V = 4 tokens and D = 2 whose true gradient is known. The
true side shares no code with the product: it writes each method's objective down in float64 and differentiates it,
with the noise integrated by quadrature, or by a larger independent sample (torch's own generators) where the noise has
kinks. What "true" means:

- `gaussian` with its density, and `gaussian` on the token: J itself, E[R], with e' = h(θ) + σ ε (σ as recorded).
- A token that was drawn is part of J. Weights of the mixture, wherever the loss has no density of them, are as
  recorded: the methods hold them fixed by definition, so they belong to the environment. The embeddings that they mix
  are the policy's.
- A text that is the argmax (`neighbor`'s anchor, `fuzzy` with density=token) or that follows from draws, with
  density=token: the methods weigh log π of that token by definition; the objective is E[R · π(x)/π_old(x)].
- `gumbel`, `dirichlet`, `normal`, `lepo` and `latent` with their densities: E[R · ℓ(θ)/ℓ_old] with ℓ as the papers
  write it, with the mixture of the recorded draws through the policy's embeddings.
- `multiplex` with the joint density: J itself over all draws, with the weights as recorded.

Compared are the shares of the embedding and of the output head, each apart: along the true gradient, where a factor
shows, and along two fixed directions across it; within three standard errors. The true gradient is at least ten of
them long, mostly a hundred: a part that is missing or counted twice cannot hide.
"""

from __future__ import annotations

import math
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngrpo.trainer.density_loss import densities
from ngrpo.trainer.log_prob_replacement import with_replacements
from perturbations import available, streams
from perturbations.base import Perturbation, Step
from perturbations.edit import realise
from perturbations.embeddings import matrix_embeddings
from perturbations.parameters import attach, attached
from perturbations.registry import create, get
from perturbations.replay import ReplayRecord
from perturbations.replay.scope import ReplayScope

V, D, PROMPTS = 4, 2, 2
TEMPERATURE = 0.8
BATCHES, EPISODES, SEED = 32, 3000, 20000
EMBEDDING = torch.tensor([[0.9, -0.4], [-0.7, 0.8], [0.2, 1.1], [-1.0, -0.6]])
HEAD = torch.tensor([[0.8, 0.5], [-0.5, 0.9], [0.3, -1.1], [-0.6, -0.3]])
BANDIT = torch.tensor([1.0, -0.8, 0.3, -0.5])
TWO_STEPS = torch.tensor(
    [[1.0, -0.7, 0.2, -0.6], [-0.4, 0.9, -0.8, 0.5], [0.3, -1.0, 0.6, 0.1], [-0.9, 0.4, -0.2, 0.8]]
)


class Model(nn.Module):
    """Logits of a row follow from that row's input alone, so one sequence holds many independent episodes."""

    def __init__(self, perturbation: Perturbation) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(EMBEDDING.clone(), freeze=False)
        self.head = nn.Parameter(HEAD.clone())
        module = attach(self, perturbation)
        if module is not None:
            drawn = torch.Generator().manual_seed(1)
            for parameter in module.parameters():
                parameter.data = 0.8 * torch.randn(parameter.shape, generator=drawn)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def logits(self, inputs: Tensor) -> Tensor:
        """z̃ of the tokens after inputs (…, D)."""
        return torch.tanh(inputs) @ self.head.T / TEMPERATURE

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.embedding(tokens))


# --- the estimate: the product's own way ----------------------------------------------------------


@cache
def policy_loss() -> Any:
    """OpenRLHF's, from its own file: importing the package loads PEFT and transformers, for many seconds."""
    package = types.ModuleType("openrlhf_models")
    package.__path__ = [str(Path(find_spec("openrlhf").submodule_search_locations[0]) / "models")]
    sys.modules[package.__name__] = package
    return import_module("openrlhf_models.loss").PolicyLoss(token_level_loss=True)


def plain_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


log_probs_from_logits = with_replacements(plain_log_probs)


@torch.no_grad()
def rollout(model: Model, perturbation: Perturbation, steps: int, seed: int) -> tuple[Tensor, ReplayRecord, Tensor]:
    """One sequence of EPISODES × (prompt, token, …), its record, and each action's advantage, (1, T − 1)."""
    drawn = torch.Generator().manual_seed(seed)
    embeddings = matrix_embeddings(model.embedding.weight.detach(), model.head.detach())
    start = torch.arange(EPISODES) * (steps + 1)
    tokens = torch.zeros(EPISODES, steps + 1, dtype=torch.int64)
    tokens[:, 0] = torch.arange(EPISODES) % PROMPTS
    inputs, edits, agreed = model.embedding(tokens[:, 0]), [], []
    seeds = torch.full((EPISODES,), seed)
    for step in range(1, steps + 1):
        logits = model.logits(inputs)
        sampled = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=drawn).squeeze(-1)
        positions, temperature = start + step, torch.full((EPISODES,), TEMPERATURE)
        proposal = perturbation.propose(Step(logits, sampled, temperature, seeds, positions, embeddings))
        keys = streams.keys(seeds, positions, streams.Stream.NOISE)
        inputs = realise(proposal.edit, model.embedding, keys, attached(model))
        tokens[:, step] = proposal.tokens
        edits.append(proposal.edit)
        agreed.append(sampled == proposal.tokens)

    def rows(name: str) -> np.ndarray | None:
        parts = [getattr(edit, name) for edit in edits]
        return None if parts[0] is None else torch.stack(parts, dim=1).flatten(0, 1).numpy()

    record = ReplayRecord(
        seed,
        0,
        tokens.numel(),
        (start.unsqueeze(-1) + torch.arange(1, steps + 1)).flatten().int().numpy(),
        rows("ids").astype(np.int32),
        rows("weights"),
        rows("sigma"),
        torch.stack(agreed, dim=1).flatten().numpy(),
        normalizer=rows("normalizer"),
    )
    reward = BANDIT[tokens[:, 1]] if steps == 1 else TWO_STEPS[tokens[:, 1], tokens[:, 2]]
    advantages = torch.zeros(tokens.shape)
    advantages[:, 1:] = reward.unsqueeze(-1)
    return tokens.view(1, -1), ReplayRecord.from_bytes(record.to_bytes()), advantages.view(1, -1)[:, 1:]


def estimate(perturbation: Perturbation, steps: int) -> dict[str, Tensor]:
    """Gradients of J by name, (BATCHES, …): of independent batches."""
    model, found = Model(perturbation), {}
    mask = torch.ones(1, EPISODES * (steps + 1), dtype=torch.int64)
    action = (torch.arange(1, mask.shape[1]) % (steps + 1) > 0).unsqueeze(0)

    def log_probs(tokens: Tensor, record: ReplayRecord) -> Tensor:
        scope = ReplayScope(model.embedding, module=attached(model), perturbation=perturbation)
        with scope([record], mask), densities(scope, TEMPERATURE):
            return log_probs_from_logits(model(tokens), torch.roll(tokens, -1, 1))[:, :-1] * action

    for batch in range(BATCHES):
        tokens, record, advantages = rollout(model, perturbation, steps, SEED + 1000 * steps + batch)
        with torch.no_grad():
            old = log_probs(tokens, record)
        loss = policy_loss()(
            log_probs(tokens, record), old, advantages, action_mask=action, batch_num_tokens=float(EPISODES)
        )[0]
        model.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found.setdefault(name, []).append(-gradient.double())
    return {name: torch.stack(parts) for name, parts in found.items()}


# --- the truth: each method written down again, in float64 ----------------------------------------

# A step of a method at logits z̃ (R, V): weights of its branches with their dependence on the policy, (R, n), the text's
# tokens (R, n) and the fed vectors (R, n, D). E is the policy's embedding; detached parts are the environment's.
Branches = tuple[Tensor, Tensor, Tensor]
SAMPLES, CHUNKS = 20_000, 20


def every_token(z: Tensor, vectors: Tensor) -> Branches:
    """Each token with its probability; vectors (R, V or 1, D) by token."""
    probabilities = torch.softmax(z, dim=-1)
    tokens = torch.arange(V).expand(len(z), V)
    return probabilities, tokens, vectors.expand(len(z), V, D)


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
    many = len(weights)
    fed = vectors.unsqueeze(2) + sigma * points
    return (
        (prob.unsqueeze(-1) * weights).flatten(1),
        tokens.repeat_interleave(many, dim=1),
        fed.flatten(1, 2),
    )


def gaussian_truth(perturbation: Any) -> Callable[[Tensor, Tensor], Branches]:
    def branches(z: Tensor, E: Tensor) -> Branches:
        sigma = perturbation.sigma * E.detach().square().mean().sqrt()
        if perturbation.base == "token":
            return noisy(every_token(z, E.unsqueeze(0)), sigma)
        values, ids = z.topk(perturbation.k, dim=-1)
        weights = torch.softmax(values * TEMPERATURE / perturbation.tau, dim=-1)
        weights = weights if perturbation.has_density else weights.detach()
        return noisy(every_token(z, (weights.unsqueeze(-1) * E[ids]).sum(1, keepdim=True)), sigma)

    return branches


def fuzzy_truth(perturbation: Any, generator: torch.Generator) -> Callable[[Tensor, Tensor], Branches]:
    """A sample, since the next step's argmax has a kink: N(e'; h, σ²)/N(e'; h_old, σ²) of a fixed e', or E[x] + σ ε."""

    def branches(z: Tensor, E: Tensor) -> Branches:
        sigma = perturbation.sigma * E.detach().square().mean().sqrt()
        tokens = z.expand(SAMPLES, V).argmax(dim=-1, keepdim=True)
        noise = torch.randn(SAMPLES, 1, D, generator=generator, dtype=E.dtype)
        mean = E[tokens]
        if not perturbation.has_density:
            return ratio(z.expand(SAMPLES, V), tokens), tokens, mean + sigma * noise
        fixed = (mean + sigma * noise).detach()
        exponent = -(fixed - mean).square().sum(-1) / (2 * sigma**2)
        return (exponent - exponent.detach()).exp(), tokens, fixed

    return branches


def soft_truth(perturbation: Any) -> Callable[[Tensor, Tensor], Branches]:
    def branches(z: Tensor, E: Tensor) -> Branches:
        values, ids = z.detach().topk(perturbation.k, dim=-1)
        weights = torch.softmax(values, dim=-1).unsqueeze(-1)
        return every_token(z, (weights * E[ids]).sum(1, keepdim=True))

    return branches


def neighbor_truth(perturbation: Any) -> Callable[[Tensor, Tensor], Branches]:
    def branches(z: Tensor, E: Tensor) -> Branches:
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

    return branches


def orthogonal_truth(perturbation: Any) -> Callable[[Tensor, Tensor], Branches]:
    """Of two candidates: e' = (1 − n a) E[c_1] + n E[c_2], n ~ N(0, 1), a = ⟨E[c_2], E[c_1]⟩ / ‖E[c_1]‖²."""

    def branches(z: Tensor, E: Tensor) -> Branches:
        ids = z.topk(2, dim=-1).indices
        first, second = E[ids[:, 0]], E[ids[:, 1]]
        along = ((first * second).sum(-1) / first.square().sum(-1)).detach().view(-1, 1, 1)
        x, w = np.polynomial.hermite_e.hermegauss(30)
        noise, weights = torch.from_numpy(x).view(1, -1, 1), torch.from_numpy(w / math.sqrt(2 * math.pi))
        fed = (1.0 - noise * along) * first.unsqueeze(1) + noise * second.unsqueeze(1)
        probabilities = torch.softmax(z, dim=-1)
        prob = (probabilities.unsqueeze(-1) * weights).flatten(1)
        return prob, torch.arange(V).repeat_interleave(30).expand(len(z), -1), fed.repeat(1, V, 1)

    return branches


def hrpo_truth(perturbation: Any, model: Model, parameters: dict[str, Tensor]) -> Callable[[Tensor, Tensor], Branches]:
    """a = exp(−8 softplus(Λ) σ(W_r e)), e' = a e + sqrt(1 − a²) σ(W_i e) r, r = Σ p E / ‖p‖."""
    start = attached(model).lambda_start.double()

    def branches(z: Tensor, E: Tensor) -> Branches:
        shares = torch.softmax(z.detach(), dim=-1)
        weights = shares / shares.norm(dim=-1, keepdim=True)
        mixture = (weights @ E).unsqueeze(1)
        w_r, w_i, shift = (parameters[f"perturbation.{name}"] for name in ("w_r", "w_i", "lambda_shift"))
        rate = nn.functional.softplus(start + shift)
        a = torch.exp(-8.0 * rate * torch.sigmoid(E @ w_r.T))
        fed = a * E + (1.0 - a**2).sqrt() * torch.sigmoid(E @ w_i.T) * mixture
        return every_token(z, fed)

    return branches


def drawn_truth(perturbation: Any, generator: torch.Generator) -> Callable[[Tensor, Tensor], Branches]:
    """SofT-GRPO's three noises on the top-k after top-p, by a sample: one row, many draws; or one draw for each row."""

    def branches(z: Tensor, E: Tensor) -> Branches:
        z = z.expand(SAMPLES, V)
        values, ids = z.topk(perturbation.k, dim=-1)
        share = torch.softmax(z.detach(), dim=-1).gather(-1, ids)
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
        factor = (density - density.detach()).exp() if perturbation.has_density else ratio(z, tokens)
        return factor, tokens, (weights.unsqueeze(-1) * E[ids]).sum(1, keepdim=True)

    return branches


def multiplex_truth(perturbation: Any) -> Callable[[Tensor, Tensor], Branches]:
    """All tuples of k draws; where the loss has the first one's probability alone, the others are the environment's."""

    def branches(z: Tensor, E: Tensor) -> Branches:
        draws = torch.cartesian_prod(*[torch.arange(V)] * perturbation.k)
        p = torch.softmax(z, dim=-1)[:, draws]
        weights = p.detach() / p.detach().sum(-1, keepdim=True)
        if perturbation.weights == "average":
            weights = torch.full_like(p, 1.0 / perturbation.k).detach()
        others = p[..., 1:] if perturbation.has_density else p[..., 1:].detach()
        fed = (weights.unsqueeze(-1) * E[draws]).sum(-2)
        return p[..., 0] * others.prod(-1), draws[:, 0].expand(len(z), -1), fed

    return branches


def moi_truth(perturbation: Any) -> Callable[[Tensor, Tensor], Branches]:
    def branches(z: Tensor, E: Tensor) -> Branches:
        p = torch.softmax(z.detach(), dim=-1)
        h = -(p * p.log()).sum(-1) / math.log(V)
        values, ids = z.detach().topk(perturbation.k, dim=-1)
        prior = (torch.softmax(values, dim=-1).unsqueeze(-1) * E[ids]).sum(1, keepdim=True)
        h, beta = h.view(-1, 1, 1), perturbation.beta
        return every_token(z, (h * prior + (beta + 1.0 - h) * E) / (beta + 1.0))

    return branches


def selar_truth(perturbation: Any) -> Callable[[Tensor, Tensor], Branches]:
    def branches(z: Tensor, E: Tensor) -> Branches:
        values, ids = z.detach().topk(perturbation.k, dim=-1)
        p = torch.softmax(values, dim=-1)
        h = -(p * p.log()).sum(-1, keepdim=True) / math.log(perturbation.k)
        mixed = (((1.0 + h) * p).unsqueeze(-1) * E[ids]).sum(1, keepdim=True) - h.unsqueeze(-1) * E[ids[:, :1]]
        soft = h.unsqueeze(-1) >= perturbation.threshold
        return every_token(z, torch.where(soft, mixed, E))

    return branches


def lepo_truth(perturbation: Any, generator: torch.Generator) -> Callable[[Tensor, Tensor], Branches]:
    def branches(z: Tensor, E: Tensor) -> Branches:
        z = z.expand(SAMPLES, V)
        share = torch.softmax(z.detach(), dim=-1)
        ordered, ids = share.sort(dim=-1, descending=True)
        left = (ordered.cumsum(-1) - ordered < perturbation.top_p) & (torch.arange(V) < perturbation.k)
        noise = -torch.log(torch.empty_like(share).exponential_(generator=generator))
        scores = torch.where(left, ordered.log() + noise, -torch.inf)
        weights = torch.softmax(scores / perturbation.tau, dim=-1)
        if perturbation.has_density:
            density = (weights * torch.log_softmax(z, dim=-1).gather(-1, ids)).sum(-1, keepdim=True)
            factor = (density - density.detach()).exp()
        else:
            factor = ratio(z, ids[:, :1])
        return factor, ids[:, :1], (weights.unsqueeze(-1) * E[ids]).sum(1, keepdim=True)

    return branches


def latent_truth(perturbation: Any, generator: torch.Generator) -> Callable[[Tensor, Tensor], Branches]:
    def branches(z: Tensor, E: Tensor) -> Branches:
        z = z.expand(SAMPLES, V)
        log_p = torch.log_softmax(z * TEMPERATURE, dim=-1)
        old = log_p.detach()
        place = old.argsort(dim=-1, descending=True).argsort(dim=-1)
        before = (old.exp().unsqueeze(-2) * (old.unsqueeze(-2) > old.unsqueeze(-1))).sum(-1)
        noise = -torch.log(torch.empty_like(old).exponential_(generator=generator))
        y = old + perturbation.scale * (noise.clamp(-1.5, 3.0) + 1.5)
        y, ids = torch.where((before < perturbation.top_p) | (place < perturbation.k), y, -torch.inf).sort(
            dim=-1, descending=True
        )
        y, ids = y[:, : perturbation.k], ids[:, : perturbation.k]
        delta = y - log_p.gather(-1, ids)
        density = (-delta - torch.exp(-delta)).mean(-1, keepdim=True)
        factor = (density - density.detach()).exp() if perturbation.has_density else ratio(z, ids[:, :1])
        weights = torch.softmax(y / perturbation.tau, dim=-1)
        return factor, ids[:, :1], (weights.unsqueeze(-1) * E[ids]).sum(1, keepdim=True)

    return branches


def truth(perturbation: Any, steps: int) -> dict[str, Tensor]:
    """True gradients by name: (1, …) where they are exact, (CHUNKS, …) where they are means of independent samples."""
    model, found = Model(perturbation), {}
    parameters = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    E, head = parameters["embedding.weight"], parameters["head"]
    generator = torch.Generator().manual_seed(7)
    name = "fuzzy" if getattr(perturbation, "base", None) == "fuzzy" else perturbation.name
    by_sample = {
        "fuzzy": fuzzy_truth,
        "gumbel": drawn_truth,
        "dirichlet": drawn_truth,
        "normal": drawn_truth,
        "lepo": lepo_truth,
        "latent": latent_truth,
    }
    sampled = name in by_sample
    written = {
        "multiplex": multiplex_truth,
        "moi": moi_truth,
        "selar": selar_truth,
        "gaussian": gaussian_truth,
        "soft": soft_truth,
        "neighbor": neighbor_truth,
        "orthogonal": orthogonal_truth,
        "hrpo": lambda o: hrpo_truth(o, model, parameters),
    }
    branches = by_sample[name](perturbation, generator) if sampled else written[name](perturbation)
    for _ in range(CHUNKS if sampled else 1):
        value = torch.zeros((), dtype=torch.float64)
        for prompt in range(PROMPTS):
            first, tokens, fed = branches(torch.tanh(E[[prompt]]) @ head.T / TEMPERATURE, E)
            if steps == 1:
                outcomes = first * BANDIT.double()[tokens]
            else:
                flat = fed.flatten(0, 1)
                second, then, _ = branches(torch.tanh(flat) @ head.T / TEMPERATURE, E)
                rewards = TWO_STEPS.double()[tokens.reshape(-1, 1), then]
                outcomes = first * (second * rewards).sum(-1).view_as(first)
            value = value + (outcomes.mean() if sampled else outcomes.sum()) / PROMPTS
        for name, gradient in zip(parameters, torch.autograd.grad(value, [*parameters.values()], allow_unused=True)):
            found.setdefault(name, []).append(torch.zeros_like(parameters[name]) if gradient is None else gradient)
    return {name: torch.stack(parts) for name, parts in found.items()}


# --- the comparison -------------------------------------------------------------------------------


def made(name: str, **options: Any) -> Perturbation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of greedy text: these tests have a reward for it
        return create(name, **options)


CASES = {
    "gaussian-soft-density": made("gaussian", density="gaussian", base="soft", k=3, sigma=0.6),
    "gaussian-token-density": made("gaussian", density="gaussian", base="token", sigma=0.6),
    "gaussian-fuzzy-density": made("gaussian", density="gaussian", base="fuzzy", sigma=0.6),
    "gaussian-soft": made("gaussian", base="soft", k=3, sigma=0.6),
    "gaussian-token": made("gaussian", sigma=0.6),
    "gaussian-fuzzy": made("gaussian", base="fuzzy", sigma=0.6),
    "gumbel-density": made("gumbel", density="gumbel", k=3, top_p=0.8, tau=0.3),
    "gumbel": made("gumbel", k=3, top_p=0.8, tau=0.3),
    "dirichlet-density": made("dirichlet", density="dirichlet", k=3, top_p=0.8, alpha=6.0),
    "dirichlet": made("dirichlet", k=3, top_p=0.8, alpha=6.0),
    "normal-density": made("normal", density="normal", k=3, top_p=0.8),
    "normal": made("normal", k=3, top_p=0.8),
    "neighbor": made("neighbor", k=2),
    "neighbor-released": made("neighbor", k=2, variant="released", space="input"),
    "orthogonal": made("orthogonal", k=2),
    "soft": made("soft", k=3),
    "hrpo": made("hrpo", k=V),
    "multiplex-density": made("multiplex", density="joint"),
    "multiplex": made("multiplex", k=2, weights="average"),
    "moi": made("moi", k=3, beta=0.5),
    "selar": made("selar", threshold=0.85),
    "lepo-density": made("lepo", density="lepo", top_p=0.8, k=V),
    "lepo": made("lepo", top_p=0.8, k=3),
    "latent-density": made("latent", density="latent", k=2, top_p=0.8),
    "latent": made("latent", k=2, top_p=0.8),
}


# Known to be 0: in the bandit nothing follows from the fed input. A fuzzy text is greedy, so there the reward is a
# constant, and a density's score has mean 0; and its mean has no gradient to the logits.
NO_GRADIENT = {
    (1, "embedding.weight"): ("gaussian-fuzzy-density",),
    (1, "head"): ("gaussian-fuzzy-density",),
    (2, "head"): ("gaussian-fuzzy-density",),
    **{(1, f"perturbation.{name}"): ("hrpo",) for name in ("w_r", "w_i", "lambda_shift")},
}


def test_every_perturbation_and_density_is_here() -> None:
    in_tree = {name for name, source in available().items() if source.startswith("perturbations.strategies")}
    assert {o.name for o in CASES.values()} == in_tree - {"none"}
    choices = {(o.name, getattr(o, "density", "token")) for o in CASES.values()}
    for name in in_tree - {"none"}:
        densities_of = next((f.metadata["choices"] for f in fields(get(name)) if f.name == "density"), ("token",))
        assert {(name, density) for density in densities_of} <= choices


def directions(true: Tensor) -> Tensor:
    """The true gradient's direction and two fixed ones across it, (3, size)."""
    fixed = torch.randn(2, true.numel(), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    basis, _ = torch.linalg.qr(torch.cat([true.view(1, -1), fixed]).T)
    return basis.T * torch.sign(basis.T[:1] @ true).view(1, 1)


@pytest.mark.parametrize("steps", [1, 2], ids=["bandit", "two-steps"])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_the_true_one(case: str, steps: int) -> None:
    perturbation = CASES[case]
    estimated, true = estimate(perturbation, steps), truth(perturbation, steps)
    assert estimated.keys() == true.keys()
    for name in estimated:
        got, want = estimated[name].flatten(1), true[name].flatten(1)
        nothing = case in NO_GRADIENT.get((steps, name), ())
        axes = directions(torch.ones_like(want[0]) if nothing else want.mean(0))
        along, goal = got @ axes.T, want @ axes.T
        error = along.var(0) / len(along) + (goal.var(0) / len(goal) if len(goal) > 1 else 0.0)
        error = error.sqrt() + 1e-5
        away = (along.mean(0) - (0.0 if nothing else goal.mean(0))) / error
        length = goal.mean(0)[0] / error[0]
        print(f"{case}, {steps} steps, {name}: {length:.0f} errors long; {away.tolist()}")
        assert nothing or length > 10, f"{name}: too few samples to tell"
        assert away.abs().max() < 3.0, f"{name}: {away.tolist()} standard errors away"
