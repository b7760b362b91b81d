# SPDX-License-Identifier: Apache-2.0
"""A penalty that keeps unlikely tokens of wrong responses, unless they are noise: `lp_reg`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.methods.credits import register
from ngrpo.methods.credits.base import Credit, LossTokens, StepTokens
from perturbations import option


@register("lp_reg")
@dataclass(frozen=True, kw_only=True)
class LpReg(Credit):
    """The least likely tokens with A < 0 have a KL penalty towards the policy without its noise tokens."""

    paper = "Lp-Reg, arXiv 2510.03222"
    reads_log_probs = True

    share: float = option(0.01, "ρ, the share of tokens that count as unlikely", above=0.0, high=1.0)
    kappa: float = option(
        0.02, "κ: a token is noise below this share of the likeliest one's probability", low=0.0, high=1.0
    )
    beta: float = option(1.0, "β, the penalty's weight", low=0.0)

    def formula(self, tokens: StepTokens) -> Tensor:
        """A: the penalty is a loss of its own."""
        return tokens.advantages

    def marks(self, tokens: StepTokens) -> Tensor:
        """A < 0 and π_old(y) ≤ δ, the largest probability among the least likely ⌈ρ N⌉ tokens of the training step."""
        log_probs = tokens.log_probs
        if not len(log_probs):
            return torch.zeros_like(log_probs, dtype=torch.bool)
        threshold = log_probs.topk(math.ceil(self.share * len(log_probs)), largest=False).values[-1]
        return (log_probs <= threshold) & (tokens.advantages < 0.0)

    def marked_loss(self, tokens: LossTokens, marked: Tensor, log_ratio: Tensor) -> Tensor:
        """β (q / π − 1 − log(q / π)) at the token y, 0 where y is noise, which estimates β KL(q ‖ π) by its gradient.

        q = sg(π / Z) of tokens with π ≥ κ max π; Z is the sum of their probabilities. Both are at the sampling
        temperature, by the policy of the update. The gradient is β (1 − 1 / Z) ∇log π(y).
        """
        known = tokens.by_blocks(tokens.rows[marked], self._known)
        mass, least = known[:, 0], known[:, 1]
        log_probs = tokens.log_probs[marked]
        log_quotient = log_probs.detach() - mass.log() - log_probs
        kept = log_probs.detach().exp() >= least
        return self.beta * torch.where(kept, log_quotient.exp() - 1.0 - log_quotient, 0.0)

    def _known(self, logits: Tensor) -> Tensor:
        """Z and the smallest probability that is no noise, of rows of logits (B, V): (B, 2)."""
        probabilities = logits.softmax(dim=-1)
        least = self.kappa * probabilities.amax(dim=-1, keepdim=True)
        mass = torch.where(probabilities >= least, probabilities, 0.0).sum(dim=-1)
        return torch.stack([mass, least.squeeze(-1)], dim=-1)
