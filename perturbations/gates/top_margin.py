# SPDX-License-Identifier: Apache-2.0
"""A gate that opens where the policy wavers between two tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations.gates.base import Gate
from perturbations.options import option
from perturbations.registry import register_gate
from perturbations.step import GateStep


@register_gate("top_margin")
@dataclass(frozen=True, kw_only=True)
class TopMargin(Gate):
    """Open where p(likeliest) - p(second likeliest) is at most the margin, at the sampling temperature."""

    margin: float = option(0.2, "largest difference of the two largest probabilities", low=0.0, high=1.0)

    def open(self, step: GateStep) -> Tensor:
        """exp(z₁ - log Z) - exp(z₂ - log Z) ≤ margin, (B,) bool."""
        best = step.top(2)[0]
        p = torch.exp(best - step.log_total().unsqueeze(-1))
        return p[:, 0] - p[:, 1] <= self.margin
