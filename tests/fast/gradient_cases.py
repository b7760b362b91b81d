# SPDX-License-Identifier: Apache-2.0
"""The perturbations and densities whose policy gradient is compared with the true one."""

import warnings
from typing import Any

from perturbations.base import Perturbation
from perturbations.registry import create
from tests.fast.gradient_problem import V


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
