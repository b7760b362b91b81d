# SPDX-License-Identifier: Apache-2.0
"""Latent-GRPO: the largest of many noisy log-probabilities (arXiv 2604.27998, by its released code)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations import density as densities
from perturbations.base import Proposal, Replayed
from perturbations.edit import InputEdit
from perturbations.errors import UsageError
from perturbations.options import option
from perturbations.registry import register
from perturbations.step import Step
from perturbations.top_tokens import TopTokens


@register("latent")
@dataclass(frozen=True, kw_only=True)
class Latent(TopTokens):
    """Adds one-sided Gumbel noise to the log-probabilities of the nucleus and mixes the k largest."""

    paper = "Latent-GRPO, arXiv 2604.27998"

    k: int = option(10, "number of tokens mixed", low=1)
    pool: int = option(256, "likeliest tokens that may take part at most; the paper takes the whole nucleus", low=1)
    scale: float = option(1.0, "s, factor of the noise", low=0.0)
    tau: float = option(1.0, "temperature of the mixture", above=0.0)
    one_sided: bool = option(True, "where Δ < 0 in an answer with A ≤ 0, the density's gradient is that of −Δ")
    density: str = option(
        "token",
        "what the loss weighs: the token's probability, or the Gumbel density of the noise",
        choices=("token", "latent"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool < self.k:
            raise UsageError(
                f"perturbation option pool={self.pool}: must be at least k={self.k}, the number of tokens mixed."
            )
        if self.density == "latent" and self.tau < 0.5:
            raise UsageError(
                f"perturbation option tau={self.tau:g}: must be at least 0.5 with density='latent' (the default is 1):"
                " below, float32 weights are too small to hold the noise. Raise it, or take density='token'."
            )

    def propose(self, step: Step) -> Proposal:
        """y_i = log p_i + s (clamp(g_i, −1.5, 3) + 1.5); the k largest y; w = softmax(y / τ); the text: the largest.

        p is at temperature 1, over the smallest set of tokens that holds top_p, and at least over the k likeliest.
        """
        scale = step.temperature.unsqueeze(-1)
        values, ids = step.top(min(self.pool, step.logits.shape[-1]))
        log_p = values * scale - step.log_total(scale).unsqueeze(-1)
        p = log_p.exp()
        kept = p.cumsum(dim=-1) - p < (self.top_p if self.top_p < 1.0 else torch.inf)
        kept[:, : self.k] = True
        low, high = densities.GUMBEL_RANGE
        scores = log_p + self.scale * (step.gumbel(ids).clamp(low, high) - low)
        largest, at = torch.where(kept, scores, -torch.inf).topk(self.k, dim=-1)
        normalizer = self.tau * torch.logsumexp(largest / self.tau, dim=-1) if self.has_density else None
        weights = torch.softmax(largest / self.tau, dim=-1)
        weights = torch.where(weights < torch.finfo(torch.float32).tiny, 0.0, weights)
        mixed = ids.gather(-1, at)
        mixed = torch.where(weights > 0.0, mixed, mixed[:, :1])
        return Proposal(InputEdit(mixed, weights, normalizer=normalizer), mixed[:, 0])

    def log_density(self, replayed: Replayed) -> Tensor:
        """Mean over the tokens mixed of −Δ_i − exp(−Δ_i), Δ_i = y_i − log p_i(θ), p at temperature 1.

        y_i = τ log w_i + normalizer. A token whose weight float32 lost takes no part. With ``one_sided`` and A ≤ 0 a
        term with Δ_i < 0 has the gradient exp(Δ_i) − 1 in log p_i in the place of 1 − exp(−Δ_i), which has no bound.
        """
        edit = replayed.edit
        kept = edit.weights > 0.0
        scores = self.tau * torch.where(kept, edit.weights, 1.0).log() + edit.normalizer.unsqueeze(-1)
        delta = torch.where(kept, scores - replayed.log_probs(edit.ids, temperature=1.0), 0.0)
        terms = -delta - torch.exp(-delta)
        if self.one_sided and replayed.advantages is not None:
            other = delta - torch.exp(delta)
            turned = (replayed.advantages <= 0.0).unsqueeze(-1) & (delta < 0.0)
            terms = torch.where(turned, terms.detach() + other - other.detach(), terms)
        return torch.where(kept, terms, 0.0).sum(dim=-1) / kept.sum(dim=-1).clamp_min(1)
