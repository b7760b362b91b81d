# SPDX-License-Identifier: Apache-2.0
"""SimKO, KL-Cov and Lp-Reg in OpenRLHF's loss: their gradients, padded and packed."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ngrpo.methods import credits
from ngrpo.methods.credits.base import LossTokens
from ngrpo.trainers.common.log_probs import with_overrides
from ngrpo.trainers.common.policy_loss import rows_of_tokens
from ngrpo.trainers.openrlhf.actor_trainer import actor_trainer
from tests.support.gradient_problem import policy_loss
from tests.support.run import run_with
from tests.support.token_log_probs import log_probs_of

B, T, A, V = 3, 7, 5, 11
REAL = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1]])  # padded on either side
ACTIONS = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
MARKS = torch.tensor([[1, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0, 0, 1, 1, 0]]).bool()
PENALTIES = [("kl_cov", {"beta": 0.7}), ("lp_reg", {"kappa": 0.3, "beta": 5.0})]


class Trainer:
    """OpenRLHF's, as far as its training step and its loss go; packed or padded."""

    def __init__(self, logits: Tensor, packed: bool = False, loss: Any = None) -> None:
        self.actor_loss_fn, self.actor = loss or policy_loss(), None
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
        given = {"action_mask": experience.action_mask}
        if hasattr(experience, "rollout_log_probs"):
            given["rollout_log_probs"] = experience.rollout_log_probs
        loss, *_ = self.actor_loss_fn(own, experience.action_log_probs, experience.advantages, **given)
        self.loss = loss.detach()
        loss.backward()
        return {"metrics": {}, "weights": {}}


def experience(dtype: torch.dtype = torch.float64, marks: Tensor | None = None) -> tuple[Tensor, SimpleNamespace]:
    generator = torch.Generator().manual_seed(3)
    logits = (2.0 * torch.randn(B, T, V, generator=generator, dtype=dtype)).requires_grad_()
    ids = torch.randint(0, V, (B, T), generator=generator)
    # Some tokens that waver are the likeliest ones.
    ids[1, 3:6] = logits[1, 2:5].argmax(-1)
    old = log_probs_of(logits.detach(), ids.roll(-1, 1))[:, :-1][:, -A:]
    old = old + 0.3 * torch.randn(old.shape, generator=generator, dtype=dtype)  # some of it beyond the clip
    made = SimpleNamespace(
        mm_train_inputs=None,
        sequences=ids,
        attention_mask=REAL,
        action_mask=ACTIONS,
        action_log_probs=old,
        advantages=torch.tensor([[1.3], [-0.7], [-0.6]]).repeat(1, A).to(dtype),
        kl=marks,
    )
    return logits, made


def again(logits: Tensor) -> Tensor:
    """The same logits, without a gradient."""
    return logits.detach().clone().requires_grad_()


def of_simkos_paper(logits: Tensor, made: Any, k: int, alpha: float, penalty: float, quantile: float) -> Tensor:
    """The paper's objective, written with its own ratios, token by token; gradients stop where it says sg."""
    losses = []
    for b in range(B):
        of_answer = [t for t in range(A) if ACTIONS[b, t]]
        log_p = logits[b, [T - 1 - A + t for t in of_answer]].log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1).detach()
        threshold = entropy.quantile(quantile)
        for row, t, h in zip(log_p, of_answer, entropy):
            y, a = int(made.sequences[b, T - A + t]), float(made.advantages[b, t])
            gamma = (row[y] - made.action_log_probs[b, t]).exp()
            if h > threshold and a > 0:
                best = row.detach().argsort(descending=True)[:k]
                # Any old probabilities of the candidates: they cancel.
                of_k = (row[best] + torch.linspace(0.5, 2.0, k)).exp()
                gamma = (1 - alpha) * gamma + alpha / k * ((gamma / of_k).detach() * of_k).sum()
            elif h > threshold and a < 0 and y == int(row.argmax()):
                a *= penalty
            losses.append(-torch.minimum(gamma * a, gamma.clamp(0.8, 1.2) * a))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("packed", [False, True])
def test_simkos_gradient_is_that_of_the_papers_ratio(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"k": 4, "alpha": 0.3, "penalty": 1.7, "quantile": 0.4}
    run_with(monkeypatch, credit={"name": "simko", **options})
    logits, made = experience()
    trainer = actor_trainer(Trainer)(logits, packed)
    loss_fn = trainer.actor_loss_fn
    result = trainer.training_step(made, 0.0, 0)
    assert trainer.actor_loss_fn is loss_fn
    assert result["weights"] == {"credit/in_loss": "token"}
    assert float(result["metrics"]["credit/in_loss"]) == pytest.approx(3 / 13)
    of_paper = again(logits)
    of_simkos_paper(of_paper, made, **options).backward()
    torch.testing.assert_close(logits.grad, of_paper.grad, rtol=1e-6, atol=1e-8)
    # Without the credit it is another one, and the log-probabilities that the KL term sees are the same.
    plain = Trainer(again(logits), packed)
    plain.training_step(made, 0.0, 0)
    assert torch.equal(plain.seen, trainer.seen)
    assert (plain.logits.grad - logits.grad).abs().max() > 1e-2


def test_simko_makes_nothing_of_the_logits_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits, or those of all tokens, are allocated no more often than without it: its gradient is sparse."""
    monkeypatch.setattr("ngrpo.methods.credits.base._BLOCK_ELEMENTS", 4 * V)
    run_with(monkeypatch, credit={"name": "simko", "quantile": 0.0})
    counts = []
    for trainer in (Trainer, actor_trainer(Trainer)):
        logits, made = experience(torch.float32)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            trainer(logits).training_step(made, 0.0, 0)
        sizes = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        whole = logits.nbytes, int(made.action_mask.sum()) * V * logits.itemsize
        counts.append(sum(size in whole for size in sizes))
    assert 0 < counts[1] == counts[0]


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
@pytest.mark.parametrize(("name", "options"), PENALTIES)
def test_the_gradient_is_the_loss_and_the_penalty(
    name: str, options: dict[str, Any], by_token: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averaged as the trainer averages its tokens, and the same where the ratio is clipped."""
    run_with(monkeypatch, credit={"name": name, **options})
    loss = copy.copy(policy_loss())
    loss.token_level_loss = by_token
    logits, made = experience(marks=MARKS)
    trainer = actor_trainer(Trainer)(logits, packed, loss)
    result = trainer.training_step(made, 0.0, 0)
    assert float(result["metrics"]["credit/in_loss"]) == pytest.approx(5 / 13)

    other = again(logits)
    own = log_probs_of(other, made.sequences.roll(-1, 1))[:, :-1][:, -A:] * ACTIONS
    old, mask = made.action_log_probs, ACTIONS.double()
    total = loss(own, old, made.advantages, action_mask=ACTIONS)[0]
    torch.testing.assert_close(trainer.loss, total.detach())
    penalty = torch.where(MARKS, penalties(name, options, other, own - old, made.sequences), 0.0)
    per_response = ((penalty * mask).sum(-1) / mask.sum(-1)).mean()
    (total + ((penalty * mask).sum() / mask.sum() if by_token else per_response)).backward()
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("name", "options"), PENALTIES)
def test_the_penalty_has_the_importance_weights_of_the_loss(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """min(π_old / π_rollout, 2) of each token, as its policy loss has it."""
    run_with(monkeypatch, credit={"name": name, **options})
    loss = policy_loss("token", "clip", (0.0, 2.0))
    logits, made = experience(marks=MARKS)
    made.rollout_log_probs = made.action_log_probs - torch.linspace(-0.5, 1.5, B * A, dtype=torch.float64).view(B, A)
    actor_trainer(Trainer)(logits, False, loss).training_step(made, 0.0, 0)

    other = again(logits)
    own = log_probs_of(other, made.sequences.roll(-1, 1))[:, :-1][:, -A:] * ACTIONS
    old, rollout = made.action_log_probs, made.rollout_log_probs
    total = loss(own, old, made.advantages, action_mask=ACTIONS, rollout_log_probs=rollout)[0]
    weights = (old - rollout).exp().clamp(0.0, 2.0)
    assert weights[MARKS].min() < 0.9 and weights[MARKS].max() == 2.0
    penalty = torch.where(MARKS, penalties(name, options, other, own - old, made.sequences), 0.0)
    (total + (weights * penalty * ACTIONS).sum() / ACTIONS.sum()).backward()
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("name", "options"), PENALTIES)
def test_micro_batches_and_packing_change_nothing(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks ride through OpenRLHF's own split and padding of experiences; gradients of micro-batches add up."""
    from openrlhf.trainer.ppo_utils import experience as upstream

    run_with(monkeypatch, credit={"name": name, **options})
    whole, made = experience(marks=MARKS)
    fields = ("sequences", "attention_mask", "action_mask", "action_log_probs", "advantages", "kl")

    def loss(*args: Tensor, **kwargs: Any) -> Any:
        return policy_loss()(*args, batch_num_tokens=13.0, **kwargs)

    def gradient(packed: bool, *batches: list[int]) -> Tensor:
        items = upstream.split_experience_batch(
            upstream.Experience(**{field: getattr(made, field).clone() for field in fields}, index=[0, 1, 2])
        )
        items = upstream.remove_padding_in_sequences(items)
        logits = again(whole)
        for batch in batches:
            joined = upstream.make_experience_batch([items[row] for row in batch])
            trainer = actor_trainer(Trainer)(logits[batch][:, : joined.sequences.shape[1]], packed, loss)
            trainer.training_step(joined, 0.0, 0)
        return logits.grad

    expected = gradient(False, [0, 1, 2])
    assert expected.abs().max() > 1e-2
    for packed in (False, True):
        for batches in ([[0, 1, 2]], [[1], [2, 0]], [[2], [1], [0]]):
            torch.testing.assert_close(gradient(packed, *batches), expected, rtol=1e-9, atol=1e-12)


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
            actor_trainer(Fused)(logits).training_step(made, 0.0, step)


@pytest.mark.parametrize(
    ("name", "method", "answer", "message"),
    [
        ("simko", "in_loss", lambda self, t: (t.advantages[:1], t.log_probs), r"\(1,\) and \(13,\) for 13 tokens"),
        ("kl_cov", "marked_loss", lambda self, t, marked, log_ratio: log_ratio[:1], r"\(1,\) for 5 tokens"),
    ],
)
def test_the_shape_of_what_a_credit_returns_is_checked(
    name: str, method: str, answer: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(monkeypatch, credit={"name": name})
    monkeypatch.setattr(type(credits.create(name)), method, answer)
    logits, made = experience(marks=MARKS)
    with pytest.raises(RuntimeError, match=f"{method} returns {message}"):
        actor_trainer(Trainer)(logits).training_step(made, 0.0, 0)


def test_a_step_without_anything_to_say_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A credit that returns None for a batch, and a batch without a generated token."""
    run_with(monkeypatch, credit={"name": "simko"})
    made, none = credits.create("simko"), torch.zeros(0)
    empty = LossTokens(torch.zeros(1, 2, V), none.long(), none.long(), none, none, none.long())
    assert [part.tolist() for part in made.in_loss(empty)] == [[], []]
    monkeypatch.setattr(type(made), "in_loss", lambda self, tokens: None)
    gradients = []
    for trainer in (Trainer, actor_trainer(Trainer)):
        logits, batch = experience()
        trainer(logits).training_step(batch, 0.0, 0)
        gradients.append(logits.grad)
    assert torch.equal(*gradients)
