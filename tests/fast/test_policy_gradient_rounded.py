# SPDX-License-Identifier: Apache-2.0
"""Each objective's gradient where the rollout's logits are rounded to bfloat16 and the trainer's are not.

The problems of test_policy_gradient.py, in which logits follow from the prompt: so rounding is the same in all episodes
and does not average out. What rounding moves is taken from rollouts with the same random numbers, with and without it,
and added to the true gradient: the samples' own noise is in both, and nearly all of it goes.
"""

from __future__ import annotations

import pytest
import torch

from tests.fast.gradient_cases import CASES, NO_GRADIENT
from tests.fast.gradient_problem import estimate
from tests.fast.gradient_truth import truth

LEAST = 0.99
# One of each kind of density; the others, and the tokens, which compare nothing with the rollout, now and then.
_ALWAYS = ("gaussian-soft", "gumbel", "dirichlet", "normal", "multiplex", "lepo", "latent")
_SLOW = [name for name in CASES if name not in [f"{each}-density" for each in _ALWAYS]]
_PARAMETERS = [pytest.param(name, marks=pytest.mark.slow) if name in _SLOW else name for name in CASES]


@pytest.mark.more
@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["bandit", "two-steps"])
@pytest.mark.parametrize("case", _PARAMETERS)
def test_rounded_logits_leave_the_gradient_its_direction(case: str, steps: int) -> None:
    perturbation = CASES[case]
    exact, rounded, true = (
        estimate(perturbation, steps),
        estimate(perturbation, steps, True),
        truth(perturbation, steps),
    )
    for name in exact:
        moved = (rounded[name] - exact[name]).flatten(1)
        away, error = moved.mean(0), (moved.var(0).sum() / len(moved)).sqrt()
        goal = true[name].mean(0).flatten()
        if case in NO_GRADIENT.get((steps, name), ()):
            size = truth(perturbation, 2)[name].mean(0).norm() or truth(perturbation, 1)[name].mean(0).norm()
            assert away.norm() <= 0.1 * size + 4.0 * error, f"{name}: {away.norm()} away from 0; with a goal {size}"
            continue
        cosine = torch.nn.functional.cosine_similarity(goal + away, goal, dim=0).item()
        print(
            f"{case}, {steps} steps, {name}: cosine {cosine:.5f}, moved {away.norm() / goal.norm():.4f} of its length"
            f" ± {error / goal.norm():.4f}"
        )
        assert cosine >= LEAST, f"{name}: a cosine of {cosine:.4f}"
        assert error < 0.1 * goal.norm(), f"{name}: too few samples to tell"
