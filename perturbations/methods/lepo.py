# SPDX-License-Identifier: Apache-2.0
"""LEPO: latent tokens at the beginning of an answer, from Gumbel-softmax (arXiv 2604.17892, by its released code)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations import Gate, InputEdit, Proposal, Step, option, register
from perturbations import density as densities
from perturbations.base import Replayed, input_gradient_option
from perturbations.registry import gates
from perturbations.top_tokens import TopTokens


@register("lepo")
@dataclass(frozen=True, kw_only=True)
class LEPO(TopTokens):
    """Feeds a Gumbel-softmax mixture for the first tokens of an answer, and writes the likeliest into the text."""

    paper = "LEPO, arXiv 2604.17892"

    gate: str | Gate | None = option("first", "perturb only where this gate, too, is open: its name", registry=gates)  # noqa: RUF009
    k: int = option(30, "number of tokens mixed at most", low=1)
    tau: float = option(0.5, "temperature of the Gumbel-softmax, τ_g", above=0.0)
    density: str = option(
        "token",
        "what the loss weighs: the token's probability, the weighted log-probabilities, or the weights' log-density",
        choices=("token", "lepo", "exact"),
    )
    input_gradient: str = input_gradient_option("none")

    @property
    def zero_mean_score(self) -> bool:
        """Only of the exact density: the token is the likeliest, and Σ w log π is no log-density."""
        return self.density == "exact"

    def propose(self, step: Step) -> Proposal:
        """w = softmax((z̃ + g) / τ_g) over the tokens left; the text takes the likeliest, without the noise."""
        ids, p = self.top(step)
        scores = torch.where(p > 0.0, p.log() + step.gumbel(ids), -torch.inf)
        return Proposal(InputEdit(ids, torch.softmax(scores / self.tau, dim=-1)), ids[:, 0])

    def log_density(self, replayed: Replayed) -> Tensor:
        """Σ_i w_i log π(i), π over the whole vocabulary; or the Gumbel-softmax density of w."""
        weights, ids = replayed.edit.weights, replayed.edit.ids
        if self.density == "exact":
            return densities.concrete(weights, replayed.at(ids), self.tau, densities.distinct(ids))
        log_probs = torch.where(weights > 0.0, replayed.log_probs(replayed.edit.ids), 0.0)
        return (weights * log_probs).sum(dim=-1)
