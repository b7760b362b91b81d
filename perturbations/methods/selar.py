# SPDX-License-Identifier: Apache-2.0
"""SeLaR: selective latent reasoning, a mixture pushed away from the likeliest token (arXiv 2604.08299)."""

import math
from dataclasses import dataclass, replace

import torch

from perturbations import InputEdit, Proposal, Step, option, register
from perturbations.top_tokens import LikeliestTokens, truncated


@register("selar")
@dataclass(frozen=True, kw_only=True)
class SeLaR(LikeliestTokens):
    """Mixes the k likeliest tokens where they are nearly equally likely, away from the first; elsewhere the token."""

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
        ids = torch.where(p > 0.0, ids, ids[:, :1])
        h = (torch.special.entr(p).sum(dim=-1, keepdim=True) / math.log(self.k)).clamp(0.0, 1.0)
        mixed = (1.0 + h) * p
        mixed[:, :1] -= h
        acts = h >= self.threshold
        # The sampled token first: with weight 1 where nothing is mixed, else with weight 0.
        weights = torch.cat([(~acts).float(), torch.where(acts, mixed, 0.0)], dim=-1)
        ids = torch.cat([step.sampled.unsqueeze(-1), ids], dim=-1)
        return Proposal(InputEdit(ids, weights), step.sampled, acts.squeeze(-1))
