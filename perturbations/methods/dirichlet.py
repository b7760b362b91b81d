# SPDX-License-Identifier: Apache-2.0
"""Dirichlet noise on the top-k probabilities, the second noise of SofT-GRPO's release (arXiv 2511.06411)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations import InputEdit, Proposal, Step, option, register
from perturbations import density as densities
from perturbations.base import Replayed, input_gradient_option
from perturbations.errors import require
from perturbations.top_tokens import TopTokens


@register("dirichlet")
@dataclass(frozen=True, kw_only=True)
class Dirichlet(TopTokens):
    """Feeds the top-k tokens mixed with weights drawn from Dirichlet(α p)."""

    paper = "SofT-GRPO (release), arXiv 2511.06411"
    draws_text = True

    alpha: float = option(1.0, "concentration α: the larger, the closer to the probabilities", above=0.0)
    density: str = option(
        "token",
        "what the loss weighs: the token's probability, the release's density of the draws, or that of the weights",
        choices=("token", "dirichlet", "exact"),
    )
    input_gradient: str = input_gradient_option("none")

    @property
    def zero_mean_score(self) -> bool:
        """Only of the exact density: the release's is clamped, and leaves unlikely candidates out."""
        return self.density == "exact"

    def propose(self, step: Step) -> Proposal:
        """γ_i ~ Gamma(α p_i, 1); weights = γ / Σγ; the text takes the largest weight."""
        ids, probabilities = self.top(step)
        shape = (self.alpha * probabilities).clamp_min(1e-20)
        log_draws = torch.where(probabilities > 0.0, step.log_gamma(ids, shape), -torch.inf)
        tokens = ids.gather(-1, log_draws.argmax(dim=-1, keepdim=True)).squeeze(-1)
        normalizer = torch.logsumexp(log_draws, dim=-1) if self.density == "dirichlet" else None
        return Proposal(InputEdit(ids, torch.softmax(log_draws, dim=-1), normalizer=normalizer), tokens)

    def log_density(self, replayed: Replayed) -> Tensor:
        """Mean over ids with p_i(θ) > 0.05 of the Gamma(α p_i(θ), 1) log-density of γ_i, clamped to [−5, 3].

        log γ_i = log w_i + normalizer. A weight that float32 lost stands for a γ whose term is clamped in any case.
        ``exact`` is log Dirichlet(w; α p(θ)) of all that were mixed.
        """
        edit, distinct = replayed.edit, densities.distinct(replayed.edit.ids)
        probabilities = densities.renormalised(replayed.at(edit.ids), distinct)
        if self.density == "exact":
            return densities.dirichlet_weights(edit.weights, probabilities, self.alpha, distinct)
        normalizer = require(edit.normalizer, "edit.normalizer")
        log_draws = edit.weights.clamp_min(torch.finfo(torch.float32).tiny).log() + normalizer.unsqueeze(-1)
        return densities.dirichlet(log_draws, probabilities, self.alpha, distinct)
