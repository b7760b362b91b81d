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


def create_quietly(name: str, **options: Any) -> Perturbation:
    """A perturbation without the warning about a greedy text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of greedy text: these tests have a reward for it
        return create(name, **options)


CASES = {
    "gaussian-soft-density": create_quietly("gaussian", density="gaussian", base="soft", k=3, sigma=0.6),
    "gaussian-token-density": create_quietly("gaussian", density="gaussian", base="token", sigma=0.6),
    "gaussian-fuzzy-density": create_quietly("gaussian", density="gaussian", base="fuzzy", sigma=0.6),
    "gaussian-soft": create_quietly("gaussian", base="soft", k=3, sigma=0.6),
    "gaussian-token": create_quietly("gaussian", sigma=0.6),
    "gaussian-fuzzy": create_quietly("gaussian", base="fuzzy", sigma=0.6),
    "gumbel-density": create_quietly("gumbel", density="gumbel", k=3, top_p=0.845, tau=0.3),
    "gumbel-exact": create_quietly("gumbel", density="exact", k=3, top_p=0.845, tau=0.3),
    "gumbel": create_quietly("gumbel", k=3, top_p=0.8, tau=0.3, input_gradient="full"),
    "dirichlet-density": create_quietly("dirichlet", density="dirichlet", k=3, top_p=0.845, alpha=6.0),
    "dirichlet-exact": create_quietly("dirichlet", density="exact", k=3, top_p=0.845, alpha=6.0),
    "dirichlet": create_quietly("dirichlet", k=3, top_p=0.8, alpha=6.0),
    "normal-density": create_quietly("normal", density="normal", k=3, top_p=0.845),
    "normal": create_quietly("normal", k=3, top_p=0.8),
    "neighbor": create_quietly("neighbor", k=2),
    "neighbor-released": create_quietly("neighbor", k=2, variant="released", space="input"),
    "orthogonal": create_quietly("orthogonal", k=2),
    "soft": create_quietly("soft", k=3),
    "soft-constant": create_quietly("soft", k=3, input_gradient="none"),
    "hrpo": create_quietly("hrpo", k=V),
    "hrpo-constant": create_quietly("hrpo", k=V, input_gradient="none"),
    "tarpo-density": create_quietly("tarpo", k=3, bias=0.5, decision_weight=1.0),
    "tarpo-released": create_quietly("tarpo", k=3, bias=0.5),
    "tarpo": create_quietly("tarpo", k=3, bias=0.5, density="token"),
    "multiplex-density": create_quietly("multiplex", density="joint"),
    "multiplex": create_quietly("multiplex", k=2, weights="average"),
    "multiplex-distinct": create_quietly("multiplex", k=2, draws="distinct"),
    "moi": create_quietly("moi", k=3, beta=0.5),
    "selar": create_quietly("selar", threshold=0.85),
    "cuts": create_quietly("cuts", k=3, delta=0.15, burn_in=0),
    "lepo-density": create_quietly("lepo", density="lepo", top_p=0.8, k=V),
    "lepo-exact": create_quietly("lepo", density="exact", top_p=0.8, k=V),
    "lepo": create_quietly("lepo", top_p=0.8, k=3),
    "latent-density": create_quietly("latent", density="latent", k=2, top_p=0.8),
    "latent-exact": create_quietly("latent", density="exact", k=2, top_p=0.8),
    "latent-exact-through": create_quietly("latent", density="exact", k=2, top_p=0.8, input_gradient="full"),
    "latent": create_quietly("latent", k=2, top_p=0.8),
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
PARAMETERS = [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES]


def densities_of(name: str) -> tuple[str, ...]:
    """The choices of a perturbation's density."""
    for field in fields(get(name)):
        if field.name == "density":
            return field.metadata["choices"]
    return ("token",)


def test_every_perturbation_and_density_is_here() -> None:
    in_tree = {name for name, source in available().items() if source.startswith("perturbations.methods")}
    in_tree.remove("none")
    assert {perturbation.name for perturbation in CASES.values()} == in_tree

    densities_by_name: dict[str, set[str]] = {name: set() for name in in_tree}
    for perturbation in CASES.values():
        density = getattr(perturbation, "density", "token")
        densities_by_name[perturbation.name].add(density)
    for name in in_tree:
        assert set(densities_of(name)) <= densities_by_name[name]


def directions(true: Tensor) -> Tensor:
    """The true gradient's direction and two fixed ones across it, (3, size); (2, 2) for two numbers."""
    generator = torch.Generator().manual_seed(5)
    fixed = torch.randn(2, true.numel(), generator=generator, dtype=torch.float64)
    basis, _ = torch.linalg.qr(torch.cat([true.view(1, -1), fixed]).T)
    sign = torch.sign(basis.T[:1] @ true)  # qr() may turn the first direction
    return basis.T * sign.view(1, 1)


def variance_of_mean(samples: Tensor) -> Tensor:
    """The variance of the mean of independent samples, (n, axes) to (axes,); 0 for a single one, which is exact."""
    if len(samples) == 1:
        return torch.zeros(samples.shape[1], dtype=samples.dtype)
    return samples.var(0) / len(samples)


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.more)], ids=["bandit", "two-steps"])
@pytest.mark.parametrize("case", PARAMETERS)
def test_the_gradient_is_the_true_one(case: str, steps: int) -> None:
    perturbation = CASES[case]
    estimated = estimate(perturbation, steps)
    true = truth(perturbation, steps)
    assert estimated.keys() == true.keys()
    for name in estimated:
        estimated_gradients = estimated[name].flatten(1)  # (batches, size)
        true_gradients = true[name].flatten(1)  # (1 or batches, size)
        is_zero = case in NO_GRADIENT.get((steps, name), ())
        true_mean = true_gradients.mean(0)
        axes = directions(torch.ones_like(true_mean) if is_zero else true_mean)

        estimated_shares = estimated_gradients @ axes.T  # (batches, axes)
        true_shares = true_gradients @ axes.T
        standard_error = (variance_of_mean(estimated_shares) + variance_of_mean(true_shares)).sqrt() + 1e-5
        expected = true_shares.mean(0)
        if is_zero:
            expected = torch.zeros_like(expected)
        else:
            length = expected[0] / standard_error[0]
            assert length > 10, f"{name}: too few samples to tell"
        deviation = (estimated_shares.mean(0) - expected) / standard_error
        assert deviation.abs().max() < 3.0, f"{name}: {deviation.tolist()} standard errors away"
