# SPDX-License-Identifier: Apache-2.0
"""Gumbel soft-thinking: the rollout and the density of SofT-GRPO (Zheng and Lee, arXiv 2511.06411)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations import InputEdit, Proposal, Step, UsageError, option, register
from perturbations import density as densities
from perturbations.base import Replayed, input_gradient_option
from perturbations.errors import require
from perturbations.top_tokens import TopTokens


@register("gumbel")
@dataclass(frozen=True, kw_only=True)
class Gumbel(TopTokens):
    """Adds Gumbel noise to the log-probabilities of the top-k tokens and feeds their softmax mixture."""

    paper = "SofT-GRPO, arXiv 2511.06411"
    draws_text = True

    tau: float = option(0.1, "temperature of the Gumbel-softmax, τ_g", above=0.0)
    clamp: bool = option(True, "clamp the noise to [-1.5, 3], as the paper does")
    density: str = option(
        "token",
        "what the loss weighs: the token's probability, SofT-GRPO's density of the noise, or its log-density",
        choices=("token", "gumbel", "exact"),
    )
    input_gradient: str = input_gradient_option("none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.density == "gumbel" and not self.clamp:
            raise UsageError(
                "perturbation option clamp=False: density='gumbel' is that of clamped noise, [-1.5, 3]. Leave clamp"
                " at true, or take density='token'."
            )
        if self.density == "gumbel" and self.tau < 0.1:
            raise UsageError(
                f"perturbation option tau={self.tau:g}: must be at least 0.1 (the default) with density='gumbel':"
                " below, float32 weights are too small to hold the noise. Raise it, or take density='token'."
            )

    @property
    def zero_mean_score(self) -> bool:
        """Not of the token: it is drawn from the top-k alone. SofT-GRPO's has a mean of 0.003, for its clamp."""
        return self.has_density

    def propose(self, step: Step) -> Proposal:
        """y_i = log(p_i + 1e-6) + g_i; weights = softmax(y / τ_g); the text takes the largest weight."""
        ids, probabilities = self.top(step)
        noise = step.gumbel(ids)
        if self.clamp:
            noise = noise.clamp(*densities.GUMBEL_RANGE)
        support = probabilities > 0.0
        scores = torch.where(support, (probabilities + densities.LOG_FLOOR).log() + noise, -torch.inf)
        weights = torch.softmax(scores / self.tau, dim=-1)
        tokens = ids.gather(-1, scores.argmax(dim=-1, keepdim=True)).squeeze(-1)
        normalizer = self.tau * torch.logsumexp(scores / self.tau, dim=-1) if self.has_density else None
        return Proposal(InputEdit(ids, weights, normalizer=normalizer), tokens)

    def log_density(self, replayed: Replayed) -> Tensor:
        """Mean over ids with log p_i(θ) > −3 of −g_i(θ) − exp(−g_i(θ)), g_i(θ) = clamp(y_i − log p_i(θ), −1.5, 3).

        y_i = τ_g log w_i + normalizer. A weight that float32 lost stands for a y below −5, whose g is clamped in any
        case. ``exact`` is Σ_i log P(g_i): of clamped noise, and of a lost weight's, the bound alone is known.
        """
        edit, distinct = replayed.edit, densities.distinct(replayed.edit.ids)
        smallest = torch.finfo(torch.float32).tiny
        normalizer = require(edit.normalizer, "edit.normalizer")
        scores = self.tau * edit.weights.clamp_min(smallest).log() + normalizer.unsqueeze(-1)
        probabilities = densities.renormalised(replayed.at(edit.ids), distinct)
        gumbels = replayed.gumbel(edit.ids)
        low, high = densities.GUMBEL_RANGE if self.clamp else (-math.inf, math.inf)
        if self.density == "gumbel":
            return densities.gumbel(scores, probabilities, distinct, gumbels)
        noise = scores - (probabilities + densities.LOG_FLOOR).log()
        below = (gumbels <= low) | (edit.weights < smallest)
        return densities.censored_gumbel(noise, below, (gumbels >= high) & ~below, distinct)
