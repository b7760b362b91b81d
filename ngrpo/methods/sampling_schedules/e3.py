# SPDX-License-Identifier: Apache-2.0
"""E3: one temperature for each step of training, which holds the rollouts' entropy (arXiv 2505.18573)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ngrpo.methods.sampling_schedules import register
from ngrpo.methods.sampling_schedules.base import PastStep, Run, SamplingSchedule
from perturbations import option

# Entropies below this count as this: the rule takes logarithms of them.
_LEAST_ENTROPY = 1e-4


@register("e3")
@dataclass(frozen=True, kw_only=True)
class E3(SamplingSchedule):
    """E3: hotter where the policy's entropy has fallen below that of the first step, colder where it is above."""

    paper = "E3, arXiv 2505.18573"

    annealing: bool = option(True, "let the target fall towards the end of the run")
    share: float = option(0.4, "the last part of the run, in which it falls", above=0.0, high=1.0)
    end: float = option(0.9, "f: at the end the target is f times the first step's entropy", above=0.0, high=1.0)
    most: float = option(2.0, "the temperature goes no higher than this times the one asked for", low=1.0)
    least: float = option(0.1, "… and no lower than this times the one asked for", above=0.0, high=1.0)

    def factor_of_step(self, past: Sequence[PastStep], run: Run) -> float:
        """τ ← τ (1 + τ ln(H* / H) / (ln V + ln ln V)), H* = H_0 · ((1 − f) · ½(1 + cos πx) + f)."""
        if not past:
            return 1.0
        first, last = (max(one.entropy, _LEAST_ENTROPY) for one in (past[0], past[-1]))
        target = first * self._share_of_first(len(past), run.steps)
        slowness = math.log(run.vocabulary) + math.log(math.log(run.vocabulary))
        change = run.temperature * past[-1].factor * math.log(target / last) / slowness
        return min(max(past[-1].factor * (1.0 + change), self.least), self.most)

    def _share_of_first(self, past: int, steps: int) -> float:
        start = steps - int(self.share * steps)
        # As in the release, the target that a step is compared with was set after the step before it.
        since = past - 1 - start
        if not self.annealing or since <= 0:
            return 1.0
        x = min(since / (steps - start), 1.0)
        return (1.0 - self.end) * 0.5 * (1.0 + math.cos(math.pi * x)) + self.end
