# SPDX-License-Identifier: Apache-2.0
"""Mixtures of likely tokens without noise: Soft Thinking, Mixture of Inputs, SeLaR."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perturbations import InputEdit, Proposal, Step, option, register
from perturbations.top_tokens import LikeliestTokens, TopTokens, truncated


@register("soft")
@dataclass(frozen=True, kw_only=True)
class Soft(TopTokens):
    """Feeds the probability-weighted mixture of the top-k tokens; no randomness of its own."""

    paper = "Soft Thinking, arXiv 2505.15778"
    samples_text = True

    top_p: float = option(1.0, "keep the most likely tokens that hold this share", above=0.0, high=1.0)

    def propose(self, step: Step) -> Proposal:
        """w_i = p_i / Σ_j p_j over the k likeliest tokens, after top-p; the text keeps the sampled token."""
        ids, weights = self.top(step)
        return Proposal(InputEdit(ids, weights), step.sampled)


def _normalised(entropy: Tensor, tokens: int) -> Tensor:
    """An entropy over its maximum, (B,) to (B, 1) in [0, 1]."""
    return (entropy / math.log(tokens)).clamp(0.0, 1.0).unsqueeze(-1)


@register("moi")
@dataclass(frozen=True, kw_only=True)
class MixtureOfInputs(LikeliestTokens):
    """Feeds the posterior mean of a Dirichlet prior on the likely tokens after seeing the sampled one."""

    paper = "Mixture of Inputs, arXiv 2505.14827"
    samples_text = True

    until: str | None = option(None, "stop perturbing once the response has this text; 'none': never stop")
    k: int = option(20, "likeliest tokens in the mixture; the paper takes all", low=2)
    beta: float = option(1.0, "β, how much the sampled token counts", low=0.0)
    entropy: str = option("all", "entropy H: of all tokens, or of the k likeliest as released", choices=("all", "top"))

    def propose(self, step: Step) -> Proposal:
        """w_i = (H p_i + (β + 1 − H) · 1[i = y]) / (β + 1), y the sampled token, H the entropy over its maximum.

        p is renormalised over the k likeliest tokens; y is first, and again where it is one of them.
        """
        ids, p = truncated(step, self.k, 1.0)
        if self.entropy == "all":
            h = _normalised(step.entropy(), step.logits.shape[-1])
        else:
            h = _normalised(torch.special.entr(p).sum(dim=-1), tokens=self.k)
        ids = torch.cat([step.sampled.unsqueeze(-1), ids], dim=-1)  # (B, 1 + k)
        weights = torch.cat([self.beta + 1.0 - h, h * p], dim=-1) / (self.beta + 1.0)
        return Proposal(InputEdit(ids, weights), step.sampled)


@register("selar")
@dataclass(frozen=True, kw_only=True)
class SeLaR(LikeliestTokens):
    """Where the k likeliest tokens are about equally likely, feeds their mixture, pushed away from the likeliest."""

    paper = "SeLaR, arXiv 2604.08299"
    mixture = "affine"
    samples_text = True

    k: int = option(3, "number of likely tokens", low=2)
    filtered: bool = option(False, "p after the request's top-k, top-p and min-p, as released, and not before them")
    threshold: float = option(0.5, "τ: mixed where the entropy over its maximum is at least this", low=0.0, high=1.0)

    def propose(self, step: Step) -> Proposal:
        """H ≥ τ: w_v = (1 + H) p_v − H · 1[v likeliest], with p renormalised over the k likeliest and H over ln k."""
        if self.filtered and step.drawable is not None:
            step = replace(step, logits=step.drawable, summary=None)
        ids, p = truncated(step, self.k, 1.0)
        h = _normalised(torch.special.entr(p).sum(dim=-1), self.k)  # (B, 1)
        mixture = (1.0 + h) * p
        mixture[:, :1] -= h
        acts = h >= self.threshold  # (B, 1)
        # The sampled token comes first: with weight 0 where the mixture is fed, with weight 1 elsewhere.
        weights = torch.cat([(~acts).float(), torch.where(acts, mixture, 0.0)], dim=-1)
        ids = torch.cat([step.sampled.unsqueeze(-1), ids], dim=-1)
        return Proposal(InputEdit(ids, weights), step.sampled, acts.squeeze(-1))
