# SPDX-License-Identifier: Apache-2.0
"""SimKO: its gradient is that of its paper's ratio, in a clipped loss, padded and packed, and costs no vocabulary."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ngrpo.config import parse, rules
from ngrpo.methods import credits
from ngrpo.methods.credits.base import LossTokens
from ngrpo.methods.credits.token_credits import quantiles
from ngrpo.trainers.common.log_probs import with_overrides
from ngrpo.trainers.common.policy_loss import rows_of_tokens
from ngrpo.trainers.openrlhf.actor_trainer import actor_trainer
from perturbations.errors import UsageError
from tests.fast.run import run_with
from tests.fast.simko_reference import ACTIONS, ADVANTAGES, LENGTHS, A, B, T, V, reference
from tests.token_log_probs import log_probs_of


def one_answer(rows: list[list[float]], tokens: list[int], advantage: float) -> tuple[LossTokens, Tensor]:
    """The tokens of one answer, one for each row of probabilities, and these as logits."""
    logits = torch.tensor(rows).log().requires_grad_()
    drawn = torch.tensor(tokens)
    log_probs = logits.log_softmax(-1).gather(1, drawn.unsqueeze(1)).squeeze(1)
    count = torch.arange(len(tokens))
    return LossTokens(logits, count, drawn, log_probs, torch.full((len(tokens),), advantage), 0 * count), logits


SURE, WAVERING = [0.97, 0.01, 0.01, 0.01], [0.4, 0.3, 0.2, 0.1]


def test_a_right_answer_shares_its_credit_with_the_likeliest() -> None:
    """At the one token above the 0.8-quantile: ∇ α (mean log π(k) − log π(y)) = α (1/3, 1/3, 1/3, −1)."""
    tokens, logits = one_answer([SURE, SURE, WAVERING, SURE], [0, 1, 3, 0], 2.0)
    advantages, term = credits.create("simko", alpha=0.3).in_loss(tokens)
    assert advantages.tolist() == [2.0] * 4
    assert term.tolist() == pytest.approx([0.0, 0.0, 0.3 * (math.log(0.4 * 0.3 * 0.2) / 3 - math.log(0.1)), 0.0])
    term.sum().backward()
    found = logits.grad.to_dense() if logits.grad.is_sparse else logits.grad
    assert found[2].tolist() == pytest.approx([0.1, 0.1, 0.1, -0.3], abs=1e-7)
    assert not found[[0, 1, 3]].any()


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


def test_the_quantile_is_each_answers_own() -> None:
    """0.8 of [0, 1, 2]: 1.6; of [5]: 5; of [4, 0]: 3.2; an answer without a token has none."""
    values, answers = torch.tensor([0.0, 1.0, 2.0, 5.0, 4.0, 0.0]), torch.tensor([0, 0, 0, 1, 3, 3])
    assert quantiles(values, answers, 0.8).tolist() == pytest.approx([1.6, 1.6, 1.6, 5.0, 3.2, 3.2])
    assert quantiles(values[:0], answers[:0], 0.8).tolist() == []


# --- in OpenRLHF's loss ----------------------------------------------------------------------------


def clipped_loss(log_probs: Tensor, old: Tensor, advantages: Tensor, *, action_mask: Tensor) -> tuple[Tensor]:
    """PPO's, as OpenRLHF's with the mean over all tokens."""
    ratio = (log_probs - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return ((loss * action_mask).sum() / action_mask.sum(),)


class Trainer:
    """OpenRLHF's, as far as its training step and its loss go; packed or padded."""

    def __init__(self, logits: Tensor, packed: bool) -> None:
        self.actor_loss_fn, self.actor = clipped_loss, None
        self.logits, self.packed = logits, packed

    def training_step(self, experience: Any, kl_ctl: float, step: int) -> dict[str, Any]:
        ids, mask = experience.sequences, experience.attention_mask.bool()
        scored = with_overrides(log_probs_of)
        if self.packed:
            flat = scored(self.logits[mask].unsqueeze(0), ids.roll(-1, 1)[mask].unsqueeze(0))
            log_probs = torch.zeros(ids.shape, dtype=flat.dtype).masked_scatter(mask, flat)
        else:
            log_probs = scored(self.logits, ids.roll(-1, 1))
        own = log_probs[:, :-1][:, -experience.action_mask.shape[1] :] * experience.action_mask
        self.seen = own.detach()
        loss, *_ = self.actor_loss_fn(
            own, experience.action_log_probs, experience.advantages, action_mask=experience.action_mask
        )
        self.loss = loss.detach()
        loss.backward()
        return {"metrics": {}, "weights": {}}


def experience(dtype: torch.dtype = torch.float64) -> tuple[Tensor, SimpleNamespace]:
    generator = torch.Generator().manual_seed(3)
    logits = (2.0 * torch.randn(B, T, V, generator=generator, dtype=dtype)).requires_grad_()
    mask = torch.zeros(B, T, dtype=torch.int64)
    for row, (first, last) in zip(mask, LENGTHS):
        row[first:last] = 1
    ids = torch.randint(0, V, (B, T), generator=generator)
    # The likeliest token stands at some of the places that waver.
    ids[1, 3:6] = logits[1, 2:5].argmax(-1)
    old = log_probs_of(logits.detach(), ids.roll(-1, 1))[:, :-1][:, -A:]
    old = old + 0.3 * torch.randn(old.shape, generator=generator, dtype=dtype)  # some of it beyond the clip
    made = SimpleNamespace(
        mm_train_inputs=None,
        sequences=ids,
        attention_mask=mask,
        action_mask=ACTIONS,
        action_log_probs=old,
        advantages=ADVANTAGES.to(dtype),
        kl=None,
    )
    return logits, made


@pytest.mark.parametrize("packed", [False, True])
def test_the_gradient_is_that_of_the_papers_ratio(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"k": 4, "alpha": 0.3, "penalty": 1.7, "quantile": 0.4}
    run_with(monkeypatch, credit={"name": "simko", **options})
    logits, made = experience()
    trainer = actor_trainer(Trainer)(logits, packed)
    loss_fn = trainer.actor_loss_fn
    result = trainer.training_step(made, 0.0, 0)
    assert trainer.actor_loss_fn is loss_fn
    assert result["weights"] == {"credit/in_loss": "token"}
    assert float(result["metrics"]["credit/in_loss"]) == pytest.approx(3 / 13)
    copy = logits.detach().clone().requires_grad_()
    reference(copy, made.sequences, made.action_log_probs, 4, 0.3, 1.7, 0.4).backward()
    torch.testing.assert_close(logits.grad, copy.grad, rtol=1e-6, atol=1e-8)
    # Without the credit it is another one, and the log-probabilities that the KL term sees are the same.
    plain = logits.detach().clone().requires_grad_()
    other = Trainer(plain, packed)
    other.training_step(made, 0.0, 0)
    assert torch.equal(other.seen, trainer.seen)
    assert (plain.grad - logits.grad).abs().max() > 1e-2


def test_it_makes_nothing_of_the_logits_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward with the credit allocate as often as much as without: its gradient is sparse."""
    monkeypatch.setattr("ngrpo.methods.credits.base._BLOCK_ELEMENTS", 4 * V)
    run_with(monkeypatch, credit={"name": "simko", "quantile": 0.0})
    counts = []
    for trainer in (Trainer, actor_trainer(Trainer)):
        logits, made = experience(torch.float32)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            trainer(logits, packed=False).training_step(made, 0.0, 0)
        sizes = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        counts.append(sum(size == logits.nbytes for size in sizes))
    assert 0 < counts[1] == counts[0]


def test_rows_that_are_no_tokens_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, credit={"name": "simko"})
    with pytest.raises(
        ValueError, match=r"given \(1, 5\) tokens, the attention mask is \(3, 7\).*no sequence-parallel"
    ):
        rows_of_tokens(ACTIONS, torch.ones(B, T), (1, 5))

    class Fused(Trainer):
        def training_step(self, experience: Any, kl_ctl: float, step: int) -> dict[str, Any]:
            if step:
                self.actor_loss_fn(made.action_log_probs, made.action_log_probs, made.advantages, action_mask=ACTIONS)
            return {"metrics": {}, "weights": {}}

    logits, made = experience()
    for step in (0, 1):
        with pytest.raises(RuntimeError, match="--credit simko did not come into effect"):
            actor_trainer(Fused)(logits, False).training_step(made, 0.0, step)


def test_what_a_credit_returns_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, credit={"name": "simko"})
    monkeypatch.setattr(type(credits.create("simko")), "in_loss", lambda self, t: (t.advantages[:1], t.log_probs))
    logits, made = experience()
    with pytest.raises(RuntimeError, match=r"in_loss returns \(1,\) and \(13,\) for 13 tokens"):
        actor_trainer(Trainer)(logits, False).training_step(made, 0.0, 0)


def test_a_step_without_anything_to_say_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A credit that returns None for a batch, and a batch without a generated token."""
    run_with(monkeypatch, credit={"name": "simko"})
    made = credits.create("simko")
    none = torch.zeros(0)
    empty = LossTokens(torch.zeros(1, 2, V), none.long(), none.long(), none, none, none.long())
    assert [part.tolist() for part in made.in_loss(empty)] == [[], []]
    monkeypatch.setattr(type(made), "in_loss", lambda self, tokens: None)
    gradients = []
    for trainer in (Trainer, actor_trainer(Trainer)):
        logits, batch = experience()
        trainer(logits, packed=False).training_step(batch, 0.0, 0)
        gradients.append(logits.grad)
    assert torch.equal(*gradients)


WORDS = ["--model", "m", "--task", "arithmetic", "--preset", "grpo", "--rollout.n_samples_per_prompt", "4"]
WORDS += ["--credit", "simko"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--perturbation", "latent", "--perturbation.density", "latent", "--algo.kl.init_coef", "0"],
            "--credit simko cannot be used with the density of --perturbation latent: no token is drawn",
        ),
        (["--ds.ring_attn_size", "2"], "--ds.ring_attn_size 2 cannot be used with --credit simko"),
        (["--credit.alpha", "1.5"], r"alpha='1.5': must be"),
    ],
)
def test_what_it_cannot_go_with(words: list[str], message: str, tmp_path: Any) -> None:
    with pytest.raises(UsageError, match=message):
        rules.checked(parse.run_config([*WORDS, *words]))
