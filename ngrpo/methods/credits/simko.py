# SPDX-License-Identifier: Apache-2.0
"""SimKO: where the policy wavers, right answers raise its k likeliest tokens (Peng et al., arXiv 2510.14807)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.methods.credits import register
from ngrpo.methods.credits.base import Credit, LossTokens, StepTokens
from perturbations import option


@register("simko")
@dataclass(frozen=True, kw_only=True)
class SimKO(Credit):
    """At an answer's most uncertain tokens: A > 0 also raises the k likeliest, A < 0 lowers a likeliest token more."""

    paper = "SimKO, arXiv 2510.14807"

    k: int = option(3, "K, the likeliest tokens that share in a right answer's credit", low=1)
    alpha: float = option(0.01, "α, their share of it", low=0.0, high=1.0)
    penalty: float = option(1.1, "λ, the factor of A < 0 where the token is the likeliest one", low=1.0)
    quantile: float = option(
        0.8, "tokens whose entropy is above this quantile of their answer's are concerned", low=0.0, high=1.0
    )

    def formula(self, tokens: StepTokens) -> Tensor:
        """A: what changes, changes with the policy of each update (:meth:`in_loss`)."""
        return tokens.advantages

    def in_loss(self, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        """The gradient of γ̃ A, γ = π(y) / π_old(y), at tokens with H > τ.

        A > 0: γ̃ = (1 − α) γ + (α / K) Σ_k sg(γ / γ_k) γ_k over the K likeliest tokens, where sg stops gradients: its
        value is γ, its gradient γ ((1 − α) ∇log π(y) + (α / K) Σ_k ∇log π(k)), whatever the old probabilities of the K
        are. A < 0 and y the likeliest: γ̃ = λ γ.
        """
        advantages, term = tokens.advantages, torch.zeros_like(tokens.log_probs)
        entropies = tokens.entropies()
        wavering = entropies > quantiles(entropies, tokens.answers, self.quantile)
        right = (wavering & (advantages > 0.0)).nonzero().flatten()
        candidates = tokens.log_probs_of(right, tokens.likeliest(right, self.k))
        shared = self.alpha * (candidates.mean(dim=1) - tokens.log_probs[right])
        wrong = (wavering & (advantages < 0.0)).nonzero().flatten()
        likeliest = tokens.likeliest(wrong, 1).squeeze(1) == tokens.tokens[wrong]
        factor = torch.where(likeliest, self.penalty, 1.0).to(advantages)
        return advantages.index_copy(0, wrong, advantages[wrong] * factor), term.index_copy(0, right, shared)


def quantiles(values: Tensor, answers: Tensor, q: float) -> Tensor:
    """The linear q-quantile of each answer's values, at each of them, (N,); ``answers`` (N,) ascend from 0."""
    counts = torch.bincount(answers).tolist() if len(answers) else []
    parts = [torch.quantile(part, q).expand(len(part)) for part in values.split(counts) if len(part)]
    return torch.cat(parts) if parts else values
