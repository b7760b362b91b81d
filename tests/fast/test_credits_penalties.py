# SPDX-License-Identifier: Apache-2.0
"""Clip-Cov, KL-Cov and Lp-Reg: numbers by hand, gradients in OpenRLHF's loss, and what batches and packing change."""

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ngrpo.methods import credits
from ngrpo.methods.credits.base import LossTokens, StepTokens
from ngrpo.methods.credits.covariance import covariances
from ngrpo.trainers.openrlhf.actor_trainer import actor_trainer
from perturbations.errors import UsageError
from tests.fast.gradient_problem import policy_loss
from tests.fast.run import run_with
from tests.fast.simko_reference import ACTIONS, A, T
from tests.fast.test_credits_simko import Trainer, experience
from tests.token_log_probs import log_probs_of

# Means −2 and 0.5: deviations (1, −1, 0.5, −0.5) and (1.5, −1.5, −0.5, 0.5).
STEP = StepTokens(
    advantages=torch.tensor([2.0, -1.0, 0.0, 1.0]),
    entropies=torch.zeros(4),
    log_probs=torch.tensor([-1.0, -3.0, -1.5, -2.5]),
    answers=torch.tensor([0, 1, 1, 2]),
    groups=torch.zeros(4, dtype=torch.int64),
    seeds=torch.tensor([11, 22, 22, 33]),
)
NONE = StepTokens(*[torch.zeros(0)] * 3, *[torch.zeros(0, dtype=torch.int64)] * 2)


def test_marks_without_a_loss_are_refused_at_once() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Marking(credits.Credit):
        name = "marking"

        def formula(self, tokens: StepTokens) -> torch.Tensor:
            return tokens.advantages

        def marks(self, tokens: StepTokens) -> torch.Tensor:
            return tokens.advantages < 0.0

    with pytest.raises(
        UsageError, match=r"credit 'marking': .*Marking has marks and no marked_loss\. Write marked_loss"
    ):
        Marking()


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
    for share, marked in ((0.25, [1]), (0.7, [0, 1]), (0.75, [0, 1, 3]), (1e-6, [1])):
        assert credits.create("kl_cov", share=share).marks(other).nonzero().flatten().tolist() == marked
    for name in ("clip_cov", "kl_cov", "lp_reg"):
        assert credits.create(name).formula(NONE).tolist() == []
    assert [credits.create(name).marks(NONE).tolist() for name in ("kl_cov", "lp_reg")] == [[], []]


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
    # Each response as a block, in reverse.
    order = torch.cat(
        [block for block in torch.arange(len(clipped)).split(torch.bincount(tokens.answers).tolist())][::-1]
    )
    parts = [
        getattr(tokens, name)[order] for name in ("advantages", "entropies", "log_probs", "answers", "groups", "seeds")
    ]
    parts[3] = len(tokens.answers.unique()) - 1 - parts[3]
    assert torch.equal((clip.formula(StepTokens(*parts)) == 0.0), clipped[order])
    times = torch.zeros(len(clipped))
    for seed in range(300):
        times += clip.formula(replace(tokens, seeds=tokens.seeds + 100_000 * seed)) == 0.0
    # 30 times on average, with a deviation of 5.2; of 1,200 tokens the largest is below 5.
    assert float(times.mean()) == pytest.approx(30.0, abs=0.1) and float((times - 30.0).abs().max()) < 26.0
    assert float(times.std()) == pytest.approx(5.2, rel=0.15)


# --- Lp-Reg ----------------------------------------------------------------------------------------

P = [0.6, 0.3, 0.09, 0.009, 0.001]  # with κ = 0.02 the last two are noise: Z = 0.99


def drawn(tokens: list[int]) -> tuple[LossTokens, Tensor]:
    """One answer whose every token was drawn from P, and the logits."""
    logits = torch.tensor([P] * len(tokens), dtype=torch.float64).log().requires_grad_()
    ids, count = torch.tensor(tokens), torch.arange(len(tokens))
    log_probs = logits.log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)
    return LossTokens(logits, count, ids, log_probs, -torch.ones(len(tokens)), 0 * count), logits


def test_lp_reg_by_hand() -> None:
    """β (1 / .99 − 1 − log(1 / .99)) with a gradient to the logits of β (1 − 1 / .99) (e_y − p); nothing for noise."""
    tokens, logits = drawn([0, 2, 3, 2])
    penalty = credits.create("lp_reg", beta=2.0).marked_loss(tokens, torch.tensor([1, 2]), torch.zeros(2))
    one = 2.0 * (1.0 / 0.99 - 1.0 + math.log(0.99))
    assert penalty.tolist() == pytest.approx([one, 0.0], rel=1e-6)
    penalty.sum().backward()
    expected = 2.0 * (1.0 - 1.0 / 0.99) * (torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]) - torch.tensor(P))
    torch.testing.assert_close(logits.grad[1], expected.double(), rtol=1e-5, atol=1e-9)
    assert not logits.grad[[0, 2, 3]].any()
    # κ = 0: there is no noise, and so nothing to move to.
    assert not credits.create("lp_reg", kappa=0.0).marked_loss(tokens, torch.tensor([1]), torch.zeros(1)).any()


def test_lp_regs_gradient_estimates_the_forward_kls() -> None:
    """Over draws of y from π: with ∇log π(y) for noise, the limit where q(y) is 0, it is the gradient of KL(q ‖ π)."""
    tokens, logits = drawn([0, 1, 2, 3, 4])
    weights = torch.tensor(P, dtype=torch.float64)
    penalty = credits.create("lp_reg").marked_loss(tokens, torch.arange(5), torch.zeros(5))
    (weights * penalty + weights * torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0]) * tokens.log_probs).sum().backward()
    other = torch.tensor(P, dtype=torch.float64).log().requires_grad_()
    target = torch.tensor([*P[:3], 0.0, 0.0], dtype=torch.float64) / 0.99
    torch.nn.functional.kl_div(other.log_softmax(-1), target, reduction="sum").backward()
    torch.testing.assert_close(logits.grad.sum(0), other.grad, rtol=1e-6, atol=1e-9)


def test_what_lp_reg_marks() -> None:
    """The least likely ⌈ρ N⌉ of all tokens, if their response is worse than its group."""
    for share, marked in ((0.25, [1]), (0.5, [1]), (1.0, [1])):
        assert credits.create("lp_reg", share=share).marks(STEP).nonzero().flatten().tolist() == marked
    worse = replace(STEP, advantages=-torch.ones(4))
    for share, marked in ((0.25, [1]), (0.26, [1, 3]), (1e-9, [1]), (1.0, [0, 1, 2, 3])):
        assert credits.create("lp_reg", share=share).marks(worse).nonzero().flatten().tolist() == marked


# --- in OpenRLHF's loss ----------------------------------------------------------------------------

MARKS = torch.tensor([[1, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0, 0, 1, 1, 0]]).bool()
CREDITS = [("kl_cov", {"beta": 0.7}), ("lp_reg", {"kappa": 0.3, "beta": 5.0})]


def penalties(name: str, options: dict[str, Any], logits: Tensor, log_ratio: Tensor, ids: Tensor) -> Tensor:
    """Each token's, (B, A), by the papers' formulas, of all rows of the logits."""
    if name == "kl_cov":
        return options["beta"] * (log_ratio**2).sqrt()
    p = logits[:, T - A - 1 : T - 1].softmax(-1)
    q = torch.where(p >= options["kappa"] * p.amax(-1, keepdim=True), p, 0.0)
    q = (q / q.sum(-1, keepdim=True)).detach()
    own, of_q = (x.gather(-1, ids[:, T - A :].unsqueeze(-1)).squeeze(-1) for x in (p, q))
    quotient = torch.where(of_q > 0.0, of_q / own, 1.0)
    return options["beta"] * (quotient - 1.0 - quotient.log())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize(("name", "options"), CREDITS)
def test_the_gradient_is_the_loss_and_the_penalty(
    name: str, options: dict[str, Any], by_token: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averaged as the trainer averages its tokens, and the same where the ratio is clipped."""
    run_with(monkeypatch, credit={"name": name, **options})
    loss = copy.copy(policy_loss())
    loss.token_level_loss = by_token
    logits, made = experience()
    made.kl = MARKS
    trainer = actor_trainer(Trainer)(logits, packed)
    trainer.actor_loss_fn = loss
    result = trainer.training_step(made, 0.0, 0)
    assert float(result["metrics"]["credit/in_loss"]) == pytest.approx(5 / 13)

    other = logits.detach().clone().requires_grad_()
    own = log_probs_of(other, made.sequences.roll(-1, 1))[:, :-1][:, -A:] * ACTIONS
    old, mask = made.action_log_probs, ACTIONS.double()
    total = loss(own, old, made.advantages, action_mask=ACTIONS)[0]
    torch.testing.assert_close(trainer.loss, total.detach())
    penalty = torch.where(MARKS, penalties(name, options, other, own - old, made.sequences), 0.0)
    per_response = ((penalty * mask).sum(-1) / mask.sum(-1)).mean()
    (total + ((penalty * mask).sum() / mask.sum() if by_token else per_response)).backward()
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("name", "options"), CREDITS)
def test_micro_batches_and_packing_change_nothing(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks ride through OpenRLHF's own split and padding of experiences; gradients of micro-batches add up."""
    from openrlhf.trainer.ppo_utils import experience as upstream

    run_with(monkeypatch, credit={"name": name, **options})
    whole, made = experience()
    made.kl = MARKS
    fields = ("sequences", "attention_mask", "action_mask", "action_log_probs", "advantages", "kl")

    def gradient(packed: bool, *batches: list[int]) -> Tensor:
        items = upstream.split_experience_batch(
            upstream.Experience(**{field: getattr(made, field).clone() for field in fields}, index=[0, 1, 2])
        )
        items = upstream.remove_padding_in_sequences(items)
        logits = whole.detach().clone().requires_grad_()
        for batch in batches:
            joined = upstream.make_experience_batch([items[row] for row in batch])
            trainer = actor_trainer(Trainer)(logits[batch][:, : joined.sequences.shape[1]], packed)
            trainer.actor_loss_fn = lambda *args, **kwargs: policy_loss()(*args, batch_num_tokens=13.0, **kwargs)
            trainer.training_step(joined, 0.0, 0)
        return logits.grad

    expected = gradient(False, [0, 1, 2])
    assert expected.abs().max() > 1e-2
    for packed in (False, True):
        for batches in ([[0, 1, 2]], [[1], [2, 0]], [[2], [1], [0]]):
            torch.testing.assert_close(gradient(packed, *batches), expected, rtol=1e-9, atol=1e-12)


def test_its_shape_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, credit={"name": "kl_cov"})
    made = experience()[1]
    made.kl = MARKS
    monkeypatch.setattr(type(credits.create("kl_cov")), "marked_loss", lambda self, t, marked, log_ratio: log_ratio[:1])
    with pytest.raises(RuntimeError, match=r"marked_loss returns \(1,\) for 5 tokens"):
        actor_trainer(Trainer)(experience()[0], False).training_step(made, 0.0, 0)
