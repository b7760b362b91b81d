# SPDX-License-Identifier: Apache-2.0
"""Credit by entropy: "Reasoning with Exploration" (arXiv 2506.14758), and the 80/20 rule (arXiv 2506.01939)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.methods.credits import register
from ngrpo.methods.credits.base import Credit, StepTokens
from perturbations import option


@register("entropy_bonus")
@dataclass(frozen=True, kw_only=True)
class EntropyBonus(Credit):
    """A token gets a bonus for the policy's uncertainty where it was drawn, at most a share of its advantage's size."""

    paper = "Reasoning with Exploration, arXiv 2506.14758"

    alpha: float = option(0.4, "α, the bonus for each nat of entropy", low=0.0)
    kappa: float = option(2.0, "κ: the bonus is at most |A| / κ, so that it turns no sign", above=1.0)

    def formula(self, tokens: StepTokens) -> Tensor:
        """A + min(α H, |A| / κ)."""
        advantages = tokens.advantages
        return advantages + torch.minimum(self.alpha * tokens.entropies, advantages.abs() / self.kappa)


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
