# SPDX-License-Identifier: Apache-2.0
"""EAD, exploratory annealed decoding: hot at an answer's beginning, cold at its end (arXiv 2510.05251)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.methods.sampling_schedules import register
from ngrpo.methods.sampling_schedules.base import NextTokens, SamplingSchedule
from perturbations.errors import UsageError
from perturbations.options import option

_SLOWEST = 40000.0
# Those of t / d at s = 0; the paper's own d_0 is not known here, so it takes the release's 20 · 25.
_D_0 = {"paper": 500.0, "released": 25.0}
_PER_D = {"paper": 1.0, "released": 20.0}
# The release counts training steps from 1, so its first one has d = 30 and begins with exp(t / 600).
_FIRST_STEP = {"paper": 0, "released": 1}


@register("ead")
@dataclass(frozen=True, kw_only=True)
class EAD(SamplingSchedule):
    """EAD: each answer begins hot and cools down, later the further the training is."""

    paper = "EAD, arXiv 2510.05251"

    tau_max: float = option(1.2, "τ_max, the temperature after the first c tokens", above=0.0)
    tau_min: float = option(0.1, "τ_min, the lowest temperature", above=0.0)
    c: int = option(10, "tokens at the beginning that are drawn at temperature 1", low=0)
    d_0: float | None = option(None, "how slowly it cools at s = 0; none: 500, or 25 as released", above=0.0)
    growth: float = option(5.0, "by which d grows from step to step", low=0.0)
    variant: str = option(
        "paper", "the exponent: t / d, or t / (20 d) as released, with s from 1", choices=("paper", "released")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tau_min > self.tau_max:
            raise UsageError(
                f"sampling schedule option tau_min={self.tau_min}: must be at most tau_max={self.tau_max}."
            )

    def factor(self, at: NextTokens) -> Tensor:
        """1 for t < c, then max(1 + τ_max − exp(t / d_s), τ_min), d_s = min(d_0 + 5 s, 40000).

        The first training step is s = 0, and s = 1 as released.
        """
        first = _D_0[self.variant] if self.d_0 is None else self.d_0
        step = (at.step + _FIRST_STEP[self.variant]).float()
        d = (first + self.growth * step).clamp_max(_SLOWEST) * _PER_D[self.variant]
        cooling = (1.0 + self.tau_max - (at.generated / d).exp()).clamp_min(self.tau_min)
        return torch.where(at.generated < self.c, 1.0, cooling)
