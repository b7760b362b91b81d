# SPDX-License-Identifier: Apache-2.0
"""SimKO, Clip-Cov, KL-Cov and Lp-Reg: numbers by hand, and what they mark."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ngrpo.methods import credits
from ngrpo.methods.credits.base import LossTokens, StepTokens
from ngrpo.methods.credits.covariance import covariances
from perturbations.errors import UsageError
from tests.support.token_log_probs import log_probs_of


def one_answer(rows: list[list[float]], tokens: list[int], advantage: float) -> tuple[LossTokens, Tensor]:
    """The tokens of one answer, one for each row of probabilities, and these as logits."""
    logits = torch.tensor(rows, dtype=torch.float64).log().requires_grad_()
    drawn, count = torch.tensor(tokens), torch.arange(len(tokens))
    log_probs = log_probs_of(logits, drawn)
    return LossTokens(logits, count, drawn, log_probs, torch.full((len(tokens),), advantage), 0 * count), logits


def dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


# --- SimKO -----------------------------------------------------------------------------------------

SURE, WAVERING = [0.97, 0.01, 0.01, 0.01], [0.4, 0.3, 0.2, 0.1]


def test_a_right_answer_shares_its_credit_with_the_likeliest() -> None:
    """At the one token above the 0.8-quantile: ∇ α (mean log π(k) − log π(y)) = α (1/3, 1/3, 1/3, −1)."""
    tokens, logits = one_answer([SURE, SURE, WAVERING, SURE], [0, 1, 3, 0], 2.0)
    advantages, term = credits.create("simko", alpha=0.3).in_loss(tokens)
    assert advantages.tolist() == [2.0] * 4
    assert term.tolist() == pytest.approx([0.0, 0.0, 0.3 * (math.log(0.4 * 0.3 * 0.2) / 3 - math.log(0.1)), 0.0])
    term.sum().backward()
    expected = torch.zeros(4, 4)
    expected[2] = torch.tensor([0.1, 0.1, 0.1, -0.3])
    torch.testing.assert_close(dense(logits.grad), expected.double(), atol=1e-7, rtol=0.0)


def test_a_wrong_answer_lowers_a_likeliest_token_more() -> None:
    rows = [SURE, WAVERING, SURE, SURE, WAVERING]
    for drawn, expected in ((0, -2.2), (1, -2.0)):
        tokens, _ = one_answer(rows, [0, drawn, 0, 1, 1], -2.0)
        advantages, term = credits.create("simko", quantile=0.5).in_loss(tokens)
        assert advantages.tolist() == pytest.approx([-2.0, expected, -2.0, -2.0, -2.0])
        assert not term.any()
    # Nothing is above the largest entropy, and A = 0 is neither right nor wrong.
    for options, advantage in (({"quantile": 1.0}, -2.0), ({}, 0.0)):
        tokens, _ = one_answer(rows, [0] * 5, advantage)
        advantages, term = credits.create("simko", **options).in_loss(tokens)
        assert advantages.tolist() == [advantage] * 5 and not term.any()


# --- Clip-Cov and KL-Cov -----------------------------------------------------------------------------

# Means −2 and 0.5: deviations (1, −1, 0.5, −0.5) and (1.5, −1.5, −0.5, 0.5).
STEP = StepTokens(
    advantages=torch.tensor([2.0, -1.0, 0.0, 1.0]),
    entropies=torch.zeros(4),
    log_probs=torch.tensor([-1.0, -3.0, -1.5, -2.5]),
    answers=torch.tensor([0, 1, 1, 2]),
    groups=torch.zeros(4, dtype=torch.int64),
    seeds=torch.tensor([11, 22, 22, 33]),
)


def marked(tokens: StepTokens, name: str, share: float) -> list[int]:
    return credits.create(name, share=share).marks(tokens).nonzero().flatten().tolist()


def test_clip_cov_and_kl_cov_by_hand() -> None:
    assert covariances(STEP).tolist() == [1.5, 1.5, -0.25, -0.25]
    clip = credits.create("clip_cov", share=0.5, low=1.5, high=1.5)  # two of four, both bounds among them
    assert clip.formula(STEP).tolist() == [0.0, 0.0, 0.0, 1.0]
    assert credits.create("clip_cov", share=1.0, low=-0.25, high=0.0).formula(STEP).tolist() == [2.0, -1.0, 0.0, 0.0]
    for bounds in ({"low": 1.6}, {"low": -9.0, "high": -0.3}):
        assert torch.equal(credits.create("clip_cov", share=1.0, **bounds).formula(STEP), STEP.advantages)
    with pytest.raises(UsageError, match=r"low=6\.0: must be at most high=5\.0"):
        credits.create("clip_cov", low=6.0)
    other = replace(STEP, log_probs=torch.tensor([-1.1, -3.0, -1.5, -2.4]))  # 1.35, 1.5, -0.25, -0.2
    for share, expected in ((0.25, [1]), (0.7, [0, 1]), (0.75, [0, 1, 3]), (1e-6, [1])):
        assert marked(other, "kl_cov", share) == expected


def many(count: int = 400) -> StepTokens:
    """Responses of one to five tokens, half of them right; all covariances are within wide bounds."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 6, (count,), generator=generator)
    answers = torch.arange(count).repeat_interleave(lengths)
    size = len(answers)
    advantages = torch.where(torch.rand(count, generator=generator) < 0.5, 1.0, -1.0)[answers]
    log_probs = -torch.rand(size, generator=generator)
    return StepTokens(advantages, torch.zeros(size), log_probs, answers, answers // 4, 1000 + answers)


def test_clip_covs_choice_is_random_and_each_tokens_own() -> None:
    """As often as any other; the same in any order of the responses; other ones at another seed."""
    tokens, clip = many(), credits.create("clip_cov", share=0.1, low=-9.0, high=9.0)
    clipped = clip.formula(tokens) == 0.0
    assert int(clipped.sum()) == len(clipped) // 10
    order = tokens.answers.argsort(descending=True, stable=True)  # the last response first, each in its own order
    reversed_ = StepTokens(**{name: values[order] for name, values in vars(tokens).items()})
    reversed_ = replace(reversed_, answers=int(tokens.answers.max()) - reversed_.answers)
    assert torch.equal((clip.formula(reversed_) == 0.0), clipped[order])
    times = torch.zeros(len(clipped))
    for seed in range(300):
        times += clip.formula(replace(tokens, seeds=tokens.seeds + 100_000 * seed)) == 0.0
    # 30 times on average, with a deviation of 5.2; of 1,200 tokens the largest is below 5.
    assert float(times.mean()) == pytest.approx(30.0, abs=0.1) and float((times - 30.0).abs().max()) < 26.0
    assert float(times.std()) == pytest.approx(5.2, rel=0.15)


# --- Lp-Reg ----------------------------------------------------------------------------------------

P = torch.tensor([0.6, 0.3, 0.09, 0.009, 0.001], dtype=torch.float64)  # with κ = 0.02 the last two are noise: Z = 0.99


def test_lp_reg_by_hand() -> None:
    """β (1 / .99 − 1 − log(1 / .99)) with a gradient to the logits of β (1 − 1 / .99) (e_y − p); nothing for noise."""
    tokens, logits = one_answer([P.tolist()] * 4, [0, 2, 3, 2], -1.0)
    penalty = credits.create("lp_reg", beta=2.0).marked_loss(tokens, torch.tensor([1, 2]), torch.zeros(2))
    assert penalty.tolist() == pytest.approx([2.0 * (1.0 / 0.99 - 1.0 + math.log(0.99)), 0.0], rel=1e-6)
    penalty.sum().backward()
    expected = torch.zeros(4, 5, dtype=torch.float64)
    expected[1] = 2.0 * (1.0 - 1.0 / 0.99) * (torch.eye(5)[2] - P)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-5, atol=1e-9)
    # κ = 0: there is no noise, and so nothing to move to.
    assert not credits.create("lp_reg", kappa=0.0).marked_loss(tokens, torch.tensor([1]), torch.zeros(1)).any()


def test_lp_reg_keeps_the_token_at_the_boundary() -> None:
    """κ = 1: all but the likeliest token are noise, so Z is its probability, 0.6."""
    tokens, _ = one_answer([P.tolist()] * 2, [0, 1], -1.0)
    penalty = credits.create("lp_reg", kappa=1.0).marked_loss(tokens, torch.tensor([0, 1]), torch.zeros(2))
    assert penalty.tolist() == pytest.approx([1 / 0.6 - 1.0 + math.log(0.6), 0.0], rel=1e-6)


def test_lp_regs_gradient_estimates_the_forward_kls() -> None:
    """Over draws of y from π: with ∇log π(y) for noise, the limit where q(y) is 0, it is the gradient of KL(q ‖ π)."""
    tokens, logits = one_answer([P.tolist()] * 5, [0, 1, 2, 3, 4], -1.0)
    penalty = credits.create("lp_reg").marked_loss(tokens, torch.arange(5), torch.zeros(5))
    (P * penalty + P * torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0]) * tokens.log_probs).sum().backward()
    other = P.log().requires_grad_()
    target = P / 0.99 * torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    torch.nn.functional.kl_div(other.log_softmax(-1), target, reduction="sum").backward()
    torch.testing.assert_close(logits.grad.sum(0), other.grad, rtol=1e-6, atol=1e-9)


def test_what_lp_reg_marks() -> None:
    """The least likely ⌈ρ N⌉ of all tokens, if their response is worse than its group."""
    assert [marked(STEP, "lp_reg", share) for share in (0.25, 0.5, 1.0)] == [[1]] * 3
    worse = replace(STEP, advantages=-torch.ones(4))
    for share, expected in ((0.25, [1]), (0.26, [1, 3]), (1e-9, [1]), (1.0, [0, 1, 2, 3])):
        assert marked(worse, "lp_reg", share) == expected
