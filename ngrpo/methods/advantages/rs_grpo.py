# SPDX-License-Identifier: Apache-2.0
"""RS-GRPO: risk-sensitive advantages, between those of the mean and of the best reward (arXiv 2509.24261)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from ngrpo.machine.upstream.openrlhf_parser import value_of
from ngrpo.methods.advantages import register
from ngrpo.methods.advantages.base import Advantage
from perturbations import option


@register("rs_grpo")
@dataclass(frozen=True, kw_only=True)
class RiskSensitive(Advantage):
    """RS-GRPO: answers count by the exponential of their reward, so that rare good ones count most."""

    paper = "RS-GRPO, arXiv 2509.24261"
    sums_to_zero = True

    beta: float = option(2.0, "β; at 0 the reward less its group's mean, towards ∞ only the best answer", low=0.0)

    def formula(self, rewards: Tensor, counts: Tensor | None) -> Tensor:
        """(exp(β r_i) / mean_j exp(β r_j) − 1) / β, its limit r_i − mean_j r_j at β = 0.

        With it the loss has the gradient of (1/β) log E[exp(β r)], but for a share of 1/G, as the mean is of the same
        answers.
        """
        # From the best reward down, so that nothing overflows and equal rewards give exactly 0.
        below = rewards - rewards.amax(-1, keepdim=True)
        if self.beta == 0.0:
            return below - below.mean(-1, keepdim=True)
        utility = torch.expm1(self.beta * below)
        mean = utility.mean(-1, keepdim=True)
        return (utility - mean) / (1.0 + mean) / self.beta

    def flags(self, flags: Flags) -> dict[str, Default]:
        """Also a wider clip where groups are large: an only right answer has up to (G − 1) / β."""
        added = super().flags(flags)
        size = value_of(flags, "--rollout.n_samples_per_prompt")
        largest = int(size) / self.beta if size.isdecimal() and self.beta > 0.0 else 0.0
        if largest > 10.0:  # OpenRLHF's own
            added["--reward.clip_range"] = (f"-{math.ceil(largest)}", f"{math.ceil(largest)}")
        return added
