# SPDX-License-Identifier: Apache-2.0
"""Mixture of Inputs: the sampled token blended with its distribution (arXiv 2505.14827)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from perturbations.base import Perturbation, Proposal
from perturbations.edit import InputEdit
from perturbations.options import option
from perturbations.registry import register
from perturbations.step import Step
from perturbations.top_tokens import check_top_k, truncated


@register("moi")
@dataclass(frozen=True, kw_only=True)
class MixtureOfInputs(Perturbation):
    """Feeds the posterior mean of a Dirichlet prior on the likely tokens after seeing the sampled one."""

    paper = "Mixture of Inputs, arXiv 2505.14827"

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

    @property
    def samples_text(self) -> bool:
        """The token that the mixture has seen."""
        return True

    def check_model(self, vocabulary: int) -> None:
        """k cannot exceed the vocabulary."""
        check_top_k(self.k, vocabulary, low=2)
