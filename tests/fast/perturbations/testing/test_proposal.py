# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on perturbations whose density breaks a promise."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from perturbations import create
from perturbations.base import Perturbation
from perturbations.methods.soft_grpo import Gumbel, Normal
from perturbations.testing import PerturbationError, check_perturbation


def broken(of: type[Perturbation], **parts: Any) -> type[Perturbation]:
    """A perturbation of SofT-GRPO with something replaced."""
    namespace = {"name": "broken", "__module__": __name__, "__qualname__": "Broken", **parts}
    made = dataclass(frozen=True, kw_only=True)(type("Broken", (of,), namespace))
    globals()["Broken"] = made  # the suite makes it again from its address
    return made


density = Gumbel.log_density
BROKEN = {
    "one row for each position": lambda self, seen: density(self, seen)[:-1],
    "torch.float64": lambda self, seen: density(self, seen).double(),
    "must be finite": lambda self, seen: density(self, seen) - torch.inf,
    "has no gradient": lambda self, seen: density(self, seen).detach(),
    "another batch order": lambda self, seen: density(self, seen) - seen.logits[0, 0] * seen.edit.normalizer[0],
    "AttributeError": lambda self, seen: seen.nothing,
    "leaves the graph where there are no positions": (
        lambda self, seen: density(self, seen) if len(seen.rows) else torch.zeros(0)
    ),
    "for no positions raises RuntimeError": lambda self, seen: density(self, seen) + 0.0 * seen.edit.normalizer.max(),
}


@pytest.mark.parametrize("words", BROKEN)
def test_broken_densities_are_caught(words: str) -> None:
    with pytest.raises(PerturbationError, match=words):
        check_perturbation(broken(Gumbel, log_density=BROKEN[words]), density="gumbel")


def test_a_draw_without_what_its_density_needs_is_caught() -> None:
    with pytest.raises(PerturbationError, match=r"log_density\(\) raises ValueError"):
        check_perturbation(broken(Gumbel, propose=lambda self, step: create("gumbel").propose(step)), density="gumbel")


def test_a_density_that_training_would_leave_out_is_caught() -> None:
    with pytest.raises(PerturbationError, match=r"log_density\(\) is never called"):
        check_perturbation(broken(type(create("neighbor")), log_density=density))


def test_negative_weights_need_a_declaration() -> None:
    """The perturbation of the tree passes as `affine`; the same one that says nothing is refused."""
    check_perturbation(Normal)
    with pytest.raises(PerturbationError, match="must not be negative"):
        check_perturbation(broken(Normal, mixture="convex"))
