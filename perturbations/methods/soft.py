# SPDX-License-Identifier: Apache-2.0
"""Soft Thinking: the deterministic mixture of the most likely tokens (arXiv 2505.15778)."""

from __future__ import annotations

from dataclasses import dataclass

from perturbations.base import Proposal
from perturbations.edit import InputEdit
from perturbations.options import option
from perturbations.registry import register
from perturbations.step import Step
from perturbations.top_tokens import TopTokens


@register("soft")
@dataclass(frozen=True, kw_only=True)
class Soft(TopTokens):
    """Feeds the probability-weighted mixture of the top-k tokens; no randomness of its own."""

    paper = "Soft Thinking, arXiv 2505.15778"

    top_p: float = option(1.0, "keep the most likely tokens that hold this share", above=0.0, high=1.0)

    def propose(self, step: Step) -> Proposal:
        """w_i = p_i / Σ_j p_j over the k likeliest tokens, after top-p; the text keeps the sampled token."""
        ids, probabilities = self.top(step)
        return Proposal(InputEdit(ids, probabilities), step.sampled)

    @property
    def samples_text(self) -> bool:
        """Only the input is a mixture."""
        return True
