# SPDX-License-Identifier: Apache-2.0
"""Soft Thinking: the deterministic mixture of the most likely tokens (arXiv 2505.15778)."""

from dataclasses import dataclass

from perturbations import InputEdit, Proposal, Step, option, register
from perturbations.top_tokens import TopTokens


@register("soft")
@dataclass(frozen=True, kw_only=True)
class Soft(TopTokens):
    """Feeds the probability-weighted mixture of the top-k tokens; no randomness of its own."""

    paper = "Soft Thinking, arXiv 2505.15778"
    samples_text = True

    top_p: float = option(1.0, "keep the most likely tokens that hold this share", above=0.0, high=1.0)

    def propose(self, step: Step) -> Proposal:
        """w_i = p_i / Σ_j p_j over the k likeliest tokens, after top-p; the text keeps the sampled token."""
        ids, probabilities = self.top(step)
        return Proposal(InputEdit(ids, probabilities), step.sampled)
