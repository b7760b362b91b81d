# SPDX-License-Identifier: Apache-2.0
"""The entropy bonus on advantages (Cheng et al., "Reasoning with Exploration", arXiv 2506.14758)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.methods.credits import register
from ngrpo.methods.credits.base import Credit, StepTokens
from perturbations.options import option


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
