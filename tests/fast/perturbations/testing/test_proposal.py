# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on perturbations whose density breaks a promise."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from perturbations import create
from perturbations.base import Perturbation, Proposal, Replayed, Step
from perturbations.methods.latent import LEPO
from perturbations.methods.soft_grpo import Gumbel, Normal
from perturbations.methods.token_draws import CUTS
from perturbations.testing import PerturbationError, check_perturbation


def broken(perturbation: type[Perturbation], **attributes: Any) -> type[Perturbation]:
    """A subclass with these attributes in place of its own."""
    namespace = {"name": "broken", "__module__": __name__, "__qualname__": "Broken", **attributes}
    made = dataclass(frozen=True, kw_only=True)(type("Broken", (perturbation,), namespace))
    globals()["Broken"] = made  # the suite makes it again from its address
    return made


good_density = Gumbel.log_density
exact_density = LEPO.log_density


def without_the_last_position(self: Gumbel, replayed: Replayed) -> Tensor:
    return good_density(self, replayed)[:-1]


def in_float64(self: Gumbel, replayed: Replayed) -> Tensor:
    return good_density(self, replayed).double()


def infinite(self: Gumbel, replayed: Replayed) -> Tensor:
    return good_density(self, replayed) - torch.inf


def detached(self: Gumbel, replayed: Replayed) -> Tensor:
    return good_density(self, replayed).detach()


def by_the_first_row(self: Gumbel, replayed: Replayed) -> Tensor:
    return good_density(self, replayed) - replayed.logits[0, 0] * replayed.edit.normalizer[0]


def less_the_batch_s_sum(self: Gumbel, replayed: Replayed) -> Tensor:
    density = good_density(self, replayed)
    return density - density.sum().detach()


def of_an_unknown_field(self: Gumbel, replayed: Replayed) -> Tensor:
    return replayed.nothing


def constant_without_positions(self: Gumbel, replayed: Replayed) -> Tensor:
    if len(replayed.rows) == 0:
        return torch.zeros(0)
    return good_density(self, replayed)


def failing_without_positions(self: Gumbel, replayed: Replayed) -> Tensor:
    return good_density(self, replayed) + 0.0 * replayed.edit.normalizer.max()


def of_the_advantages(self: Gumbel, replayed: Replayed) -> Tensor:
    density = good_density(self, replayed)
    return density if replayed.advantages is None else density * replayed.advantages


def with_a_tensor_on_the_cpu(self: Gumbel, replayed: Replayed) -> Tensor:
    return good_density(self, replayed) + torch.zeros(len(replayed.rows))


@pytest.mark.parametrize(
    ("log_density", "message"),
    [
        (without_the_last_position, "one row for each position"),
        (in_float64, "torch.float64"),
        (infinite, "must be finite"),
        (detached, "has no gradient"),
        (by_the_first_row, "another batch order"),
        (less_the_batch_s_sum, "for a row alone"),
        (of_an_unknown_field, "AttributeError"),
        (constant_without_positions, "leaves the graph where there are no positions"),
        (failing_without_positions, "for no positions raises RuntimeError"),
        (with_a_tensor_on_the_cpu, r"log_density\(\) computes with a tensor on the CPU.*device=replayed.logits.device"),
        (of_the_advantages, "with replayed.advantages of 1 and -1 and without any"),
    ],
)
def test_broken_densities_are_caught(log_density: Callable, message: str) -> None:
    with pytest.raises(PerturbationError, match=message):
        check_perturbation(broken(Gumbel, log_density=log_density), density="gumbel")


def negative(self: LEPO, replayed: Replayed) -> Tensor:
    return -exact_density(self, replayed)


def at_temperature_1(self: LEPO, replayed: Replayed) -> Tensor:
    return exact_density(self, dataclasses.replace(replayed, logits=replayed.logits * replayed.temperature))


def of_another_tau(self: LEPO, replayed: Replayed) -> Tensor:
    return exact_density(dataclasses.replace(self, tau=2.0 * self.tau), replayed)


def not_normalised(self: LEPO, replayed: Replayed) -> Tensor:
    return (replayed.edit.weights * replayed.at(replayed.edit.ids).clamp_min(-1e4)).sum(dim=-1)


@pytest.mark.parametrize(
    ("log_density", "message"),
    [
        (negative, "smaller for the policy that drew the inputs"),
        (at_temperature_1, "not the log-density of what propose\\(\\) draws at temperature 0.5"),
        (of_another_tau, "not the log-density of what"),
        (not_normalised, "not the log-density of what"),
    ],
)
def test_a_density_of_other_draws_is_caught(log_density: Callable, message: str) -> None:
    with pytest.raises(PerturbationError, match=message):
        check_perturbation(broken(LEPO, log_density=log_density), density="exact")


def test_text_probabilities_of_another_rule_are_caught() -> None:
    def of_the_policy(self: CUTS, logits: Tensor, temperature: float, left: Tensor) -> Tensor:
        return logits.softmax(dim=-1)

    with pytest.raises(PerturbationError, match=r"text_probabilities\(\) gives .* and propose\(\) writes it into"):
        check_perturbation(broken(CUTS, text_probabilities=of_the_policy))


def test_a_declaration_is_true_or_false() -> None:
    with pytest.raises(PerturbationError, match=r"zero_mean_score is 'no'\. It must be True or False"):
        check_perturbation(broken(LEPO, zero_mean_score="no"), density="exact")


def test_a_density_that_says_it_is_none_may_be_any() -> None:
    attributes: dict[str, Any] = {"log_density": of_another_tau, "zero_mean_score": False}
    check_perturbation(broken(LEPO, **attributes), density="exact")


def test_a_draw_without_what_its_density_needs_is_caught() -> None:
    def propose_without_normalizer(self: Gumbel, step: Step) -> Proposal:
        return create("gumbel").propose(step)

    with pytest.raises(PerturbationError, match=r"log_density\(\) raises ValueError"):
        check_perturbation(broken(Gumbel, propose=propose_without_normalizer), density="gumbel")


def test_a_density_that_training_would_leave_out_is_caught() -> None:
    neighbor = type(create("neighbor"))
    with pytest.raises(PerturbationError, match=r"log_density\(\) is never called"):
        check_perturbation(broken(neighbor, log_density=good_density))


def test_negative_weights_need_a_declaration() -> None:
    """The perturbation of the tree passes as `affine`; the same one that says nothing is refused."""
    check_perturbation(Normal)
    with pytest.raises(PerturbationError, match="must not be negative"):
        check_perturbation(broken(Normal, mixture="convex"))
