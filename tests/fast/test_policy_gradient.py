# SPDX-License-Identifier: Apache-2.0
"""Each objective's gradient by Monte Carlo, through the real rollout functions, scope, densities and OpenRLHF's loss.

Two problems, a bandit and one of two steps, on a model with V = 4 tokens and D = 2 whose true gradient is known. The
true side shares no code with the product: it writes each method's objective down in float64 and differentiates it,
with the noise integrated by quadrature, or by a larger independent sample (torch's own generators) where the noise has
kinks. What "true" means:

- `gaussian` with its density, and `gaussian` on the token: J itself, E[R], with e' = h(θ) + σ ε (σ as recorded).
- A token that was drawn is part of J. Weights of the mixture, wherever the loss has no density of them, are as
  recorded: the methods hold them fixed by definition, so they belong to the environment. The embeddings that they mix
  are the policy's.
- A text that is the argmax (`neighbor`'s anchor, `fuzzy` with density=token) or that follows from draws, with
  density=token: the methods weigh log π of that token by definition; the objective is E[R · π(x)/π_old(x)].
- `gumbel`, `dirichlet`, `normal`, `lepo` and `latent` with their densities: E[R · ℓ(θ)/ℓ_old] with ℓ as the papers
  write it, with the mixture of the recorded draws through the policy's embeddings.
- `multiplex` with the joint density: J itself over all draws, with the weights as recorded.

Compared are the shares of the embedding and of the output head, each apart: along the true gradient, where a factor
shows, and along two fixed directions across it; within three standard errors. The true gradient is at least ten of
them long, mostly a hundred: a part that is missing or counted twice cannot hide.
"""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from perturbations import available
from perturbations.registry import get
from tests.fast.gradient_cases import CASES, NO_GRADIENT
from tests.fast.gradient_problem import estimate
from tests.fast.gradient_truth import truth

# Where a part that another case has goes another way.
SLOW = ("hrpo-constant", "latent-exact-through", "tarpo", "tarpo-released")


def test_every_perturbation_and_density_is_here() -> None:
    in_tree = {name for name, source in available().items() if source.startswith("perturbations.methods")}
    assert {o.name for o in CASES.values()} == in_tree - {"none"}
    choices = {(o.name, getattr(o, "density", "token")) for o in CASES.values()}
    for name in in_tree - {"none"}:
        densities_of = next((f.metadata["choices"] for f in fields(get(name)) if f.name == "density"), ("token",))
        assert {(name, density) for density in densities_of} <= choices


def directions(true: Tensor) -> Tensor:
    """The true gradient's direction and two fixed ones across it, (3, size)."""
    fixed = torch.randn(2, true.numel(), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    basis, _ = torch.linalg.qr(torch.cat([true.view(1, -1), fixed]).T)
    return basis.T * torch.sign(basis.T[:1] @ true).view(1, 1)


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.more)], ids=["bandit", "two-steps"])
@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES])
def test_the_gradient_is_the_true_one(case: str, steps: int) -> None:
    perturbation = CASES[case]
    estimated, true = estimate(perturbation, steps), truth(perturbation, steps)
    assert estimated.keys() == true.keys()
    for name in estimated:
        got, want = estimated[name].flatten(1), true[name].flatten(1)
        nothing = case in NO_GRADIENT.get((steps, name), ())
        axes = directions(torch.ones_like(want[0]) if nothing else want.mean(0))
        along, goal = got @ axes.T, want @ axes.T
        error = along.var(0) / len(along) + (goal.var(0) / len(goal) if len(goal) > 1 else 0.0)
        error = error.sqrt() + 1e-5
        away = (along.mean(0) - (0.0 if nothing else goal.mean(0))) / error
        length = goal.mean(0)[0] / error[0]
        print(f"{case}, {steps} steps, {name}: {length:.0f} errors long; {away.tolist()}")
        assert nothing or length > 10, f"{name}: too few samples to tell"
        assert away.abs().max() < 3.0, f"{name}: {away.tolist()} standard errors away"


# --- a rollout whose logits are rounded to bfloat16, as the trainer's are not ----------------------------

LEAST = 0.99
# One of each kind of density; the others, and the tokens, which compare nothing with the rollout, now and then.
_ALWAYS = ("gaussian-soft", "gumbel", "dirichlet", "normal", "multiplex", "lepo", "latent")
_SLOW = [name for name in CASES if name not in [f"{each}-density" for each in _ALWAYS]]
_PARAMETERS = [pytest.param(name, marks=pytest.mark.slow) if name in _SLOW else name for name in CASES]


@pytest.mark.more
@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["bandit", "two-steps"])
@pytest.mark.parametrize("case", _PARAMETERS)
def test_rounded_logits_leave_the_gradient_its_direction(case: str, steps: int) -> None:
    """Rounding moves what rollouts with the same random numbers differ by, with it and without; added to the truth."""
    perturbation = CASES[case]
    exact, rounded = estimate(perturbation, steps), estimate(perturbation, steps, True)
    true = truth(perturbation, steps)
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
