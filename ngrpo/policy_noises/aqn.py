# SPDX-License-Identifier: Apache-2.0
"""AQN, QeRL's adaptive quantisation noise: noise on the RMSNorm weights, smaller from stage to stage (2510.11696)."""

from __future__ import annotations

from dataclasses import dataclass

from ngrpo.policy_noises import register
from ngrpo.policy_noises.base import PolicyNoise
from perturbations.options import option

_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


@register("aqn")
@dataclass(frozen=True, kw_only=True)
class AQN(PolicyNoise):
    """QeRL's AQN: noise on the two RMSNorm weights of each block, in stages from none over much to little."""

    paper = "QeRL, arXiv 2510.11696"

    start: float = option(1e-2, "σ_s, of the first stage with noise", above=0.0)
    end: float = option(5e-4, "σ_e, towards which σ falls", above=0.0)
    stages: int = option(10, "K, equal parts of the run; the first is without noise", low=3)
    form: str = option(
        "paper", "the exponent: paper's, whose last stage is above σ_e, or released", choices=("paper", "released")
    )
    steps: int | None = option(None, "training steps that the stages divide; none for those of the run", low=1)

    def selects(self, name: str) -> bool:
        """The weights of the norms before attention and MLP."""
        return name.endswith(_NORMS)

    def scale(self, step: int, steps: int, last: float | None, divergence: float | None) -> float:
        """σ_s (σ_e / σ_s)^((k−1)/(K−1)) in stage k ≥ 1 of 0 … K − 1, and 0 in stage 0; released: /(K−2)."""
        stage = min(step * self.stages // (self.steps or steps), self.stages - 1)
        if stage == 0:
            return 0.0
        last_exponent = self.stages - (1 if self.form == "paper" else 2)
        return self.start * (self.end / self.start) ** ((stage - 1) / last_exponent)
