# SPDX-License-Identifier: Apache-2.0
"""SimKO, Clip-Cov, KL-Cov and Lp-Reg: numbers by hand, and what they mark."""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ngrpo.methods import credits
from ngrpo.methods.credits.base import LossTokens, StepTokens
from ngrpo.methods.credits.covariance import covariances
from perturbations.errors import UsageError
from tests.support.token_log_probs import log_probs_of


class Response(NamedTuple):
    """The tokens of one response, and the logits that receive their gradient."""

    tokens: LossTokens
    logits: Tensor


def response(probabilities: list[list[float]], drawn: list[int], advantage: float) -> Response:
    """A response whose token number i was drawn from row i of the probabilities."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log().requires_grad_()
    ids = torch.tensor(drawn)
    count = len(drawn)
    tokens = LossTokens(
        logits=logits,
        rows=torch.arange(count),
        tokens=ids,
        log_probs=log_probs_of(logits, ids),
        advantages=torch.full((count,), advantage),
        responses=torch.zeros(count, dtype=torch.int64),
    )
    return Response(tokens, logits)


def dense(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        return gradient.to_dense()
    return gradient


# --- SimKO -----------------------------------------------------------------------------------------

SURE = [0.97, 0.01, 0.01, 0.01]
WAVERING = [0.4, 0.3, 0.2, 0.1]


def test_a_right_response_shares_its_credit_with_the_likeliest_tokens() -> None:
    """At the one token above the 0.8-quantile: ∇ α (mean log π(k) − log π(y)) = α (1/3, 1/3, 1/3, −1)."""
    rows = [SURE, SURE, WAVERING, SURE]
    tokens, logits = response(rows, drawn=[0, 1, 3, 0], advantage=2.0)
    advantages, term = credits.create("simko", alpha=0.3).in_loss(tokens)
    assert advantages.tolist() == [2.0] * 4
    mean_of_likeliest = math.log(0.4 * 0.3 * 0.2) / 3
    at_wavering = 0.3 * (mean_of_likeliest - math.log(0.1))
    assert term.tolist() == pytest.approx([0.0, 0.0, at_wavering, 0.0])

    term.sum().backward()
    expected = torch.zeros(4, 4, dtype=torch.float64)
    expected[2] = torch.tensor([0.1, 0.1, 0.1, -0.3])
    torch.testing.assert_close(dense(logits.grad), expected, atol=1e-7, rtol=0.0)


@pytest.mark.parametrize(
    ("drawn", "advantage"),
    [
        pytest.param(0, -2.2, id="the likeliest token"),
        pytest.param(1, -2.0, id="another token"),
    ],
)
def test_a_wrong_response_lowers_a_likeliest_token_more(drawn: int, advantage: float) -> None:
    rows = [SURE, WAVERING, SURE, SURE, WAVERING]
    tokens, _ = response(rows, drawn=[0, drawn, 0, 1, 1], advantage=-2.0)
    advantages, term = credits.create("simko", quantile=0.5).in_loss(tokens)
    assert advantages.tolist() == pytest.approx([-2.0, advantage, -2.0, -2.0, -2.0])
    assert not term.any()


@pytest.mark.parametrize(
    ("options", "advantage"),
    [
        pytest.param({"quantile": 1.0}, -2.0, id="no entropy is above the largest"),
        pytest.param({}, 0.0, id="advantage 0 is neither right nor wrong"),
    ],
)
def test_simko_changes_nothing(options: dict[str, float], advantage: float) -> None:
    rows = [SURE, WAVERING, SURE, SURE, WAVERING]
    tokens, _ = response(rows, drawn=[0] * 5, advantage=advantage)
    advantages, term = credits.create("simko", **options).in_loss(tokens)
    assert advantages.tolist() == [advantage] * 5
    assert not term.any()


# --- Clip-Cov and KL-Cov -----------------------------------------------------------------------------

# Means −2 and 0.5: deviations (1, −1, 0.5, −0.5) and (1.5, −1.5, −0.5, 0.5).
STEP = StepTokens(
    advantages=torch.tensor([2.0, -1.0, 0.0, 1.0]),
    entropies=torch.zeros(4),
    log_probs=torch.tensor([-1.0, -3.0, -1.5, -2.5]),
    responses=torch.tensor([0, 1, 1, 2]),
    groups=torch.zeros(4, dtype=torch.int64),
    seeds=torch.tensor([11, 22, 22, 33]),
)


def marked(tokens: StepTokens, name: str, share: float) -> list[int]:
    """The numbers of the tokens that a credit marks."""
    marks = credits.create(name, share=share).marks(tokens)
    return marks.nonzero().flatten().tolist()


def test_covariances_are_products_of_deviations() -> None:
    assert covariances(STEP).tolist() == [1.5, 1.5, -0.25, -0.25]


def test_clip_cov_takes_the_advantage_of_a_share_of_the_tokens_within_its_bounds() -> None:
    """Half of four tokens are two; both covariances of 1.5 are within the bounds, which are included."""
    clip_cov = credits.create("clip_cov", share=0.5, low=1.5, high=1.5)
    assert clip_cov.formula(STEP).tolist() == [0.0, 0.0, 0.0, 1.0]


def test_clip_cov_leaves_tokens_outside_of_its_bounds() -> None:
    """Only the two covariances of -0.25 are within the bounds."""
    clip_cov = credits.create("clip_cov", share=1.0, low=-0.25, high=0.0)
    assert clip_cov.formula(STEP).tolist() == [2.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param({"low": 1.6}, id="above all covariances"),
        pytest.param({"low": -9.0, "high": -0.3}, id="below all covariances"),
    ],
)
def test_clip_cov_without_a_token_within_its_bounds(bounds: dict[str, float]) -> None:
    clip_cov = credits.create("clip_cov", share=1.0, **bounds)
    assert torch.equal(clip_cov.formula(STEP), STEP.advantages)


def test_clip_covs_bounds_are_in_order() -> None:
    with pytest.raises(UsageError, match=r"low=6\.0: must be at most high=5\.0"):
        credits.create("clip_cov", low=6.0)


@pytest.mark.parametrize(
    ("share", "numbers"),
    [
        (0.25, [1]),
        (0.7, [0, 1]),
        (0.75, [0, 1, 3]),
        (1e-6, [1]),
    ],
)
def test_kl_cov_marks_the_largest_covariances(share: float, numbers: list[int]) -> None:
    """The covariances are 1.35, 1.5, -0.25, -0.2; at least one token is marked."""
    tokens = replace(STEP, log_probs=torch.tensor([-1.1, -3.0, -1.5, -2.4]))
    assert marked(tokens, "kl_cov", share) == numbers


def many_tokens() -> StepTokens:
    """400 responses of one to five tokens, half of them right; all covariances are within wide bounds."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 6, (400,), generator=generator)
    responses = torch.arange(400).repeat_interleave(lengths)
    is_right = torch.rand(400, generator=generator) < 0.5
    size = len(responses)
    return StepTokens(
        advantages=torch.where(is_right, 1.0, -1.0)[responses],
        entropies=torch.zeros(size),
        log_probs=-torch.rand(size, generator=generator),
        responses=responses,
        groups=responses // 4,
        seeds=1000 + responses,
    )


def clipped(tokens: StepTokens) -> Tensor:
    """Which tokens Clip-Cov takes the advantage of, a tenth of all."""
    clip_cov = credits.create("clip_cov", share=0.1, low=-9.0, high=9.0)
    return clip_cov.formula(tokens) == 0.0


def test_clip_covs_choice_is_the_same_in_any_order_of_the_responses() -> None:
    tokens = many_tokens()
    is_clipped = clipped(tokens)
    assert int(is_clipped.sum()) == len(is_clipped) // 10

    # The last response first; the tokens of a response keep their order.
    order = tokens.responses.argsort(descending=True, stable=True)
    last_number = int(tokens.responses.max())
    reordered = StepTokens(
        advantages=tokens.advantages[order],
        entropies=tokens.entropies[order],
        log_probs=tokens.log_probs[order],
        responses=last_number - tokens.responses[order],
        groups=tokens.groups[order],
        seeds=tokens.seeds[order],
    )
    assert torch.equal(clipped(reordered), is_clipped[order])


def test_clip_cov_chooses_each_token_as_often_as_any_other() -> None:
    """Each of 300 seeds has other tokens: a token is chosen 30 times on average, with a deviation of 5.2.

    Of 1,200 tokens the largest is below 5 deviations.
    """
    tokens = many_tokens()
    times = torch.zeros(len(tokens.responses))
    for seed in range(300):
        times += clipped(replace(tokens, seeds=tokens.seeds + 100_000 * seed))
    assert float(times.mean()) == pytest.approx(30.0, abs=0.1)
    assert float((times - 30.0).abs().max()) < 26.0
    assert float(times.std()) == pytest.approx(5.2, rel=0.15)


# --- Lp-Reg ----------------------------------------------------------------------------------------

# With κ = 0.02 the last two are noise: Z = 0.99.
P = torch.tensor([0.6, 0.3, 0.09, 0.009, 0.001], dtype=torch.float64)


def response_from_p(drawn: list[int]) -> Response:
    """A response worse than its group, whose tokens were all drawn from P."""
    return response([P.tolist()] * len(drawn), drawn, advantage=-1.0)


def test_lp_reg_by_hand() -> None:
    """β (1 / .99 − 1 − log(1 / .99)) with a gradient to the logits of β (1 − 1 / .99) (e_y − p); nothing for noise."""
    tokens, logits = response_from_p([0, 2, 3, 2])
    lp_reg = credits.create("lp_reg", beta=2.0)
    penalty = lp_reg.marked_loss(tokens, torch.tensor([1, 2]), torch.zeros(2))
    of_token_2 = 2.0 * (1.0 / 0.99 - 1.0 + math.log(0.99))
    assert penalty.tolist() == pytest.approx([of_token_2, 0.0], rel=1e-6)

    penalty.sum().backward()
    one_hot = torch.eye(5)[2]
    expected = torch.zeros(4, 5, dtype=torch.float64)
    expected[1] = 2.0 * (1.0 - 1.0 / 0.99) * (one_hot - P)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-5, atol=1e-9)


def test_lp_reg_without_noise_has_nothing_to_move_to() -> None:
    """At κ = 0 no token is noise."""
    tokens, _ = response_from_p([0, 2, 3, 2])
    lp_reg = credits.create("lp_reg", kappa=0.0)
    penalty = lp_reg.marked_loss(tokens, torch.tensor([1]), torch.zeros(1))
    assert not penalty.any()


def test_lp_reg_keeps_the_token_at_the_boundary() -> None:
    """κ = 1: all but the likeliest token are noise, so Z is its probability, 0.6."""
    tokens, _ = response_from_p([0, 1])
    lp_reg = credits.create("lp_reg", kappa=1.0)
    penalty = lp_reg.marked_loss(tokens, torch.tensor([0, 1]), torch.zeros(2))
    of_token_0 = 1 / 0.6 - 1.0 + math.log(0.6)
    assert penalty.tolist() == pytest.approx([of_token_0, 0.0], rel=1e-6)


def test_lp_regs_gradient_estimates_the_forward_kls() -> None:
    """Over draws of y from π: with ∇log π(y) for noise, the limit where q(y) is 0, it is the gradient of KL(q ‖ π)."""
    tokens, logits = response_from_p([0, 1, 2, 3, 4])
    penalty = credits.create("lp_reg").marked_loss(tokens, torch.arange(5), torch.zeros(5))
    is_noise = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0])
    estimate = P * penalty + P * is_noise * tokens.log_probs
    estimate.sum().backward()

    kl_logits = P.log().requires_grad_()
    target = P / 0.99 * (1.0 - is_noise)
    kl = torch.nn.functional.kl_div(kl_logits.log_softmax(-1), target, reduction="sum")
    kl.backward()
    torch.testing.assert_close(logits.grad.sum(0), kl_logits.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_lp_reg_marks_only_responses_worse_than_their_group(share: float) -> None:
    """Token 1 is the only one with a negative advantage."""
    assert marked(STEP, "lp_reg", share) == [1]


@pytest.mark.parametrize(
    ("share", "numbers"),
    [
        (0.25, [1]),
        (0.26, [1, 3]),
        (1e-9, [1]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_lp_reg_marks_the_least_likely_tokens(share: float, numbers: list[int]) -> None:
    """⌈ρ N⌉ of all tokens, where each response is worse than its group."""
    tokens = replace(STEP, advantages=-torch.ones(4))
    assert marked(tokens, "lp_reg", share) == numbers
