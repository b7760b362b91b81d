# SPDX-License-Identifier: Apache-2.0
"""The formulas of densities against values derived by hand; see test_density_of_records.py for perturbations' own."""

import math

import pytest
import torch
from torch import Tensor

from perturbations import density


def double(*values: float) -> Tensor:
    """One row of numbers in float64."""
    return torch.tensor([values], dtype=torch.float64)


def boolean(*values: bool) -> Tensor:
    """One row of truth values."""
    return torch.tensor([values])


def all_kept(width: int) -> Tensor:
    return torch.ones(1, width, dtype=torch.bool)


# --- Gaussian: STHT -------------------------------------------------------------------------------


def test_gaussian_by_hand() -> None:
    """σ = 2, x - μ = (2, -4): -(4 + 16)/(2·4) = -2.5; the constant is -2 log(2 √(2π)) = -3.224171."""
    sigma = torch.tensor([2.0], dtype=torch.float64)
    log_density = density.gaussian(double(3.0, 1.0), double(1.0, 5.0), sigma)
    constant = -2 * math.log(2 * math.sqrt(2 * math.pi))
    assert log_density.item() == pytest.approx(-2.5 + constant, abs=1e-12)


# --- SofT-GRPO's three ----------------------------------------------------------------------------


def gumbel_scores(probabilities: Tensor, noise: Tensor) -> Tensor:
    """y = log p + g, with the release's 1e-6 inside the logarithm."""
    return (probabilities + 1e-6).log() + noise


def test_gumbel_by_hand() -> None:
    """p = 1/2, 1/4, 1/4 and g = 0, 1, -1: -1, -1 - 1/e, 1 - e. The 1e-6 is in y as well and cancels."""
    p = double(0.5, 0.25, 0.25)
    scores = gumbel_scores(p, noise=double(0.0, 1.0, -1.0))
    log_density = density.gumbel(scores, p, all_kept(3))
    expected = (-1 - 1 / math.e - math.e) / 3
    assert log_density.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("noise", "clamped"),
    [
        (4.0, 3.0),
        (-2.0, -1.5),
        (3.0, 3.0),
        (-1.5, -1.5),
        (2.0, 2.0),
    ],
)
def test_gumbel_clamps_the_noise(noise: float, clamped: float) -> None:
    p = double(1.0)
    log_density = density.gumbel(gumbel_scores(p, double(noise)), p, all_kept(1))
    expected = -clamped - math.exp(-clamped)
    assert log_density.item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("second_probability", "expected"),
    [
        # g = 0 gives -1.
        pytest.param(0.04, -1.0, id="left out"),
        # g = 1 gives -1 - 1/e.
        pytest.param(0.05, (-1.0 - 1.0 - 1 / math.e) / 2, id="counted"),
    ],
)
def test_gumbel_leaves_out_what_the_policy_holds_unlikely(second_probability: float, expected: float) -> None:
    """log p > -3 means p > 0.0498: 0.04 is out, 0.05 is in."""
    p = double(1 - second_probability, second_probability)
    scores = gumbel_scores(p, noise=double(0.0, 1.0))
    log_density = density.gumbel(scores, p, all_kept(2))
    assert log_density.item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("alpha", "p", "draws", "expected"),
    [
        # Shape 1 is the exponential, -γ: -1 and -2.
        pytest.param(
            2.0,
            (0.5, 0.5),
            (1.0, 2.0),
            -1.5,
            id="shape 1",
        ),
        # Shape 2: log γ - γ.
        pytest.param(
            4.0,
            (0.5, 0.5),
            (1.0, math.e),
            (-1 + 1 - math.e) / 2,
            id="shape 2",
        ),
        # Shape 3: 2 log γ - γ - log Γ(3), Γ(3) = 2.
        pytest.param(
            6.0,
            (0.5, 0.5),
            (1.0, 1.0),
            -1 - math.log(2),
            id="shape 3",
        ),
        # -7 is clamped to -5.
        pytest.param(
            2.0,
            (0.5, 0.5),
            (7.0, 1.0),
            (-5 - 1) / 2,
            id="clamped from below",
        ),
        # 10 - log Γ(1/2) is clamped to 3.
        pytest.param(
            1.0,
            (0.5, 0.5),
            (math.exp(-20), 1.0),
            (3 - 1 - 0.5 * math.log(math.pi)) / 2,
            id="clamped from above",
        ),
        # 0.04 is not above 0.05.
        pytest.param(
            1 / 0.96,
            (0.96, 0.04),
            (1.0, 1.0),
            -1.0,
            id="unlikely token left out",
        ),
    ],
)
def test_dirichlet_by_hand(alpha: float, p: tuple, draws: tuple, expected: float) -> None:
    log_density = density.dirichlet(double(*draws).log(), double(*p), alpha, all_kept(2))
    assert log_density.item() == pytest.approx(expected, abs=1e-9)


NORMAL_CONSTANT = 2.076793740  # -log(0.05 √(2π))


@pytest.mark.parametrize(
    ("second_probability", "expected"),
    [
        # Only z = 1 at the first counts: -1/2.
        pytest.param(0.04, -0.5, id="left out"),
        # The second has z = 8, clamped to 3: -9/2.
        pytest.param(0.06, (-0.5 - 4.5) / 2, id="counted"),
    ],
)
def test_normal_leaves_out_what_the_policy_holds_unlikely(second_probability: float, expected: float) -> None:
    """0.04 is not above 0.05, 0.06 is."""
    p = double(1 - second_probability, second_probability)
    draws = p + double(0.05, 0.4)
    log_density = density.normal(draws, p, all_kept(2))
    assert log_density.item() == pytest.approx(expected + NORMAL_CONSTANT, abs=1e-8)


@pytest.mark.parametrize(
    ("distance", "squared_z"),
    [
        (0.0, 0.0),
        (0.05, 1.0),
        (-0.1, 4.0),
        (0.15, 9.0),
        (0.4, 9.0),
    ],
)
def test_normal_by_hand(distance: float, squared_z: float) -> None:
    """-z²/2 - log(0.05 √(2π)), z = (y - p) / 0.05 clamped to ±3; the second token's z is 0."""
    p = double(0.7, 0.3)
    log_density = density.normal(p + double(distance, 0.0), p, all_kept(2))
    expected = -0.5 * squared_z / 2 + NORMAL_CONSTANT
    assert log_density.item() == pytest.approx(expected, abs=1e-8)


# --- exact densities ------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [(0.5, 0.5), (0.9, 0.1)])
def test_gumbel_softmax_weights_integrate_to_1(p: tuple) -> None:
    """With what does not depend on p, Γ(2) τ (w_1 w_2)^(−τ−1), over w_1 in (0, 1); p up to a constant."""
    tau = 0.5
    t = torch.linspace(-60.0, 60.0, 20_001, dtype=torch.float64)
    weights = torch.stack([torch.sigmoid(t), torch.sigmoid(-t)], dim=-1)
    log_p = (3.0 * double(*p)).log().expand_as(weights)
    kept = torch.ones_like(weights, dtype=torch.bool)

    log_density = density.concrete(weights, log_p, tau, kept)
    sum_of_logs = weights.log().sum(-1)
    of_weights = log_density + math.log(tau) - (tau + 1.0) * sum_of_logs
    of_t = of_weights + sum_of_logs  # w_1 = σ(t), so dw_1 = w_1 w_2 dt
    assert torch.trapezoid(of_t.exp(), t).item() == pytest.approx(1.0, abs=1e-6)


def test_gumbel_softmax_weight_that_float32_lost() -> None:
    """P(w_2 < s) = 1 / (1 + (p_2 / p_1) s^−τ): log p + g is then τ log s smaller, a difference of two Gumbels."""
    smallest = torch.finfo(torch.float32).tiny
    tau = 0.1
    log_density = density.concrete(double(1.0, 0.0), double(0.8, 0.2).log(), tau, all_kept(2))
    expected = -math.log1p(0.25 * smallest**-tau)
    assert log_density.item() == pytest.approx(expected, abs=1e-9)


def test_dirichlet_weights_by_hand() -> None:
    """α p = 2, 1 and w = 1/4, 3/4: ln(1/4) − ln Γ(2) − ln Γ(1). A third at p = 0 that was cut takes no part."""
    log_density = density.dirichlet_weights(
        double(0.25, 0.75, 0.0),
        double(2 / 3, 1 / 3, 0.0),
        3.0,
        boolean(True, True, False),
    )
    assert log_density.item() == pytest.approx(math.log(0.25), abs=1e-9)


def test_dirichlet_weights_of_shapes_below_1() -> None:
    """α p = 1/2, 1/2 and w = 1/2, 1/2: −½ ln ½ twice, −2 ln Γ(1/2), where Γ(1/2)² = π."""
    log_density = density.dirichlet_weights(double(0.5, 0.5), double(0.5, 0.5), 1.0, all_kept(2))
    assert log_density.item() == pytest.approx(math.log(2.0) - math.log(math.pi), abs=1e-9)


def test_dirichlet_weight_that_float32_lost() -> None:
    """α p = 0.9, 0.1: P(w_2 < s) · Γ(α)⁻¹, the integral of x^(a−1) below s in logarithms."""
    log_smallest = math.log(torch.finfo(torch.float32).tiny)
    t = torch.linspace(log_smallest - 400.0, log_smallest, 2_000_001, dtype=torch.float64)
    integral = torch.trapezoid((0.1 * t).exp(), t).item()
    expected = math.log(integral) - math.lgamma(0.9) - math.lgamma(0.1)
    log_density = density.dirichlet_weights(double(1.0, 0.0), double(0.9, 0.1), 1.0, all_kept(2))
    assert log_density.item() == pytest.approx(expected, abs=1e-6)


def test_censored_gumbel_by_hand() -> None:
    """F(n) = exp(−exp(−n)): at 0, ln f = −1, ln F = −1, ln(1 − F) = ln(1 − 1/e); at 2, ln F = −e^−2."""
    log_density = density.censored_gumbel(
        noise=double(0.0, 0.0, 0.0, 2.0, 1.0),
        below=boolean(False, True, False, True, False),
        above=boolean(False, False, True, False, True),
        counted=boolean(True, True, True, True, False),
    )
    expected = -1.0 - 1.0 + math.log(1 - 1 / math.e) - math.exp(-2.0)
    assert log_density.item() == pytest.approx(expected, abs=1e-9)


def test_noise_far_beyond_every_draw_has_a_density_and_a_gradient() -> None:
    noise = torch.tensor([[-200.0, 300.0]], requires_grad=True)
    log_density = density.censored_gumbel(
        noise,
        below=boolean(False, False),
        above=boolean(False, True),
        counted=all_kept(2),
    )
    log_density.sum().backward()
    assert log_density.isfinite().all()
    assert noise.grad.isfinite().all()
