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

import warnings
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from perturbations import Perturbation, available, create
from perturbations.registry import get
from tests.support.gradient_problem import V, estimate
from tests.support.gradient_truth import truth


def made(name: str, **options: Any) -> Perturbation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of greedy text: these tests have a reward for it
        return create(name, **options)


CASES = {
    "gaussian-soft-density": made("gaussian", density="gaussian", base="soft", k=3, sigma=0.6),
    "gaussian-token-density": made("gaussian", density="gaussian", base="token", sigma=0.6),
    "gaussian-fuzzy-density": made("gaussian", density="gaussian", base="fuzzy", sigma=0.6),
    "gaussian-soft": made("gaussian", base="soft", k=3, sigma=0.6),
    "gaussian-token": made("gaussian", sigma=0.6),
    "gaussian-fuzzy": made("gaussian", base="fuzzy", sigma=0.6),
    "gumbel-density": made("gumbel", density="gumbel", k=3, top_p=0.845, tau=0.3),
    "gumbel-exact": made("gumbel", density="exact", k=3, top_p=0.845, tau=0.3),
    "gumbel": made("gumbel", k=3, top_p=0.8, tau=0.3, input_gradient="full"),
    "dirichlet-density": made("dirichlet", density="dirichlet", k=3, top_p=0.845, alpha=6.0),
    "dirichlet-exact": made("dirichlet", density="exact", k=3, top_p=0.845, alpha=6.0),
    "dirichlet": made("dirichlet", k=3, top_p=0.8, alpha=6.0),
    "normal-density": made("normal", density="normal", k=3, top_p=0.845),
    "normal": made("normal", k=3, top_p=0.8),
    "neighbor": made("neighbor", k=2),
    "neighbor-released": made("neighbor", k=2, variant="released", space="input"),
    "orthogonal": made("orthogonal", k=2),
    "soft": made("soft", k=3),
    "soft-constant": made("soft", k=3, input_gradient="none"),
    "hrpo": made("hrpo", k=V),
    "hrpo-constant": made("hrpo", k=V, input_gradient="none"),
    "tarpo-density": made("tarpo", k=3, bias=0.5, decision_weight=1.0),
    "tarpo-released": made("tarpo", k=3, bias=0.5),
    "tarpo": made("tarpo", k=3, bias=0.5, density="token"),
    "multiplex-density": made("multiplex", density="joint"),
    "multiplex": made("multiplex", k=2, weights="average"),
    "multiplex-distinct": made("multiplex", k=2, draws="distinct"),
    "moi": made("moi", k=3, beta=0.5),
    "selar": made("selar", threshold=0.85),
    "cuts": made("cuts", k=3, delta=0.15, burn_in=0),
    "lepo-density": made("lepo", density="lepo", top_p=0.8, k=V),
    "lepo-exact": made("lepo", density="exact", top_p=0.8, k=V),
    "lepo": made("lepo", top_p=0.8, k=3),
    "latent-density": made("latent", density="latent", k=2, top_p=0.8),
    "latent-exact": made("latent", density="exact", k=2, top_p=0.8),
    "latent-exact-through": made("latent", density="exact", k=2, top_p=0.8, input_gradient="full"),
    "latent": made("latent", k=2, top_p=0.8),
}

ROUTER = ("weight", "bias_shift")

# Known to be 0: in the bandit nothing follows from the fed input. A fuzzy text is greedy, so there the reward is a
# constant, and a density's score has mean 0; and its mean has no gradient to the logits.
NO_GRADIENT = {
    (1, "embedding.weight"): ("gaussian-fuzzy-density", "lepo-exact"),
    (1, "head"): ("gaussian-fuzzy-density", "lepo-exact"),
    (2, "head"): ("gaussian-fuzzy-density",),
    **{(1, f"perturbation.{name}"): ("hrpo", "hrpo-constant") for name in ("w_r", "w_i", "lambda_shift")},
    **{(1, f"perturbation.head.{name}"): ("tarpo-density", "tarpo-released", "tarpo") for name in ROUTER},
    **{(2, f"perturbation.head.{name}"): ("tarpo",) for name in ROUTER},
}

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
        assert nothing or length > 10, f"{name}: too few samples to tell"
        assert away.abs().max() < 3.0, f"{name}: {away.tolist()} standard errors away"
