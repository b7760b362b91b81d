# SPDX-License-Identifier: Apache-2.0
"""EDT, entropy-based dynamic temperature: cold where the model is sure (arXiv 2403.14541)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ngrpo.methods.sampling_schedules import register
from ngrpo.methods.sampling_schedules.base import NextTokens, SamplingSchedule
from perturbations.options import option


@register("edt")
@dataclass(frozen=True, kw_only=True)
class EDT(SamplingSchedule):
    """EDT: the lower the entropy at a position, the lower the temperature there."""

    paper = "EDT, arXiv 2403.14541"

    t_0: float = option(1.0, "T_0, the temperature where the entropy is high", above=0.0)
    base: float = option(0.8, "N; at 1 nothing changes", above=0.0, high=1.0)
    theta: float = option(0.1, "θ, how fast the temperature falls with the entropy", above=0.0)
    least: float = option(0.1, "the lowest temperature", above=0.0)

    def factor(self, at: NextTokens) -> Tensor:
        """max(T_0 · N^(θ / H), least), H the entropy of the model's distribution in nats; at H = 0, its limit."""
        return (self.t_0 * self.base ** (self.theta / at.entropies())).clamp_min(self.least)
