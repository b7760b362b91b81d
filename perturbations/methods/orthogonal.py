# SPDX-License-Identifier: Apache-2.0
"""Orthogonal noise: a baseline in N-GRPO's release (arXiv 2606.10768)."""

from dataclasses import dataclass

import torch

from perturbations import InputEdit, Proposal, Step, option, register
from perturbations.top_tokens import LikeliestTokens


@register("orthogonal")
@dataclass(frozen=True, kw_only=True)
class Orthogonal(LikeliestTokens):
    """Moves the most likely token's embedding along the other likely ones, orthogonally to itself."""

    paper = "N-GRPO (release), arXiv 2606.10768"
    mixture = "free"

    rate: float = option(0.1, "probability that a position is perturbed (the gate)", low=0.0, high=1.0)
    k: int = option(5, "number of likely tokens, the anchor included", low=2)
    realization: str = option("sampled", "the token in the text", choices=("sampled", "anchor"))

    def propose(self, step: Step) -> Proposal:
        """e' = E[a] + Σ_j n_j o_j/‖o_j‖ with n_j ~ N(0, (w_j ‖o_j‖)²), o_j = E[c_j] − ⟨E[c_j], E[a]⟩/‖E[a]‖² E[a].

        n_j = ε_j w_j ‖o_j‖ cancels the norm: e' = E[a] + Σ_j ε_j w_j o_j, which is a mixture of E[a] and the E[c_j].
        w is the softmax of z̃ over the candidates without the anchor.
        """
        values, ids = step.top(self.k)
        shares = torch.nan_to_num(torch.softmax(values[:, 1:], dim=-1))  # NaN where only one token is possible
        noise = step.normal(ids[:, 1:]) * shares
        vectors = step.embeddings.lookup(ids).float()
        anchor, others = vectors[:, :1], vectors[:, 1:]
        norm = anchor.square().sum(dim=-1).clamp_min(1e-12)
        along = (others * anchor).sum(dim=-1) / norm
        weights = torch.cat([1.0 - (noise * along).sum(dim=-1, keepdim=True), noise], dim=-1)
        tokens = ids[:, 0] if self.realization == "anchor" else step.sampled
        return Proposal(InputEdit(ids, weights), tokens)

    @property
    def samples_text(self) -> bool:
        """Unless the text keeps the anchor."""
        return self.realization == "sampled"
