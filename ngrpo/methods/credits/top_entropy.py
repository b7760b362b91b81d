# SPDX-License-Identifier: Apache-2.0
"""The 80/20 rule: only the tokens at which the policy was most uncertain are trained (arXiv 2506.01939)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.methods.credits import register
from ngrpo.methods.credits.base import Credit, StepTokens
from perturbations.options import option


@register("top_entropy")
@dataclass(frozen=True, kw_only=True)
class TopEntropy(Credit):
    """80/20: tokens outside the top fraction by entropy, over the whole step, get no advantage."""

    paper = "Beyond the 80/20 Rule, arXiv 2506.01939"
    keeps_sums = True

    fraction: float = option(0.2, "ρ, the share of tokens that keep their advantage", above=0.0, high=1.0)

    def formula(self, tokens: StepTokens) -> Tensor:
        """A · 1[H ≥ τ_ρ], τ_ρ the smallest entropy among the top ⌈ρ N⌉ tokens of the step."""
        advantages, entropies = tokens.advantages, tokens.entropies
        if not len(entropies):
            return advantages
        threshold = entropies.topk(math.ceil(self.fraction * len(entropies))).values[-1]
        return torch.where(entropies >= threshold, advantages, 0.0)
