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
    """Adds Gumbel noise, clamped and shifted to be 0 or above, to log p of the nucleus and mixes the k largest."""

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
            raise UsageError(
                f"perturbation option tau={self.tau:g}: must be at least 0.5 with density={self.density!r} (the default"
                " is 1): below, float32 weights cannot hold the noise. Raise it, or take density='token'."
            )
        if self.density == "exact" and self.scale == 0.0:
            raise UsageError("perturbation option scale=0: density='exact' needs noise. Raise scale; the default is 1.")

    @property
    def zero_mean_score(self) -> bool:
        return self.density == "exact"  # the release's density is of another noise than the one that is drawn

    def propose(self, step: Step) -> Proposal:
        """y_i = log p_i + s (clamp(g_i, −1.5, 3) + 1.5); the k largest y; w = softmax(y / τ); the text: the largest.

        p is at temperature 1 and over the whole vocabulary. The tokens i that take part are the smallest set that holds
        top_p, and at least the k likeliest, of the ``pool`` likeliest tokens.
        """
        scale = step.temperature.unsqueeze(-1)  # z̃ times the temperature is z
        pool = min(self.pool, step.logits.shape[-1])
        values, ids = step.top(pool)  # (B, pool) each
        log_p = values * scale - step.log_total(scale).unsqueeze(-1)
        low, high = densities.GUMBEL_RANGE
        noise = step.gumbel(ids).clamp(low, high) - low  # shifted to be 0 or above
        scores = log_p + self.scale * noise
        scores = torch.where(self._nucleus(log_p), scores, -torch.inf)
        largest, places = scores.topk(self.k, dim=-1)  # (B, k) each
        normalizer = self.tau * torch.logsumexp(largest / self.tau, dim=-1) if self.has_density else None
        weights = torch.softmax(largest / self.tau, dim=-1)
        weights = torch.where(weights < densities.SMALLEST, 0.0, weights)
        mixed_ids = ids.gather(-1, places)
        mixed_ids = torch.where(weights > 0.0, mixed_ids, mixed_ids[:, :1])
        edit = InputEdit(mixed_ids, weights, normalizer=normalizer)
        return Proposal(edit, tokens=mixed_ids[:, 0])

    def _nucleus(self, log_p: Tensor) -> Tensor:
        """Which of the likeliest tokens, most likely first, take part: (B, n) bool for log p (B, n)."""
        nucleus = within_top_p(log_p.exp(), self.top_p)
        nucleus[:, : self.k] = True
        return nucleus

    def log_density(self, replayed: Replayed) -> Tensor:
        """Mean over the tokens mixed of −Δ_i − exp(−Δ_i), Δ_i = y_i − log p_i(θ), p at temperature 1.

        A token with a weight below float32's smallest number is left out. With ``one_sided`` and A ≤ 0 a term with
        Δ_i < 0 has the gradient exp(Δ_i) − 1 in log p_i instead of 1 − exp(−Δ_i), which has no bound. ``exact`` is the
        log-density of the k largest y, together with the event that all other y are smaller than the last of them.
        """
        edit = replayed.edit
        support = edit.weights > 0.0
        scores = densities.unnormalised(edit.weights, edit.normalizer, self.tau)
        if self.density == "exact":
            return self._exact(replayed, scores, support)
        delta = torch.where(support, scores - replayed.log_probs(edit.ids, temperature=1.0), 0.0)
        terms = -delta - torch.exp(-delta)
        if self.one_sided and replayed.advantages is not None:
            bounded = delta - torch.exp(delta)  # its gradient in log p is exp(Δ) − 1
            uses_bounded = (replayed.advantages <= 0.0).unsqueeze(-1) & (delta < 0.0)
            terms_with_bounded_gradient = terms.detach() + bounded - bounded.detach()
            terms = torch.where(uses_bounded, terms_with_bounded_gradient, terms)
        return densities.mean_of_used(terms, support)

    def _exact(self, replayed: Replayed, scores: Tensor, support: Tensor) -> Tensor:
        """The density ``exact``, (N,), of y_i = log p_i(θ) + s (g_i + 1.5) with Gumbel noise g.

        ``scores``: y of the tokens mixed, (N, k). ``support``: where float32 kept their weights, (N, k) bool.
        """
        low, high = densities.GUMBEL_RANGE
        ids = replayed.edit.ids  # (N, k)
        gumbels = replayed.gumbel(ids)
        pool = replayed.top(min(self.pool, replayed.logits.shape[-1]))  # (N, pool)
        log_p_of_all = replayed.log_probs(torch.cat([ids, pool], dim=-1), temperature=1.0)
        log_p_of_mixed = log_p_of_all[:, : ids.shape[-1]]
        log_p_of_pool = log_p_of_all[:, ids.shape[-1] :]

        # The tokens mixed: their noise is known, or where it was clamped, that it lies beyond the bound.
        noise = (scores - log_p_of_mixed) / self.scale + low
        log_density = densities.censored_gumbel(noise, below=gumbels <= low, above=gumbels >= high, counted=support)

        # The other tokens of the nucleus: their noise lies below what would have put them among the tokens mixed. Where
        # that is the upper bound of the noise or more, it says nothing.
        is_same_token = pool.unsqueeze(-1) == ids.unsqueeze(-2)  # (N, pool, k)
        was_mixed = (is_same_token & support.unsqueeze(-2)).any(dim=-1)  # (N, pool)
        least_mixed_score = torch.where(support, scores, torch.inf).amin(dim=-1, keepdim=True)  # (N, 1)
        noise_to_be_mixed = (least_mixed_score - log_p_of_pool) / self.scale + low  # (N, pool)
        not_mixed = self._nucleus(log_p_of_pool.detach()) & ~was_mixed & (noise_to_be_mixed.detach() < high)
        nowhere = torch.zeros_like(not_mixed)
        return log_density + densities.censored_gumbel(
            noise_to_be_mixed, below=not_mixed, above=nowhere, counted=not_mixed
        )


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
        return self.density == "exact"  # the text's token is the likeliest, and Σ w log π is not a log-density

    def propose(self, step: Step) -> Proposal:
        """w = softmax((z̃ + g) / τ_g) over the tokens left; the text takes the likeliest, without the noise."""
        ids, p = self.top(step)  # (B, k) each
        noisy_log_p = torch.where(p > 0.0, p.log() + step.gumbel(ids), -torch.inf)
        weights = torch.softmax(noisy_log_p / self.tau, dim=-1)
        return Proposal(InputEdit(ids, weights), tokens=ids[:, 0])

    def log_density(self, replayed: Replayed) -> Tensor:
        """Σ_i w_i log π(i), π over the whole vocabulary; or the Gumbel-softmax density of w."""
        ids = replayed.edit.ids
        weights = replayed.edit.weights
        if self.density == "exact":
            return densities.concrete(weights, replayed.at(ids), self.tau, densities.distinct(ids))
        log_probs = torch.where(weights > 0.0, replayed.log_probs(ids), 0.0)  # (N, k)
        return (weights * log_probs).sum(dim=-1)
