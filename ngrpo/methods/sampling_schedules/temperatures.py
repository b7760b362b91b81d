# SPDX-License-Identifier: Apache-2.0
"""Temperatures of tokens (`ead`, `edt`), of responses (`ladder`) and of training steps (`e3`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ngrpo.methods.sampling_schedules import register
from ngrpo.methods.sampling_schedules.base import NextTokens, PastStep, Run, SamplingSchedule
from perturbations import UsageError, option

_LARGEST_D = 40000.0
# The default of d_0. The paper does not state it, so its variant takes the release's 20 · 25.
_D_0 = {"paper": 500.0, "released": 25.0}
# The factor of d in the exponent: t / d, or t / (20 d).
_FACTOR_OF_D = {"paper": 1.0, "released": 20.0}
# The number s of the first training step. With s = 1 and d = 30 the release begins with exp(t / 600).
_FIRST_STEP = {"paper": 0, "released": 1}


@register("ead")
@dataclass(frozen=True, kw_only=True)
class EAD(SamplingSchedule):
    """EAD: each response begins hot and cools down, later the further the training is."""

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
        """1 for t < c, then max(1 + τ_max − exp(t / d_s), τ_min), d_s = min(d_0 + growth · s, 40000).

        The first training step is s = 0. As released it is s = 1, and the exponent is t / (20 d_s).
        """
        d_0 = _D_0[self.variant] if self.d_0 is None else self.d_0
        s = (at.step + _FIRST_STEP[self.variant]).float()
        d_s = (d_0 + self.growth * s).clamp_max(_LARGEST_D) * _FACTOR_OF_D[self.variant]
        cooling = (1.0 + self.tau_max - (at.generated / d_s).exp()).clamp_min(self.tau_min)
        return torch.where(at.generated < self.c, 1.0, cooling)


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
        exponent = self.theta / at.entropies()
        return (self.t_0 * self.base**exponent).clamp_min(self.least)


@register("ladder")
@dataclass(frozen=True, kw_only=True)
class Ladder(SamplingSchedule):
    """Each response to a prompt has a temperature of its own, from the lowest to the highest in equal ratios."""

    least: float = option(
        0.8, "the temperature of a prompt's first response, as a multiple of the requested one", above=0.0
    )
    most: float = option(
        1.25, "the temperature of a prompt's last response, as a multiple of the requested one", above=0.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise UsageError(f"sampling schedule option least={self.least}: must be at most most={self.most}.")

    def factor(self, at: NextTokens) -> Tensor | None:
        """least · (most / least)^(i / (n − 1)) for response i of n, from 0; an only response has the request's."""
        if at.answer is None or at.answers is None:
            return None
        share = at.answer / (at.answers - 1).clamp_min(1)
        temperature = self.least * (self.most / self.least) ** share
        return torch.where(at.answers > 1, temperature, 1.0)


# A smaller entropy counts as this one, since its logarithm is taken.
_LEAST_ENTROPY = 1e-4


@register("e3")
@dataclass(frozen=True, kw_only=True)
class E3(SamplingSchedule):
    """E3: hotter where the policy's entropy has fallen below that of the first step, colder where it is above."""

    paper = "E3, arXiv 2505.18573"

    annealing: bool = option(True, "let the target fall towards the end of the run")
    share: float = option(0.4, "the last part of the run, in which it falls", above=0.0, high=1.0)
    end: float = option(0.9, "f: at the end the target is f times the first step's entropy", above=0.0, high=1.0)
    most: float = option(2.0, "the highest temperature, as a multiple of the requested one", low=1.0)
    least: float = option(0.1, "the lowest temperature, as a multiple of the requested one", above=0.0, high=1.0)

    def factor_of_step(self, past: Sequence[PastStep], run: Run) -> float:
        """τ ← τ (1 + τ ln(H* / H) / (ln V + ln ln V)), H* = H_0 · ((1 − f) · ½(1 + cos πx) + f)."""
        if not past:
            return 1.0
        first_entropy = max(past[0].entropy, _LEAST_ENTROPY)
        last_entropy = max(past[-1].entropy, _LEAST_ENTROPY)
        target = first_entropy
        annealing_start = run.steps - int(self.share * run.steps)
        # As in the release, a step is compared with the target that was set after the step before it.
        steps_since = len(past) - 1 - annealing_start
        if self.annealing and steps_since > 0:
            x = min(steps_since / (run.steps - annealing_start), 1.0)
            target *= (1.0 - self.end) * 0.5 * (1.0 + math.cos(math.pi * x)) + self.end
        slowness = math.log(run.vocabulary) + math.log(math.log(run.vocabulary))
        last_temperature = run.temperature * past[-1].factor  # τ
        change = last_temperature * math.log(target / last_entropy) / slowness
        factor = past[-1].factor * (1.0 + change)
        return min(max(factor, self.least), self.most)
