# SPDX-License-Identifier: Apache-2.0
"""Gumbel mixtures by their released code: Latent-GRPO (arXiv 2604.27998) and LEPO (arXiv 2604.17892)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations import Gate, InputEdit, Proposal, Step, UsageError, option, register
from perturbations import density as densities
from perturbations.base import Replayed, density_option, freeze_option, input_gradient_option
from perturbations.registry import gates
from perturbations.top_tokens import LikeliestTokens, TopTokens, within_top_p


@register("latent")
@dataclass(frozen=True, kw_only=True)
class Latent(LikeliestTokens):
    """Adds one-sided Gumbel noise to the log-probabilities of the nucleus and mixes the k largest."""

    paper = "Latent-GRPO, arXiv 2604.27998"
    draws_text = True

    k: int = option(10, "number of tokens mixed", low=1)
    top_p: float = option(0.95, "keep the most likely tokens that hold this probability", above=0.0, high=1.0)
    pool: int = option(256, "likeliest tokens that may take part at most; the paper takes the whole nucleus", low=1)
    scale: float = option(1.0, "s, factor of the noise", low=0.0)
    tau: float = option(1.0, "temperature of the mixture", above=0.0)
    one_sided: bool = option(True, "where Δ < 0 and A ≤ 0, the gradient in log p is exp(Δ) − 1, which is bounded")
    density: str = density_option("the release's density, or that of the noise as it is drawn", "latent", "exact")
    input_gradient: str = input_gradient_option("none")
    freeze: str = freeze_option("both", " (its release: both)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool < self.k:
            raise UsageError(f"perturbation option pool={self.pool}: must be at least k={self.k}, the tokens mixed.")
        if self.has_density and self.tau < 0.5:
            least = f"must be at least 0.5 with density={self.density!r} (the default is 1)"
            why = "below, float32 weights cannot hold the noise. Raise it, or take density='token'"
            raise UsageError(f"perturbation option tau={self.tau:g}: {least}: {why}.")
        if self.density == "exact" and self.scale == 0.0:
            raise UsageError("perturbation option scale=0: density='exact' needs noise. Raise scale; the default is 1.")

    @property
    def zero_mean_score(self) -> bool:
        return self.density == "exact"  # the release's is of other noise than is drawn

    def propose(self, step: Step) -> Proposal:
        """y_i = log p_i + s (clamp(g_i, −1.5, 3) + 1.5); the k largest y; w = softmax(y / τ); the text: the largest.

        p is at temperature 1, over the smallest set of tokens that holds top_p, and at least over the k likeliest.
        """
        scale = step.temperature.unsqueeze(-1)
        values, ids = step.top(min(self.pool, step.logits.shape[-1]))
        log_p = values * scale - step.log_total(scale).unsqueeze(-1)
        low, high = densities.GUMBEL_RANGE
        scores = log_p + self.scale * (step.gumbel(ids).clamp(low, high) - low)
        largest, at = torch.where(self._nucleus(log_p), scores, -torch.inf).topk(self.k, dim=-1)
        normalizer = self.tau * torch.logsumexp(largest / self.tau, dim=-1) if self.has_density else None
        weights = torch.softmax(largest / self.tau, dim=-1)
        weights = torch.where(weights < densities.SMALLEST, 0.0, weights)
        mixed = ids.gather(-1, at)
        mixed = torch.where(weights > 0.0, mixed, mixed[:, :1])
        return Proposal(InputEdit(mixed, weights, normalizer=normalizer), mixed[:, 0])

    def _nucleus(self, log_p: Tensor) -> Tensor:
        """Which of the likeliest tokens, most likely first, take part: (B, n) bool for log p (B, n)."""
        nucleus = within_top_p(log_p.exp(), self.top_p)
        nucleus[:, : self.k] = True
        return nucleus

    def log_density(self, replayed: Replayed) -> Tensor:
        """Mean over the tokens mixed of −Δ_i − exp(−Δ_i), Δ_i = y_i − log p_i(θ), p at temperature 1.

        A token is ignored if float32 lost its weight. With ``one_sided`` and A ≤ 0 a term with Δ_i < 0 has the
        gradient exp(Δ_i) − 1 in log p_i instead of 1 − exp(−Δ_i), which has no bound. ``exact`` is the log-density of
        the k largest y, and of all others being smaller than the last of them.
        """
        edit = replayed.edit
        support = edit.weights > 0.0
        scores = densities.unnormalised(edit.weights, edit.normalizer, self.tau)
        if self.density == "exact":
            return self._exact(replayed, scores, support)
        delta = torch.where(support, scores - replayed.log_probs(edit.ids, temperature=1.0), 0.0)
        terms = -delta - torch.exp(-delta)
        if self.one_sided and replayed.advantages is not None:
            other = delta - torch.exp(delta)
            turned = (replayed.advantages <= 0.0).unsqueeze(-1) & (delta < 0.0)
            terms = torch.where(turned, terms.detach() + other - other.detach(), terms)
        return torch.where(support, terms, 0.0).sum(dim=-1) / support.sum(dim=-1).clamp_min(1)

    def _exact(self, replayed: Replayed, scores: Tensor, support: Tensor) -> Tensor:
        """``exact``, of the scores (N, k) where there is ``support``: y_i = log p_i(θ) + s (g_i + 1.5), g Gumbel."""
        # Clamped noise lies beyond its bound; that of a token of the nucleus which was not mixed, below what would have
        # made it the last one mixed.
        low, high = densities.GUMBEL_RANGE
        ids, gumbels = replayed.edit.ids, replayed.gumbel(replayed.edit.ids)
        pool = replayed.top(min(self.pool, replayed.logits.shape[-1]))
        both = replayed.log_probs(torch.cat([ids, pool], dim=-1), temperature=1.0)
        own, log_p = both[:, : ids.shape[-1]], both[:, ids.shape[-1] :]
        noise = (scores - own) / self.scale + low
        log_density = densities.censored_gumbel(noise, gumbels <= low, gumbels >= high, support)
        mixed = ((pool.unsqueeze(-1) == ids.unsqueeze(-2)) & support.unsqueeze(-2)).any(-1)
        last = torch.where(support, scores, torch.inf).amin(dim=-1, keepdim=True)
        beyond = (last - log_p) / self.scale + low
        # From the upper bound on it says nothing: no noise is larger.
        others = self._nucleus(log_p.detach()) & ~mixed & (beyond.detach() < high)
        return log_density + densities.censored_gumbel(beyond, others, torch.zeros_like(others), others)


@register("lepo")
@dataclass(frozen=True, kw_only=True)
class LEPO(TopTokens):
    """Feeds a Gumbel-softmax mixture for the first tokens of a response, and writes the likeliest into the text."""

    paper = "LEPO, arXiv 2604.17892"

    gate: str | Gate | None = option("first", "perturb only where this gate, too, is open: its name", registry=gates)  # noqa: RUF009
    k: int = option(30, "number of tokens mixed at most", low=1)
    tau: float = option(0.5, "temperature of the Gumbel-softmax, τ_g", above=0.0)
    density: str = density_option("the weighted log-probabilities, or the weights' log-density", "lepo", "exact")
    input_gradient: str = input_gradient_option("none")

    @property
    def zero_mean_score(self) -> bool:
        return self.density == "exact"  # the token is the likeliest, and Σ w log π is no log-density

    def propose(self, step: Step) -> Proposal:
        """w = softmax((z̃ + g) / τ_g) over the tokens left; the text takes the likeliest, without the noise."""
        ids, p = self.top(step)
        noisy = torch.where(p > 0.0, p.log() + step.gumbel(ids), -torch.inf)
        return Proposal(InputEdit(ids, torch.softmax(noisy / self.tau, dim=-1)), ids[:, 0])

    def log_density(self, replayed: Replayed) -> Tensor:
        """Σ_i w_i log π(i), π over the whole vocabulary; or the Gumbel-softmax density of w."""
        weights, ids = replayed.edit.weights, replayed.edit.ids
        if self.density == "exact":
            return densities.concrete(weights, replayed.at(ids), self.tau, densities.distinct(ids))
        return (weights * torch.where(weights > 0.0, replayed.log_probs(ids), 0.0)).sum(dim=-1)
