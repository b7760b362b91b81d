# SPDX-License-Identifier: Apache-2.0
"""Densities of perturbations: what they take from a record, in plain numbers, and their gradients."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perturbations import streams
from perturbations.base import Perturbation, Step
from perturbations.registry import create
from perturbations.testing.log_density import replayed
from tests.support.density_steps import PERTURBATIONS, D, V, a_step, generator, likely


def log_density_at(perturbation: Perturbation, step: Step, logits: Tensor) -> Tensor:
    """The log-density of a step's inputs, proposed at the step's own logits, for a policy with ``logits``."""
    proposal = perturbation.propose(step)
    return perturbation.log_density(replayed(step, proposal, logits))


def keys_of(step: Step, stream: streams.Stream) -> Tensor:
    return streams.keys(step.seeds, step.positions, stream)


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


# --- exact densities ------------------------------------------------------------------------------


def censored_terms(noise: Tensor) -> Tensor:
    """log f, log F or log(1 − F) of Gumbel(0, 1), by where the noise lies: within [−1.5, 3], below or above."""
    within = -noise - (-noise).exp()
    below = -math.exp(1.5)
    above = math.log(-math.expm1(-math.exp(-3.0)))
    return torch.where(noise >= 3.0, above, torch.where(noise <= -1.5, below, within))


def test_exact_gumbel_in_plain_numbers() -> None:
    """Of 500 positions with 5 candidates some 28 have noise below the clamp, and 120 above."""
    perturbation = create("gumbel", density="exact", top_p=1.0)
    step = a_step(likely(500))
    proposal = perturbation.propose(step)
    log_density = perturbation.log_density(replayed(step, proposal, step.logits))
    noise = streams.gumbel(keys_of(step, streams.Stream.WEIGHTS), proposal.edit.ids)
    expected = censored_terms(noise).sum(-1)
    torch.testing.assert_close(log_density, expected, rtol=2e-3, atol=2e-3)


def nucleus(log_p: Tensor, top_p: float, least: int) -> Tensor:
    """The fewest likeliest tokens that hold ``top_p``, but at least ``least``, likeliest first."""
    ids = log_p.argsort(descending=True)
    probabilities = log_p[ids].exp()
    before = probabilities.cumsum(0) - probabilities
    is_in = (before < top_p) | (torch.arange(len(ids)) < least)
    return ids[is_in]


def test_exact_latent_in_plain_numbers() -> None:
    """The 3 largest of the nucleus, and P(smaller) of each other one, but of none that its bound keeps smaller."""
    perturbation = create("latent", density="exact", k=3)
    step = a_step(likely(300))
    log_density = log_density_at(perturbation, step, step.logits)
    keys = keys_of(step, streams.Stream.WEIGHTS)

    expected = []
    kept_smaller = 0
    for row, logits in enumerate(step.logits.double()):
        log_p = torch.log_softmax(logits, dim=-1)
        ids = nucleus(log_p, top_p=0.95, least=3)
        noise = streams.gumbel(keys[row : row + 1], ids.unsqueeze(0))[0].double()
        noisy = log_p[ids] + noise.clamp(-1.5, 3.0) + 1.5
        order = noisy.argsort(descending=True)
        mixed = order[:3]
        unmixed = order[3:]

        # The noise with which a token that is not mixed would reach the smallest of the three.
        bound = noisy[mixed[-1]] - log_p[ids[unmixed]] - 1.5
        kept_smaller += int((bound >= 3.0).sum())
        of_unmixed = (-bound[bound < 3.0]).exp().sum()
        expected.append(censored_terms(noise[mixed]).sum() - of_unmixed)
    assert kept_smaller > 10
    torch.testing.assert_close(log_density, torch.stack(expected).float(), rtol=2e-3, atol=2e-3)


# --- gradients in float64 -------------------------------------------------------------------------


DIFFERENTIABLE = [
    *PERTURBATIONS[:2],
    create("gumbel", density="exact"),
    create("dirichlet", density="exact", alpha=4.0),
    create("lepo", density="exact", k=4),
    create("latent", density="exact", k=3),
]


@pytest.mark.parametrize("perturbation", DIFFERENTIABLE, ids=lambda o: f"{o.name}-{o.density}")
def test_gradient_of_each_perturbation_reaches_the_logits(perturbation: Perturbation) -> None:
    """The whole of log_density against central differences in float64, at a policy other than the rollout's."""
    step = a_step(likely(6), temperature=0.7)
    proposal = perturbation.propose(step)

    def lookup_in_float64(ids: Tensor) -> Tensor:
        return step.embeddings.lookup(ids).double()

    def log_density(logits: Tensor) -> Tensor:
        in_float32 = replayed(step, proposal, logits)
        return perturbation.log_density(dataclasses.replace(in_float32, lookup=lookup_in_float64))

    change = torch.randn(6, V, dtype=torch.float64, generator=generator(11))
    logits = (step.logits.double() + 0.02 * change).requires_grad_()
    assert torch.autograd.gradcheck(log_density, (logits,), eps=1e-6, atol=1e-5)

    log_density(logits).sum().backward()
    has_gradient = logits.grad.abs().sum(dim=-1) > 0.0
    assert has_gradient.sum() >= 5


# --- perturbations: what was recorded is enough -------------------------------------------------------


def test_gumbel_with_weights_too_small_for_float32() -> None:
    """p = 1 - 1e-9, 1e-9 and τ = 0.1: the second weight is e^-180 = 0. Its y counts as unlikely, g clamped to -1.5."""
    perturbation = create("gumbel", density="gumbel", k=2, top_p=1.0)
    step = a_step(torch.tensor([[1.0, 1e-9, 0.0]]), seed=10)
    edit = perturbation.propose(step).edit
    assert edit.weights[0, 1] < 1e-38

    even_policy = torch.zeros(1, 3)
    log_density = log_density_at(perturbation, step, even_policy)
    first_score = edit.normalizer[0].item()  # y_0 = normalizer, since w_0 = 1
    first_noise = clamp(first_score - math.log(0.5 + 1e-6), -1.5, 3.0)
    of_first = -first_noise - math.exp(-first_noise)
    of_second = 1.5 - math.exp(1.5)
    assert log_density.item() == pytest.approx((of_first + of_second) / 2, abs=1e-4)


def mean(terms: list[float]) -> float:
    return sum(terms) / len(terms) if terms else 0.0


def gumbel_by_hand(key: Tensor, ids: Tensor, old: Tensor, new: Tensor) -> float:
    """Noise that the rollout clamped stays where it was; the rest is the score's distance from the new policy."""
    rollout_noise = streams.gumbel(key, ids).double().clamp(-1.5, 3.0)
    scores = (old + 1e-6).log() + rollout_noise
    terms = []
    for place in range(ids.shape[1]):
        score = scores[0, place].item()
        noise = rollout_noise[0, place].item()
        log_p = math.log(new[0, place].item() + 1e-6)
        if log_p <= -3.0:
            continue
        if -1.5 < noise < 3.0:
            noise = clamp(score - log_p, -1.5, 3.0)
        terms.append(-noise - math.exp(-noise))
    return mean(terms)


def dirichlet_by_hand(key: Tensor, ids: Tensor, old: Tensor, new: Tensor) -> float:
    """The log-density of Gamma draws, α = 4."""
    draws = streams.log_gamma(key, ids, (4.0 * old).float()).double().exp()
    terms = []
    for draw, probability in zip(draws[0].tolist(), new[0].tolist()):
        if probability <= 0.05:
            continue
        shape = 4.0 * probability
        term = (shape - 1.0) * math.log(draw) - draw - math.lgamma(shape)
        terms.append(clamp(term, -5.0, 3.0))
    return mean(terms)


def normal_by_hand(key: Tensor, ids: Tensor, old: Tensor, new: Tensor) -> float:
    """The draws are around the new policy: it counts as the one that drew them."""
    draws = new + 0.05 * streams.normal(key, ids).double()
    constant = math.log(0.05 * math.sqrt(2.0 * math.pi))
    terms = []
    for draw, probability in zip(draws[0].tolist(), new[0].tolist()):
        if probability <= 0.05:
            continue
        z = clamp(draw - probability, -0.15, 0.15) / 0.05
        terms.append(-0.5 * z * z - constant)
    return mean(terms)


def kept_by_top_p(logits: Tensor, top_p: float) -> Tensor:
    """The tokens that top-p leaves of the five likeliest, (1, n)."""
    ids = logits.argsort(descending=True)[:5]
    probabilities = torch.softmax(logits[ids], dim=-1)
    before = probabilities.cumsum(0) - probabilities
    return ids[before < top_p].unsqueeze(0)


@pytest.mark.parametrize("moved", [0.0, 0.6], ids=["rollout", "elsewhere"])
@pytest.mark.parametrize("top_p", [0.6, 1.0])
@pytest.mark.parametrize(
    ("name", "options", "by_hand"),
    [
        pytest.param("gumbel", {}, gumbel_by_hand, id="gumbel"),
        pytest.param("dirichlet", {"alpha": 4.0}, dirichlet_by_hand, id="dirichlet"),
        pytest.param("normal", {}, normal_by_hand, id="normal"),
    ],
)
def test_draws_come_back_from_the_record(
    name: str, options: dict[str, float], by_hand: Callable[..., float], top_p: float, moved: float
) -> None:
    """Against the noise drawn again and the paper's formula in plain numbers; ids cut by top-p have no part in it."""
    perturbation = create(name, density=name, top_p=top_p, **options)
    step = a_step(likely(200))
    logits = step.logits + moved * torch.randn(200, V, generator=generator(2))
    log_density = log_density_at(perturbation, step, logits)
    keys = keys_of(step, streams.Stream.WEIGHTS)

    widths = set()
    for row in range(200):
        ids = kept_by_top_p(step.logits[row].double(), top_p)
        widths.add(ids.shape[1])
        old = torch.softmax(step.logits[row].double()[ids], dim=-1)
        new = torch.softmax(logits[row].double()[ids], dim=-1)
        expected = by_hand(keys[row : row + 1], ids, old, new)
        assert log_density[row].item() == pytest.approx(expected, rel=1e-3, abs=1e-3), f"row {row}, {ids}"
    if top_p < 1.0:
        assert len(widths) > 1
    else:
        assert widths == {5}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("moved", [0.0, 0.3], ids=["rollout", "elsewhere"])
def test_gaussian_soft_is_the_paper_s(temperature: float, moved: float) -> None:
    """The score of −‖e' − h(θ)‖² / (2σ²) where e' = h(θ) + σ ε, h(θ) = Σ softmax(z/τ) E over the policy's top-k.

    A policy that moved a little counts as the one that drew e'.
    """
    perturbation = create("gaussian", density="gaussian", base="soft", k=4)
    step = a_step(likely(50), temperature)
    sigma = perturbation.propose(step).edit.sigma.double()
    change = torch.randn(50, V, generator=generator(2))
    logits = (step.logits + moved * change).requires_grad_()
    log_density = log_density_at(perturbation, step, logits)

    values, ids = logits.double().topk(4, dim=-1)
    weights = torch.softmax(values * temperature / 0.5, dim=-1)
    mixture = (step.embeddings.lookup(ids) * weights.unsqueeze(-1)).sum(dim=1)
    noise = streams.normal(keys_of(step, streams.Stream.NOISE), D).double()
    fed = mixture.detach() + sigma.unsqueeze(-1) * noise
    constant = -D * (sigma * math.sqrt(2 * math.pi)).log()
    expected = constant - (fed - mixture).square().sum(-1) / (2 * sigma**2)
    torch.testing.assert_close(log_density.double(), expected, rtol=1e-4, atol=1e-3)

    (score,) = torch.autograd.grad(log_density.sum(), logits)
    (expected_score,) = torch.autograd.grad(expected.sum(), logits)
    largest = expected_score.abs().max().item()
    assert largest > 0.0
    torch.testing.assert_close(score, expected_score, rtol=1e-4, atol=1e-4 * largest)


# --- errors -------------------------------------------------------------------------------------------


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
