# SPDX-License-Identifier: Apache-2.0
"""CUTS, constrained uniform top-K sampling: one of the confident candidates, each as likely (arXiv 2604.18493)."""

from dataclasses import dataclass

import torch

from perturbations import Proposal, Step, option, register
from perturbations.edit import one_hot
from perturbations.top_tokens import LikeliestTokens


@register("cuts")
@dataclass(frozen=True, kw_only=True)
class CUTS(LikeliestTokens):
    """Draws uniformly among the k likeliest tokens with enough probability; the token drawn is fed and written."""

    paper = "CUTS, arXiv 2604.18493"
    zero_mean_score = False  # the token is drawn uniformly

    k: int = option(5, "K, number of likely tokens", low=1)
    delta: float = option(0.03, "δ, the least probability of a candidate at temperature 1", low=0.0, high=1.0)
    burn_in: int = option(5, "T_warm, tokens at an answer's beginning that are drawn as usual", low=0)

    def propose(self, step: Step) -> Proposal:
        """Uniform over S = {v among the k likeliest: p(v) ≥ δ}, over all k where S is empty.

        What the request's top-k, top-p and min-p exclude is not drawn.
        """
        scale = step.temperature.unsqueeze(-1)
        values, ids = step.top(self.k)
        confident = (values * scale - step.log_total(scale).unsqueeze(-1)).exp() >= self.delta
        confident |= ~confident.any(dim=-1, keepdim=True)
        if step.drawable is not None:
            confident &= step.drawable.gather(-1, ids) > -torch.inf
        # A draw of each token's own: the largest is any of the candidates with the same probability.
        races = torch.where(confident, step.uniform(ids), -1.0)
        winners = ids.gather(-1, races.argmax(dim=-1, keepdim=True))
        token = torch.where(confident.any(dim=-1), winners.squeeze(-1), step.sampled)
        return Proposal(one_hot(token), token)
