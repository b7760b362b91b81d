# SPDX-License-Identifier: Apache-2.0
"""Densities: hand-derived values, gradients by finite differences, and what perturbations take from their record."""

import math

import pytest
import torch
from torch import Tensor

from perturbations import density as d
from perturbations import streams
from perturbations.base import Perturbation, Replayed, Step
from perturbations.registry import create
from perturbations.testing.proposal import replayed
from tests.support.density_steps import PERTURBATIONS, D, V, a_step, generator, likely


def double(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


# --- Gaussian: STHT -------------------------------------------------------------------------------


def test_gaussian_by_hand() -> None:
    """σ = 2, x - μ = (2, -4): -(4 + 16)/(2·4) = -2.5; the constant is -2 log(2 √(2π)) = -3.224171."""
    got = d.gaussian(double(3.0, 1.0), double(1.0, 5.0), torch.tensor([2.0], dtype=torch.float64))
    assert got.item() == pytest.approx(-2.5 - 2 * math.log(2 * math.sqrt(2 * math.pi)), abs=1e-12)


# --- SofT-GRPO's three ----------------------------------------------------------------------------


def all_kept(width: int) -> Tensor:
    return torch.ones(1, width, dtype=torch.bool)


def test_gumbel_by_hand() -> None:
    """p = 1/2, 1/4, 1/4 and g = 0, 1, -1: -1, -1 - 1/e, 1 - e.

    The release's 1e-6 inside the logarithm is in y as well and cancels.
    """
    p = double(0.5, 0.25, 0.25)
    y = (p + 1e-6).log() + double(0.0, 1.0, -1.0)
    assert d.gumbel(y, p, all_kept(3)).item() == pytest.approx((-1 - 1 / math.e - math.e) / 3, abs=1e-12)


@pytest.mark.parametrize(("g", "clamped"), [(4.0, 3.0), (-2.0, -1.5), (3.0, 3.0), (-1.5, -1.5), (2.0, 2.0)])
def test_gumbel_clamps_the_noise(g: float, clamped: float) -> None:
    p = double(1.0)
    got = d.gumbel((p + 1e-6).log() + g, p, all_kept(1)).item()
    assert got == pytest.approx(-clamped - math.exp(-clamped), abs=1e-9)


def test_gumbel_leaves_out_what_the_policy_holds_unlikely() -> None:
    """log p > -3 means p > 0.0498: 0.04 is out, 0.05 is in. g = 0 gives -1, g = 1 gives -1 - 1/e."""
    for small, want in ((0.04, -1.0), (0.05, (-1.0 - 1.0 - 1 / math.e) / 2)):
        p = double(1 - small, small)
        assert d.gumbel((p + 1e-6).log() + double(0.0, 1.0), p, all_kept(2)).item() == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize(
    ("alpha", "p", "draws", "want"),
    [
        (2.0, (0.5, 0.5), (1.0, 2.0), -1.5),  # shape 1: the exponential, -γ: -1 and -2
        (4.0, (0.5, 0.5), (1.0, math.e), (-1 + 1 - math.e) / 2),  # shape 2: log γ - γ
        (6.0, (0.5, 0.5), (1.0, 1.0), -1 - math.log(2)),  # shape 3: 2 log γ - γ - log Γ(3), Γ(3) = 2
        (2.0, (0.5, 0.5), (7.0, 1.0), (-5 - 1) / 2),  # -7 is clamped to -5
        (1.0, (0.5, 0.5), (math.exp(-20), 1.0), (3 - 1 - 0.5 * math.log(math.pi)) / 2),  # 10 - log Γ(1/2) to 3
        (1 / 0.96, (0.96, 0.04), (1.0, 1.0), -1.0),  # 0.04 is not above 0.05
    ],
)
def test_dirichlet_by_hand(alpha: float, p: tuple, draws: tuple, want: float) -> None:
    got = d.dirichlet(double(*draws).log(), double(*p), alpha, all_kept(2)).item()
    assert got == pytest.approx(want, abs=1e-9)


def test_normal_leaves_out_what_the_policy_holds_unlikely() -> None:
    """p = 0.96, 0.04: the second is not above 0.05, so z = 1 at the first alone counts: -1/2 + 2.076794."""
    for small, want in ((0.04, -0.5), (0.06, (-0.5 - 4.5) / 2)):
        p = double(1 - small, small)
        got = d.normal(p + double(0.05, 0.4), p, all_kept(2)).item()
        assert got == pytest.approx(want + 2.076793740, abs=1e-8)


@pytest.mark.parametrize(("away", "squared"), [(0.0, 0.0), (0.05, 1.0), (-0.1, 4.0), (0.15, 9.0), (0.4, 9.0)])
def test_normal_by_hand(away: float, squared: float) -> None:
    """-z²/2 - log(0.05 √(2π)), z = (y - p) / 0.05 clamped to ±3; the constant is 2.076794."""
    p = double(0.7, 0.3)
    got = d.normal(p + double(away, 0.0), p, all_kept(2)).item()
    assert got == pytest.approx(-0.5 * squared / 2 + 2.076793740, abs=1e-8)


# --- exact densities ------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [(0.5, 0.5), (0.9, 0.1)])
def test_gumbel_softmax_weights_integrate_to_1(p: tuple) -> None:
    """With what does not depend on p, Γ(2) τ (w_1 w_2)^(−τ−1), over w_1 in (0, 1); p up to a constant."""
    tau, t = 0.5, torch.linspace(-60.0, 60.0, 20_001, dtype=torch.float64)  # w = σ(t)
    weights = torch.stack([torch.sigmoid(t), torch.sigmoid(-t)], dim=-1)
    log_p = (3.0 * double(*p)).log().expand_as(weights)
    found = d.concrete(weights, log_p, tau, torch.ones_like(weights, dtype=torch.bool))
    whole = found + math.log(tau) - (tau + 1.0) * weights.log().sum(-1) + weights.log().sum(-1)  # dw = w_1 w_2 dt
    assert torch.trapezoid(whole.exp(), t).item() == pytest.approx(1.0, abs=1e-6)


def test_gumbel_softmax_weight_that_float32_lost() -> None:
    """P(w_2 < s) = 1 / (1 + (p_2 / p_1) s^−τ): log p + g is then τ log s smaller, a difference of two Gumbels."""
    s, tau = torch.finfo(torch.float32).tiny, 0.1
    got = d.concrete(double(1.0, 0.0), double(0.8, 0.2).log(), tau, all_kept(2)).item()
    assert got == pytest.approx(-math.log1p(0.25 * s**-tau), abs=1e-9)


def test_dirichlet_weights_by_hand() -> None:
    """α p = 2, 1 and w = 1/4, 3/4: ln(1/4) − ln Γ(2) − ln Γ(1). A third at p = 0 that was cut takes no part."""
    kept = torch.tensor([[True, True, False]])
    got = d.dirichlet_weights(double(0.25, 0.75, 0.0), double(2 / 3, 1 / 3, 0.0), 3.0, kept).item()
    assert got == pytest.approx(math.log(0.25), abs=1e-9)
    halves = d.dirichlet_weights(double(0.5, 0.5), double(0.5, 0.5), 1.0, all_kept(2)).item()
    assert halves == pytest.approx(math.log(2.0) - math.log(math.pi), abs=1e-9)  # Γ(1/2)² = π


def test_dirichlet_weight_that_float32_lost() -> None:
    """α p = 0.9, 0.1: P(w_2 < s) · Γ(α)⁻¹, the integral of x^(a−1) below s in logarithms."""
    s = math.log(torch.finfo(torch.float32).tiny)
    t = torch.linspace(s - 400.0, s, 2_000_001, dtype=torch.float64)
    integral = torch.trapezoid((0.1 * t).exp(), t).item()
    want = math.log(integral) - math.lgamma(0.9) - math.lgamma(0.1)
    got = d.dirichlet_weights(double(1.0, 0.0), double(0.9, 0.1), 1.0, all_kept(2)).item()
    assert got == pytest.approx(want, abs=1e-6)


def test_censored_gumbel_by_hand() -> None:
    """F(n) = exp(−exp(−n)): at 0, ln f = −1, ln F = −1, ln(1 − F) = ln(1 − 1/e); at 2, ln F = −e^−2."""
    below, above = torch.tensor([[False, True, False, True, False]]), torch.tensor([[False, False, True, False, True]])
    kept = torch.tensor([[True, True, True, True, False]])
    got = d.censored_gumbel(double(0.0, 0.0, 0.0, 2.0, 1.0), below, above, kept).item()
    assert got == pytest.approx(-2.0 + math.log(1 - 1 / math.e) - math.exp(-2.0), abs=1e-9)


def terms_of(g: Tensor) -> Tensor:
    """log f, log F or log(1 − F) of Gumbel(0, 1), by where g lies."""
    above = math.log(-math.expm1(-math.exp(-3.0)))
    return torch.where(g >= 3.0, above, torch.where(g <= -1.5, -math.exp(1.5), -g - (-g).exp()))


def test_exact_gumbel_in_plain_numbers() -> None:
    """Of 500 positions with 5 candidates some 28 have noise below the clamp, and 120 above."""
    perturbation = create("gumbel", density="exact", top_p=1.0)
    step = a_step(likely(500))
    proposal = perturbation.propose(step)
    keys = streams.keys(step.seeds, step.positions, streams.Stream.WEIGHTS)
    got = perturbation.log_density(replayed(step, proposal, step.logits))
    want = terms_of(streams.gumbel(keys, proposal.edit.ids)).sum(-1)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def test_exact_latent_in_plain_numbers() -> None:
    """The 3 largest of the nucleus, and P(smaller) of each other one, but of none that its bound keeps smaller."""
    perturbation = create("latent", density="exact", k=3)
    step = a_step(likely(300))
    got = perturbation.log_density(replayed(step, perturbation.propose(step), step.logits))
    keys = streams.keys(step.seeds, step.positions, streams.Stream.WEIGHTS)
    want, kept_smaller = [], 0
    for row, z in enumerate(step.logits.double()):
        log_p = torch.log_softmax(z, dim=-1)
        ids = log_p.argsort(descending=True)
        before = log_p[ids].exp().cumsum(0) - log_p[ids].exp()
        ids = ids[(before < 0.95) | (torch.arange(len(ids)) < 3)]
        noise = streams.gumbel(keys[row : row + 1], ids.unsqueeze(0))[0].double()
        y = log_p[ids] + noise.clamp(-1.5, 3.0) + 1.5
        order = y.argsort(descending=True)
        beyond = y[order[2]] - log_p[ids[order[3:]]] - 1.5
        kept_smaller += int((beyond >= 3.0).sum())
        want.append(terms_of(noise[order[:3]]).sum() - (-beyond[beyond < 3.0]).exp().sum())
    assert kept_smaller > 10
    torch.testing.assert_close(got, torch.stack(want).float(), rtol=2e-3, atol=2e-3)


def test_noise_far_beyond_every_draw_has_a_density_and_a_gradient() -> None:
    noise = torch.tensor([[-200.0, 300.0]], requires_grad=True)
    above = torch.tensor([[False, True]])
    value = d.censored_gumbel(noise, torch.zeros_like(above), above, torch.ones_like(above))
    value.sum().backward()
    assert value.isfinite().all() and noise.grad.isfinite().all()


# --- gradients in float64 -------------------------------------------------------------------------


EXACT = [
    create("gumbel", density="exact"),
    create("dirichlet", density="exact", alpha=4.0),
    create("lepo", density="exact", k=4),
    create("latent", density="exact", k=3),
]


@pytest.mark.parametrize("perturbation", [*PERTURBATIONS[:2], *EXACT], ids=lambda o: f"{o.name}-{o.density}")
def test_gradient_of_each_perturbation_reaches_the_logits(perturbation: Perturbation) -> None:
    """The whole of log_density against central differences in float64, at a policy other than the rollout's."""
    step = a_step(likely(6), temperature=0.7)
    proposal = perturbation.propose(step)
    base = step.logits.double() + 0.02 * torch.randn(6, V, dtype=torch.float64, generator=generator(11))
    lookup = step.embeddings.lookup

    def density(logits: Tensor) -> Tensor:
        seen = replayed(step, proposal, logits)
        wide = Replayed(**{**vars(seen), "lookup": lambda ids: lookup(ids).double()})
        return perturbation.log_density(wide)

    assert torch.autograd.gradcheck(density, (base.clone().requires_grad_(),), eps=1e-6, atol=1e-5)
    moved = base.clone().requires_grad_()
    density(moved).sum().backward()
    assert (moved.grad.abs().sum(dim=-1) > 0.0).sum() >= 5


def by_kind(perturbation: Perturbation, step: Step, logits: Tensor) -> Tensor:
    return perturbation.log_density(replayed(step, perturbation.propose(step), logits))


# --- perturbations: what was recorded is enough -------------------------------------------------------


def test_gumbel_with_weights_too_small_for_float32() -> None:
    """p = 1 - 1e-9, 1e-9 and τ = 0.1: the second weight is e^-180 = 0. Its y counts as unlikely, g clamped to -1.5."""
    perturbation = create("gumbel", density="gumbel", k=2, top_p=1.0)
    step = a_step(torch.tensor([[1.0, 1e-9, 0.0]]), seed=10)
    edit = perturbation.propose(step).edit
    assert edit.weights[0, 1] < 1e-38
    half = torch.zeros(1, 3)
    g0 = (edit.normalizer[0] - math.log(0.5 + 1e-6)).clamp(-1.5, 3.0).item()  # y_0 = normalizer, since w_0 = 1
    want = (-g0 - math.exp(-g0) + 1.5 - math.exp(1.5)) / 2
    assert by_kind(perturbation, step, half).item() == pytest.approx(want, abs=1e-4)


def by_hand(name: str, draws: list[float], p: list[float], noise: list[float]) -> float:
    """The paper's mean for one position, in plain numbers: ``draws`` and p(θ) of the ids that top-p left.

    Noise that the rollout clamped stays where it was.
    """
    terms = []
    for y, share, g in zip(draws, p, noise):
        if name == "gumbel" and math.log(share + 1e-6) > -3.0:
            g = min(max(y - math.log(share + 1e-6), -1.5), 3.0) if -1.5 < g < 3.0 else g
            terms.append(-g - math.exp(-g))
        elif name == "dirichlet" and share > 0.05:
            shape = 4.0 * share
            terms.append(min(max((shape - 1.0) * math.log(y) - y - math.lgamma(shape), -5.0), 3.0))
        elif name == "normal" and share > 0.05:
            z = min(max(y - share, -0.15), 0.15) / 0.05
            terms.append(-0.5 * z * z - math.log(0.05 * math.sqrt(2.0 * math.pi)))
    return sum(terms) / len(terms) if terms else 0.0


@pytest.mark.parametrize("moved", [0.0, 0.6], ids=["rollout", "elsewhere"])
@pytest.mark.parametrize("top_p", [0.6, 1.0])
@pytest.mark.parametrize("name", ["gumbel", "dirichlet", "normal"])
def test_draws_come_back_from_the_record(name: str, top_p: float, moved: float) -> None:
    """Against the noise drawn again and the paper's formula in plain numbers; ids cut by top-p have no part in it."""
    perturbation = create(name, density=name, top_p=top_p, **({"alpha": 4.0} if name == "dirichlet" else {}))
    step = a_step(likely(200))
    logits = step.logits + moved * torch.randn(200, V, generator=generator(2))
    got = by_kind(perturbation, step, logits)
    keys = streams.keys(step.seeds, step.positions, streams.Stream.WEIGHTS)
    widths = set()
    for row, z in enumerate(step.logits.double()):
        ids, before, kept = z.argsort(descending=True)[:5], 0.0, []
        for token, share in zip(ids.tolist(), torch.softmax(z[ids], dim=-1).tolist()):
            if before < top_p:
                kept.append(token)
            before += share
        widths.add(len(kept))
        at = torch.tensor([kept])
        old, new = (torch.softmax(values[row].double()[at], dim=-1) for values in (step.logits, logits))
        key, noise = keys[row : row + 1], torch.zeros_like(old)
        if name == "gumbel":
            noise = streams.gumbel(key, at).double().clamp(-1.5, 3.0)
            draws = (old + 1e-6).log() + noise
        elif name == "dirichlet":
            draws = streams.log_gamma(key, at, (4.0 * old).float()).double().exp()
        else:
            draws = new + 0.05 * streams.normal(key, at).double()  # whatever policy asks drew them
        want = by_hand(name, draws[0].tolist(), new[0].tolist(), noise[0].tolist())
        assert got[row].item() == pytest.approx(want, rel=1e-3, abs=1e-3), f"row {row} of {len(kept)} ids"
    assert len(widths) > 1 if top_p < 1.0 else widths == {5}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gaussian_soft_is_the_paper_s(temperature: float) -> None:
    """The score of −‖e' − h(θ)‖² / (2σ²) where e' = h(θ) + σ ε, h(θ) = Σ softmax(z/τ) E over the policy's top-k."""
    perturbation = create("gaussian", density="gaussian", base="soft", k=4)
    step = a_step(likely(50), temperature)
    edit = perturbation.propose(step).edit
    keys = streams.keys(step.seeds, step.positions, streams.Stream.NOISE)
    noise, sigma = streams.normal(keys, D).double(), edit.sigma.double()
    for moved in (0.0, 0.3):  # a policy that moved a little counts as the one that drew e'
        logits = (step.logits + moved * torch.randn(50, V, generator=generator(2))).requires_grad_()
        got = by_kind(perturbation, step, logits)
        values, ids = logits.double().topk(4, dim=-1)
        shares = torch.softmax(values * temperature / 0.5, dim=-1).unsqueeze(-1)
        h = (step.embeddings.lookup(ids) * shares).sum(dim=1)
        fed = h.detach() + sigma.unsqueeze(-1) * noise
        want = -(fed - h).square().sum(-1) / (2 * sigma**2) - D * (sigma * math.sqrt(2 * math.pi)).log()
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)
        score, true = (torch.autograd.grad(part.sum(), logits)[0] for part in (got, want))
        torch.testing.assert_close(score, true, rtol=1e-4, atol=1e-4 * true.abs().max().item())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gumbel", dict(density="gumbel", clamp=False), "clamp"),
        ("gumbel", dict(density="gumbel", tau=0.05), "0.05"),
        ("gumbel", dict(density="gumble"), "Did you mean 'gumbel'"),
        ("gaussian", dict(density="gaussian", sigma=0.0), "sigma=0"),
        ("normal", dict(k=11), "11"),
    ],
)
def test_options_that_do_not_go_together_are_refused(name: str, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        create(name, **options)


def test_a_perturbation_without_a_density_says_so() -> None:
    with pytest.raises(NotImplementedError, match="'soft' has no density"):
        create("soft").log_density(None)
