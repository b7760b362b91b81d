# SPDX-License-Identifier: Apache-2.0
"""SimKO, KL-Cov and Lp-Reg in OpenRLHF's loss: their gradients, padded and packed."""

import copy
from types import SimpleNamespace
from typing import Any, NamedTuple

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

# B sequences of T tokens, of which the last A may be generated, over V tokens.
B = 3
T = 7
A = 5
V = 11
# Padded on either side.
REAL = torch.tensor(
    [
        [0, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 0],
        [0, 1, 1, 1, 1, 1, 1],
    ]
)
ACTIONS = torch.tensor(
    [
        [1, 1, 0, 1, 1],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
)
MARKS = torch.tensor(
    [
        [True, False, False, False, True],
        [False, True, False, False, False],
        [False, False, True, True, False],
    ]
)
TOKEN_COUNT = 13
MARKED_COUNT = 5

PENALTIES = pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("kl_cov", {"beta": 0.7}, id="kl_cov"),
        pytest.param("lp_reg", {"kappa": 0.3, "beta": 5.0}, id="lp_reg"),
    ],
)
LAYOUTS = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


class Trainer:
    """OpenRLHF's, as far as its training step and its loss go; packed or padded."""

    def __init__(self, logits: Tensor, packed: bool = False, loss: Any = None) -> None:
        self.actor_loss_fn = loss or policy_loss()
        self.actor = None
        self.logits = logits
        self.packed = packed

    def training_step(self, experience: Any, kl_ctl: float, step: int) -> dict[str, Any]:
        log_probs = self.log_probs(experience.sequences, experience.attention_mask.bool())
        actions = experience.action_mask.shape[1]
        action_log_probs = log_probs[:, :-1][:, -actions:] * experience.action_mask
        self.seen = action_log_probs.detach()
        arguments = {"action_mask": experience.action_mask}
        if hasattr(experience, "rollout_log_probs"):
            arguments["rollout_log_probs"] = experience.rollout_log_probs
        loss, *_ = self.actor_loss_fn(action_log_probs, experience.action_log_probs, experience.advantages, **arguments)
        self.loss = loss.detach()
        loss.backward()
        return {"metrics": {}, "weights": {}}

    def log_probs(self, ids: Tensor, mask: Tensor) -> Tensor:
        labels = ids.roll(-1, 1)
        score = with_overrides(log_probs_of)
        if not self.packed:
            return score(self.logits, labels)
        packed_log_probs = score(self.logits[mask].unsqueeze(0), labels[mask].unsqueeze(0))
        return torch.zeros(ids.shape, dtype=packed_log_probs.dtype).masked_scatter(mask, packed_log_probs)


class Batch(NamedTuple):
    logits: Tensor
    experience: SimpleNamespace


def batch_of(dtype: torch.dtype = torch.float64, marks: Tensor | None = None) -> Batch:
    """Logits and OpenRLHF's experience of three responses with A > 0, < 0 and < 0."""
    generator = torch.Generator().manual_seed(3)
    logits = (2.0 * torch.randn(B, T, V, generator=generator, dtype=dtype)).requires_grad_()
    ids = torch.randint(0, V, (B, T), generator=generator)
    # Some tokens that waver are the likeliest ones.
    ids[1, 3:6] = logits[1, 2:5].argmax(-1)
    log_probs = action_log_probs(logits.detach(), ids)
    moved = 0.3 * torch.randn(log_probs.shape, generator=generator, dtype=dtype)  # some of it beyond the clip
    experience = SimpleNamespace(
        mm_train_inputs=None,
        sequences=ids,
        attention_mask=REAL,
        action_mask=ACTIONS,
        action_log_probs=log_probs + moved,
        advantages=torch.tensor([[1.3], [-0.7], [-0.6]]).repeat(1, A).to(dtype),
        kl=marks,
    )
    return Batch(logits, experience)


def action_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """log π of the tokens that may be generated, (B, A)."""
    return log_probs_of(logits, ids.roll(-1, 1))[:, :-1][:, -A:]


def with_fresh_gradient(logits: Tensor) -> Tensor:
    """The same logits, without a gradient."""
    return logits.detach().clone().requires_grad_()


# --- SimKO -----------------------------------------------------------------------------------------


def simko_objective_of_paper(
    logits: Tensor, experience: Any, k: int, alpha: float, penalty: float, quantile: float
) -> Tensor:
    """The paper's objective, written with its own ratios, token by token; gradients stop where it says sg."""
    losses = []
    for sample in range(B):
        actions = [action for action in range(A) if ACTIONS[sample, action]]
        rows = [T - 1 - A + action for action in actions]
        log_probs = logits[sample, rows].log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1).detach()
        threshold = entropies.quantile(quantile)
        for row, action, entropy in zip(log_probs, actions, entropies):
            token = int(experience.sequences[sample, T - A + action])
            advantage = float(experience.advantages[sample, action])
            ratio = (row[token] - experience.action_log_probs[sample, action]).exp()
            if entropy > threshold and advantage > 0:
                likeliest = row.detach().argsort(descending=True)[:k]
                # Any old probabilities of the candidates: they cancel.
                ratios = (row[likeliest] + torch.linspace(0.5, 2.0, k)).exp()
                of_likeliest = ((ratio / ratios).detach() * ratios).sum() / k
                ratio = (1 - alpha) * ratio + alpha * of_likeliest
            elif entropy > threshold and advantage < 0 and token == int(row.argmax()):
                advantage *= penalty
            clipped = ratio.clamp(0.8, 1.2)
            losses.append(-torch.minimum(ratio * advantage, clipped * advantage))
    return torch.stack(losses).mean()


SIMKO = {"k": 4, "alpha": 0.3, "penalty": 1.7, "quantile": 0.4}


@LAYOUTS
def test_simkos_gradient_is_that_of_the_papers_ratio(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, credit={"name": "simko", **SIMKO})
    logits, experience = batch_of()
    actor_trainer(Trainer)(logits, packed).training_step(experience, 0.0, 0)
    of_paper = with_fresh_gradient(logits)
    simko_objective_of_paper(of_paper, experience, **SIMKO).backward()
    torch.testing.assert_close(logits.grad, of_paper.grad, rtol=1e-6, atol=1e-8)


@LAYOUTS
def test_simko_leaves_the_log_probabilities_of_the_kl_term_alone(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the credit the gradient is another one."""
    run_with(monkeypatch, credit={"name": "simko", **SIMKO})
    logits, experience = batch_of()
    trainer = actor_trainer(Trainer)(logits, packed)
    trainer.training_step(experience, 0.0, 0)
    plain = Trainer(with_fresh_gradient(logits), packed)
    plain.training_step(experience, 0.0, 0)
    assert torch.equal(plain.seen, trainer.seen)
    assert (plain.logits.grad - logits.grad).abs().max() > 1e-2


def test_a_step_logs_how_many_tokens_the_credit_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of thirteen tokens; the trainer's loss function is its own again."""
    run_with(monkeypatch, credit={"name": "simko", **SIMKO})
    logits, experience = batch_of()
    trainer = actor_trainer(Trainer)(logits)
    loss_fn = trainer.actor_loss_fn
    result = trainer.training_step(experience, 0.0, 0)
    assert trainer.actor_loss_fn is loss_fn
    assert result["weights"] == {"credit/in_loss": "token"}
    assert float(result["metrics"]["credit/in_loss"]) == pytest.approx(3 / 13)


def large_allocations(trainer_class: type[Trainer]) -> int:
    """How often a step allocates as much as all logits, or as those of all tokens."""
    logits, experience = batch_of(torch.float32)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        trainer_class(logits).training_step(experience, 0.0, 0)
    events = profiled.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    logits_of_tokens = TOKEN_COUNT * V * logits.itemsize
    return sizes.count(logits.nbytes) + sizes.count(logits_of_tokens)


def test_simko_makes_nothing_of_the_logits_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits, or those of all tokens, are allocated no more often than without it: its gradient is sparse."""
    monkeypatch.setattr("ngrpo.methods.credits.base._BLOCK_ELEMENTS", 4 * V)
    run_with(monkeypatch, credit={"name": "simko", "quantile": 0.0})
    plain = large_allocations(Trainer)
    assert plain > 0
    assert large_allocations(actor_trainer(Trainer)) == plain


# --- penalties -------------------------------------------------------------------------------------


def penalty_of_marked(name: str, options: dict[str, Any], logits: Tensor, log_ratio: Tensor, ids: Tensor) -> Tensor:
    """The penalty of each token, (B, A), by the papers' formulas, of all rows of the logits; 0 without a mark."""
    if name == "kl_cov":
        penalty = options["beta"] * (log_ratio**2).sqrt()
    else:
        p = logits[:, T - A - 1 : T - 1].softmax(-1)
        is_likely = p >= options["kappa"] * p.amax(-1, keepdim=True)
        q = torch.where(is_likely, p, 0.0)
        q = (q / q.sum(-1, keepdim=True)).detach()
        tokens = ids[:, T - A :].unsqueeze(-1)
        p_of_token = p.gather(-1, tokens).squeeze(-1)
        q_of_token = q.gather(-1, tokens).squeeze(-1)
        quotient = torch.where(q_of_token > 0.0, q_of_token / p_of_token, 1.0)
        penalty = options["beta"] * (quotient - 1.0 - quotient.log())
    return torch.where(MARKS, penalty, 0.0)


def mean_over_tokens(values: Tensor) -> Tensor:
    return (values * ACTIONS).sum() / ACTIONS.sum()


def mean_over_responses(values: Tensor) -> Tensor:
    return ((values * ACTIONS).sum(-1) / ACTIONS.sum(-1)).mean()


@LAYOUTS
@pytest.mark.parametrize("by_token", [True, False], ids=["by token", "by response"])
@PENALTIES
def test_the_gradient_is_the_loss_and_the_penalty(
    name: str, options: dict[str, Any], by_token: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averaged as the trainer averages its tokens, and the same where the ratio is clipped."""
    run_with(monkeypatch, credit={"name": name, **options})
    loss_fn = copy.copy(policy_loss())
    loss_fn.token_level_loss = by_token
    logits, experience = batch_of(marks=MARKS)
    trainer = actor_trainer(Trainer)(logits, packed, loss_fn)
    result = trainer.training_step(experience, 0.0, 0)
    assert float(result["metrics"]["credit/in_loss"]) == pytest.approx(MARKED_COUNT / TOKEN_COUNT)

    expected = with_fresh_gradient(logits)
    log_probs = action_log_probs(expected, experience.sequences) * ACTIONS
    old_log_probs = experience.action_log_probs
    loss, *_ = loss_fn(log_probs, old_log_probs, experience.advantages, action_mask=ACTIONS)
    torch.testing.assert_close(trainer.loss, loss.detach())
    penalty = penalty_of_marked(name, options, expected, log_probs - old_log_probs, experience.sequences)
    mean = mean_over_tokens if by_token else mean_over_responses
    (loss + mean(penalty)).backward()
    torch.testing.assert_close(logits.grad, expected.grad, rtol=1e-5, atol=1e-7)


@PENALTIES
def test_the_penalty_has_the_importance_weights_of_the_loss(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """min(π_old / π_rollout, 2) of each token, as its policy loss has it."""
    run_with(monkeypatch, credit={"name": name, **options})
    loss_fn = policy_loss("token", "clip", (0.0, 2.0))
    logits, experience = batch_of(marks=MARKS)
    log_weights = torch.linspace(-0.5, 1.5, B * A, dtype=torch.float64).view(B, A)
    rollout_log_probs = experience.action_log_probs - log_weights
    experience.rollout_log_probs = rollout_log_probs
    actor_trainer(Trainer)(logits, False, loss_fn).training_step(experience, 0.0, 0)

    weights = log_weights.exp().clamp(0.0, 2.0)
    assert weights[MARKS].min() < 0.9
    assert weights[MARKS].max() == 2.0
    expected = with_fresh_gradient(logits)
    log_probs = action_log_probs(expected, experience.sequences) * ACTIONS
    old_log_probs = experience.action_log_probs
    loss, *_ = loss_fn(
        log_probs,
        old_log_probs,
        experience.advantages,
        action_mask=ACTIONS,
        rollout_log_probs=rollout_log_probs,
    )
    penalty = penalty_of_marked(name, options, expected, log_probs - old_log_probs, experience.sequences)
    (loss + mean_over_tokens(weights * penalty)).backward()
    torch.testing.assert_close(logits.grad, expected.grad, rtol=1e-5, atol=1e-7)


def gradient_of_micro_batches(packed: bool, micro_batches: list[list[int]]) -> Tensor:
    """The summed gradient to the logits, of experiences that went through OpenRLHF's own split and padding."""
    from openrlhf.trainer.ppo_utils import experience as openrlhf_experience

    logits, experience = batch_of(marks=MARKS)
    fields = ("sequences", "attention_mask", "action_mask", "action_log_probs", "advantages", "kl")
    copies = {field: getattr(experience, field).clone() for field in fields}
    joined = openrlhf_experience.Experience(**copies, index=[0, 1, 2])
    samples = openrlhf_experience.split_experience_batch(joined)
    samples = openrlhf_experience.remove_padding_in_sequences(samples)

    def loss_of_step(*args: Tensor, **kwargs: Any) -> Any:
        return policy_loss()(*args, batch_num_tokens=float(TOKEN_COUNT), **kwargs)

    for numbers in micro_batches:
        micro_batch = openrlhf_experience.make_experience_batch([samples[number] for number in numbers])
        length = micro_batch.sequences.shape[1]
        trainer = actor_trainer(Trainer)(logits[numbers][:, :length], packed, loss_of_step)
        trainer.training_step(micro_batch, 0.0, 0)
    return logits.grad


@LAYOUTS
@pytest.mark.parametrize(
    "micro_batches",
    [
        pytest.param([[0, 1, 2]], id="one"),
        pytest.param([[1], [2, 0]], id="two"),
        pytest.param([[2], [1], [0]], id="three"),
    ],
)
@PENALTIES
def test_micro_batches_and_packing_change_nothing(
    name: str,
    options: dict[str, Any],
    micro_batches: list[list[int]],
    packed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Marks ride through OpenRLHF's own split and padding of experiences; gradients of micro-batches add up."""
    run_with(monkeypatch, credit={"name": name, **options})
    expected = gradient_of_micro_batches(packed=False, micro_batches=[[0, 1, 2]])
    assert expected.abs().max() > 1e-2
    gradient = gradient_of_micro_batches(packed, micro_batches)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


# --- errors, and steps in which nothing happens ----------------------------------------------------


def test_rows_that_are_no_tokens_of_the_batch() -> None:
    message = r"given \(1, 5\) tokens, the attention mask is \(3, 7\).*no sequence-parallel"
    with pytest.raises(ValueError, match=message):
        rows_of_tokens(ACTIONS, torch.ones(B, T), (1, 5))


@pytest.mark.parametrize("calls_loss", [False, True], ids=["no loss", "no forward"])
def test_a_credit_that_did_not_come_into_effect_is_an_error(calls_loss: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a trainer that does not call the loss, or that computes log-probabilities in a kernel of its own."""

    class FusedTrainer(Trainer):
        def training_step(self, experience: Any, kl_ctl: float, step: int) -> dict[str, Any]:
            log_probs = experience.action_log_probs
            if calls_loss:
                self.actor_loss_fn(log_probs, log_probs, experience.advantages, action_mask=ACTIONS)
            return {"metrics": {}, "weights": {}}

    run_with(monkeypatch, credit={"name": "simko"})
    logits, experience = batch_of()
    with pytest.raises(RuntimeError, match="--credit simko did not come into effect"):
        actor_trainer(FusedTrainer)(logits).training_step(experience, 0.0, 0)


def one_advantage(self: credits.Credit, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    return tokens.advantages[:1], tokens.log_probs


def one_penalty(self: credits.Credit, tokens: LossTokens, marked: Tensor, log_ratio: Tensor) -> Tensor:
    return log_ratio[:1]


@pytest.mark.parametrize(
    ("name", "method", "replacement", "message"),
    [
        ("simko", "in_loss", one_advantage, r"\(1,\) and \(13,\) for 13 tokens"),
        ("kl_cov", "marked_loss", one_penalty, r"\(1,\) for 5 tokens"),
    ],
)
def test_the_shape_of_what_a_credit_returns_is_checked(
    name: str, method: str, replacement: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(monkeypatch, credit={"name": name})
    monkeypatch.setattr(type(credits.create(name)), method, replacement)
    logits, experience = batch_of(marks=MARKS)
    with pytest.raises(RuntimeError, match=f"{method} returns {message}"):
        actor_trainer(Trainer)(logits).training_step(experience, 0.0, 0)


def test_simko_of_a_batch_without_a_generated_token() -> None:
    no_numbers = torch.zeros(0)
    no_ids = no_numbers.long()
    tokens = LossTokens(
        logits=torch.zeros(1, 2, V),
        rows=no_ids,
        tokens=no_ids,
        log_probs=no_numbers,
        advantages=no_numbers,
        responses=no_ids,
    )
    advantages, term = credits.create("simko").in_loss(tokens)
    assert advantages.tolist() == []
    assert term.tolist() == []


def test_a_credit_that_returns_none_leaves_the_step_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, credit={"name": "simko"})
    monkeypatch.setattr(type(credits.create("simko")), "in_loss", lambda self, tokens: None)
    plain_logits, experience = batch_of()
    Trainer(plain_logits).training_step(experience, 0.0, 0)
    logits, experience = batch_of()
    actor_trainer(Trainer)(logits).training_step(experience, 0.0, 0)
    assert logits.grad.any()
    assert torch.equal(logits.grad, plain_logits.grad)
