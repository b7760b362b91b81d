# SPDX-License-Identifier: Apache-2.0
"""Mixture of Inputs: the sampled token blended with its distribution (arXiv 2505.14827)."""

import math
from dataclasses import dataclass

import torch

from perturbations import InputEdit, Proposal, Step, option, register
from perturbations.top_tokens import LikeliestTokens, truncated


@register("moi")
@dataclass(frozen=True, kw_only=True)
class MixtureOfInputs(LikeliestTokens):
    """Feeds the posterior mean of a Dirichlet prior on the likely tokens after seeing the sampled one."""

    paper = "Mixture of Inputs, arXiv 2505.14827"
    samples_text = True

    until: str | None = option(None, "stop for good once this text has been produced; 'none' for never")
    k: int = option(20, "likeliest tokens in the mixture; the paper takes all", low=2)
    beta: float = option(1.0, "β, how much the sampled token counts", low=0.0)
    entropy: str = option(
        "all",
        "the uncertainty H: of all tokens, or of the k likeliest as released",
        choices=("all", "top"),
    )

    def propose(self, step: Step) -> Proposal:
        """w_i = (H p_i + (β + 1 − H) · 1[i = y]) / (β + 1), y the sampled token, H the entropy over its maximum.

        p is renormalised over the k likeliest tokens; y stands first, and again where it is one of them.
        """
        ids, p = truncated(step, self.k, 1.0)
        if self.entropy == "all":
            uncertainty = step.entropy() / math.log(step.logits.shape[-1])
        else:
            uncertainty = torch.special.entr(p).sum(dim=-1) / math.log(self.k)
        h = uncertainty.clamp(0.0, 1.0).unsqueeze(-1)
        weights = torch.cat([self.beta + 1.0 - h, h * p], dim=-1) / (self.beta + 1.0)
        return Proposal(InputEdit(torch.cat([step.sampled.unsqueeze(-1), ids], dim=-1), weights), step.sampled)
