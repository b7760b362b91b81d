# SPDX-License-Identifier: Apache-2.0
"""Score centering: mean scores by hand, the gradient of the stated loss, a bandit's mean score with and without it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ngrpo.config import run_notes
from ngrpo.config.complete_run import CompleteRun
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import sampling_schedules
from ngrpo.rollout import settings
from ngrpo.trainers.common import score_centering
from ngrpo.trainers.common.log_probs import corrected, with_overrides
from ngrpo.trainers.common.sample_records import RequestedDraws, requested_draws, unpack
from ngrpo.trainers.common.score_centering import (
    ImportanceWeight,
    Sampler,
    ScoreCentering,
    TokenDraws,
    mean_scores,
)
from ngrpo.trainers.openrlhf import rollout_actor
from ngrpo.trainers.openrlhf.actor_trainer import actor_trainer
from perturbations import FinishedTrajectory, ReplayRecord, UsageError, create
from perturbations.base import Perturbation
from perturbations.embeddings import matrix_embeddings
from perturbations.replay.sampling_mask import SamplingMask
from perturbations.step import Step
from tests.support.gradient_problem import policy_loss
from tests.support.run import run_of, run_with
from tests.support.token_log_probs import log_probs_of

CUTS = create("cuts", k=2, until="none")
HALVED = sampling_schedules.create("ladder", least=2.0, most=2.0)
"""Twice the requested temperature for each of several responses."""
REQUEST = RequestedDraws(temperature=1.0, training_step=0, answer=0, answers=2)


def trajectory(
    left: dict[int, list[int]] | None, vocabulary: int, length: int, perturbed: tuple[int, ...] = (), prompt: int = 1
) -> dict[str, bytes]:
    """What a sample carries whose filters left these tokens at these positions, with perturbed positions."""
    positions = np.array(perturbed, dtype=np.int32)
    record = ReplayRecord(
        seed=1,
        prompt_tokens=prompt,
        num_tokens=length,
        positions=positions,
        ids=np.zeros((len(positions), 1), dtype=np.int32),
        weights=np.ones((len(positions), 1), dtype=np.float32),
        sigma=None,
        agreed=np.ones(len(positions), dtype=bool),
    )
    mask = None
    if left is not None:
        mask = SamplingMask.of(vocabulary, {position: (False, np.array(ids)) for position, ids in left.items()})
    return FinishedTrajectory(record, np.zeros(length, np.float32), mask).pack()


def draws_of(
    count: int, *, left: list[int] | None = None, perturbed: bool = False, request: RequestedDraws | None = None
) -> TokenDraws:
    """Draws of tokens that were all drawn alike."""
    return TokenDraws(
        places=range(count),
        ids_left=[None if left is None else np.array(left)] * count,
        perturbed=np.full(count, perturbed),
        generated=np.arange(count),
        requests=[] if request is None else [request] * count,
    )


# ---- by hand: p = (0.5, 0.3, 0.2) ----------------------------------------------------------------------------------

TOP_2 = [0, 1]
"""q = (0.625, 0.375, 0)."""
AT_TWICE = {"schedule": HALVED}
"""q ∝ √p: (0.415446, 0.321803, 0.262751); p / q = (1.203526, 0.932247, 0.761177)."""


@pytest.mark.parametrize(
    ("sampler", "draws", "mean"),
    [
        pytest.param({}, {}, [0.0, 0.0, 0.0], id="q = p"),
        pytest.param({}, {"left": TOP_2}, [0.125, 0.075, -0.2], id="top-k: q − p"),
        # p / q = 0.8 at both tokens: c = p on S, with the sum 0.8
        pytest.param({"weight": ImportanceWeight(0.0, 10.0)}, {"left": TOP_2}, [0.1, 0.06, -0.16], id="top-k, weights"),
        pytest.param(
            {"weight": ImportanceWeight(0.0, 0.5)}, {"left": TOP_2}, [0.0625, 0.0375, -0.1], id="top-k, f 0.5"
        ),
        pytest.param({"corrects_mask": True}, {"left": TOP_2}, [0.0, 0.0, 0.0], id="top-k: p is π_S already"),
        pytest.param({"perturbation": CUTS}, {"perturbed": True}, [0.0, 0.2, -0.2], id="cuts: q = ½ at both"),
        pytest.param({"perturbation": CUTS}, {"perturbed": False}, [0.0, 0.0, 0.0], id="cuts, unperturbed"),
        # the filters leave one candidate, token 1; or none, so that the sampled token stays
        pytest.param(
            {"perturbation": CUTS}, {"perturbed": True, "left": [1, 2]}, [-0.5, 0.7, -0.2], id="cuts, filtered"
        ),
        pytest.param({"perturbation": CUTS}, {"perturbed": True, "left": [2]}, [-0.5, -0.3, 0.8], id="cuts, all cut"),
        pytest.param(AT_TWICE, {"request": REQUEST}, [-0.084554, 0.021803, 0.062751], id="schedule"),
        pytest.param(
            {**AT_TWICE, "weight": ImportanceWeight(0.0, 1.1)},
            {"request": REQUEST},
            [-0.021505, 0.012903, 0.008602],
            id="schedule, clipped weights: f = (1.1, 0.932247, 0.761177)",
        ),
        pytest.param(
            {**AT_TWICE, "weight": ImportanceWeight(0.9, 1.1, drops=True)},
            {"request": REQUEST},
            [-0.15, 0.21, -0.06],
            id="schedule, dropped weights: c = (0, 0.3, 0)",
        ),
        # f is of π / π_rollout as the engine reports it, 1 here, and not of p over the uniform draw
        pytest.param(
            {"perturbation": CUTS, "weight": ImportanceWeight(0.0, 1.1)},
            {"perturbed": True},
            [0.0, 0.2, -0.2],
            id="cuts, weights",
        ),
    ],
)
def test_mean_scores_by_hand(sampler: dict[str, Any], draws: dict[str, Any], mean: list[float]) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log() + 1.7
    found = mean_scores(Sampler(**sampler), draws_of(1, **draws), logits)
    assert found[0].tolist() == pytest.approx(mean, abs=1e-6)


def test_the_rollouts_and_the_trainers_temperature() -> None:
    """At 0.5 the trainer's logits are z / 0.5, and a request of e3 at 0.75 is drawn from softmax(z / 0.75)."""
    z = torch.tensor([[1.2, -0.3, 0.4, 0.1]])
    e3 = sampling_schedules.create("e3")
    request = RequestedDraws(temperature=0.75, training_step=3)
    sampler = Sampler(temperature=0.5, schedule=e3)
    found = mean_scores(sampler, draws_of(1, request=request), z / 0.5)
    torch.testing.assert_close(found, torch.softmax(z / 0.75, -1) - torch.softmax(z / 0.5, -1))


def test_a_schedule_has_its_own_step_and_place() -> None:
    """EAD's factor at s = 0, d_0 = 25, released: exponent t / 500 from s = 1 on, d_s = 20 · 30."""
    ead = sampling_schedules.create("ead", variant="released", c=0)
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(0)).repeat(3, 1)
    draws = draws_of(3, request=RequestedDraws(temperature=1.0, training_step=0))
    found = mean_scores(Sampler(schedule=ead), draws, logits)
    for place in range(3):
        factor = 2.2 - np.exp(place / 600)
        expected = torch.softmax(logits[0] / factor, -1) - torch.softmax(logits[0], -1)
        torch.testing.assert_close(found[place], expected)


@pytest.mark.parametrize("left", [None, [1, 3, 4, 5], [0]])
def test_the_formula_of_cuts_is_what_it_draws(left: list[int] | None) -> None:
    """20,000 draws of a position at temperature 0.7: each token's share is within 4.5 standard errors."""
    count = 20_000
    perturbation = create("cuts", k=4, delta=0.1)
    z = torch.tensor([0.3, 1.1, 0.2, -0.4, 0.9, -2.0])
    logits = (z / 0.7).repeat(count, 1)
    is_left = torch.ones(6, dtype=torch.bool)
    if left is not None:
        is_left[:] = False
        is_left[left] = True
    drawable = logits.masked_fill(~is_left, -torch.inf)
    step = Step(
        logits=logits,
        sampled=torch.multinomial(drawable.softmax(-1), 1, generator=torch.Generator().manual_seed(1)).squeeze(-1),
        temperature=torch.full((count,), 0.7),
        seeds=torch.full((count,), 3),
        positions=torch.arange(count),
        embeddings=matrix_embeddings(torch.randn(6, 2)),
        drawable=None if left is None else drawable,
    )
    shares = torch.bincount(perturbation.propose(step).tokens, minlength=6) / count
    (formula,) = perturbation.text_probabilities(logits[:1], 0.7, is_left.unsqueeze(0))
    assert formula.sum() == pytest.approx(1.0)
    deviation = (formula * (1.0 - formula) / count).sqrt()
    assert ((shares - formula).abs() <= 4.5 * deviation + 1e-9).all()
    assert torch.equal(shares > 0, formula > 0)


# ---- the loss of a training step -----------------------------------------------------------------------------------

B, T, A, V = 3, 7, 5, 11
REAL = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1]])  # padded on either side
ACTIONS = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
FIRST = [1, 0, 1]
"""The column of each sample's first token."""


class Trainer:
    """OpenRLHF's, as far as its training step and its loss go; packed or padded."""

    def __init__(self, logits: Tensor, loss: Any, packed: bool) -> None:
        self.actor_loss_fn = loss
        self.actor = SimpleNamespace(temperature=1.0)
        self.logits = logits
        self.packed = packed

    def training_step(self, experience: Any, kl_ctl: float, step: int) -> dict[str, Any]:
        tokens = experience.sequences
        mask = experience.attention_mask.bool()
        scored = with_overrides(log_probs_of)
        if self.packed:
            flat = scored(self.logits[mask].unsqueeze(0), tokens.roll(-1, 1)[mask].unsqueeze(0))
            log_probs = torch.zeros(tokens.shape, dtype=flat.dtype).masked_scatter(mask, flat)
        else:
            log_probs = scored(self.logits, tokens.roll(-1, 1))
        log_probs = log_probs[:, :-1][:, -A:] * experience.action_mask
        loss, *_ = self.actor_loss_fn(
            log_probs,
            log_probs.detach(),  # one update per rollout: the old policy is the current one
            experience.advantages,
            action_mask=experience.action_mask,
            rollout_log_probs=experience.rollout_log_probs,
        )
        self.loss = loss.detach()
        loss.backward()
        return {"metrics": {}, "weights": {}}


def experience() -> tuple[Tensor, SimpleNamespace, Tensor]:
    """Logits with a gradient, a batch drawn under filters, and log q of every token, (B, A, V), -inf where cut."""
    generator = torch.Generator().manual_seed(3)
    logits = 1.5 * torch.randn(B, T, V, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, V, (B, T), generator=generator)
    left_by_sample: list[dict[int, list[int]]] = [{} for _ in range(B)]
    log_sampled = logits[:, T - A - 1 : T - 1].log_softmax(-1)
    for sample, column in [(0, 0), (0, 3), (1, 1), (2, 2), (2, 4)]:
        position = T - A + column - FIRST[sample]
        ids = sorted({int(tokens[sample, T - A + column]), 1, 4, 7})
        left_by_sample[sample][position] = ids
        cut = torch.ones(V, dtype=torch.bool)
        cut[ids] = False
        log_sampled[sample, column] = logits[sample, T - A - 1 + column].masked_fill(cut, -torch.inf).log_softmax(-1)
    lengths = REAL.sum(-1).tolist()
    made = SimpleNamespace(
        mm_train_inputs=[trajectory(left, V, length) for left, length in zip(left_by_sample, lengths)],
        sequences=tokens,
        attention_mask=REAL,
        action_mask=ACTIONS,
        advantages=torch.tensor([[1.3], [-0.7], [-0.6]], dtype=torch.float64).repeat(1, A),
        rollout_log_probs=log_sampled.gather(-1, tokens[:, T - A :].unsqueeze(-1)).squeeze(-1),
    )
    return logits.requires_grad_(), made, log_sampled


def stated_loss(
    logits: Tensor, made: Any, log_sampled: Tensor, weight_of_loss: tuple[str, float, float] | None
) -> Tensor:
    """−A [f(p_y / q_y) log p_y − Σ_v sg(q_v f(p_v / q_v)) log p_v], averaged over the tokens."""
    log_policy = logits[:, T - A - 1 : T - 1].log_softmax(-1)
    sampled = log_sampled.exp()
    ratio = torch.where(sampled > 0, (log_policy.detach() - log_sampled).exp(), 0.0)
    weight = torch.ones_like(ratio)
    if weight_of_loss is not None:
        mode, low, high = weight_of_loss
        weight = ratio.clamp(low, high)
        if mode == "mask":
            weight = torch.where(weight == ratio, ratio, 0.0)
    drawn = made.sequences[:, T - A :].unsqueeze(-1)
    of_token = (weight * log_policy).gather(-1, drawn).squeeze(-1)
    of_mean = (sampled * weight * log_policy).sum(-1)
    return (-made.advantages * (of_token - of_mean) * ACTIONS).sum() / ACTIONS.sum()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("weight", [None, ("clip", 0.0, 10.0), ("clip", 0.9, 2.0), ("mask", 0.26, 1.1)])
def test_the_gradient_is_the_stated_loss(
    weight: tuple[str, float, float] | None, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the weights are bounded, in blocks of two rows, and with the metric of what was removed."""
    monkeypatch.setattr(score_centering, "_BLOCK_ELEMENTS", 2 * V)
    run_with(monkeypatch, sampling={"top_k": 4, "score_centering": True})
    logits, made, log_sampled = experience()
    loss = policy_loss()
    if weight is not None:
        mode, low, high = weight
        loss = policy_loss("token", mode, (low, high))
    trainer = actor_trainer(Trainer)(logits, loss, packed)
    result = trainer.training_step(made, 0.0, 0)

    other = logits.detach().clone().requires_grad_()
    stated_loss(other, made, log_sampled, weight).backward()
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-6, atol=1e-9)

    # Without it the gradient is another one, and the loss has the same value.
    plain = Trainer(logits.detach().clone().requires_grad_(), loss, packed)
    plain.training_step(made, 0.0, 0)
    assert torch.equal(plain.loss, trainer.loss)
    assert (plain.logits.grad - logits.grad).abs().max() > 5e-3
    assert result["weights"] == {"score_centering/removed": "token"}
    removed = float(result["metrics"]["score_centering/removed"])
    if weight is None:
        distances = (log_sampled.exp() - other.detach()[:, T - A - 1 : T - 1].softmax(-1)).abs().sum(-1) / 2
        assert removed == pytest.approx(float((distances * ACTIONS).sum() / ACTIONS.sum()))
    assert removed > 0.01


def test_only_the_recorded_positions_are_the_perturbations(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUTS at positions 2 and 4 of a left-padded sample: the other rows have the plain gradient."""
    logits = torch.randn(1, 7, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    real = torch.tensor([[0, 1, 1, 1, 1, 1, 1]])
    tokens = logits.detach().argmax(-1).roll(1, 1)  # each is the likeliest, so that CUTS may draw it
    carried = unpack([trajectory({}, V, 6, perturbed=(2, 4), prompt=2)])
    actions = torch.ones(1, 4)
    centering = ScoreCentering(policy_loss(), Sampler(perturbation=CUTS), action_mask=actions, attention_mask=real)
    with centering.watching(carried, [None]):
        log_probs = with_overrides(log_probs_of)(logits, tokens.roll(-1, 1))[:, 2:-1]
    total, *_ = centering(log_probs, log_probs.detach(), actions.double(), action_mask=actions)
    total.backward()

    expected = torch.zeros(7, V, dtype=torch.float64)
    policy = logits.detach()[0].softmax(-1)
    for row in (2, 3, 4, 5):  # the rows before tokens 3 to 6, at positions 2 to 5
        drawn = policy[row].clone()
        if row in (2, 4):
            drawn = torch.zeros(V, dtype=torch.float64)
            drawn[policy[row].topk(2).indices] = 0.5
        expected[row] = (drawn - torch.eye(V)[tokens[0, row + 1]]) / 4
    torch.testing.assert_close(logits.grad[0], expected, rtol=0, atol=1e-7)
    assert float(centering.removed) == pytest.approx(
        sum(float((expected[row] * 4 + torch.eye(V)[tokens[0, row + 1]] - policy[row]).abs().sum()) for row in (2, 4))
        / 8
    )


def test_a_schedule_concerns_every_token_by_its_place_in_the_response() -> None:
    """Two responses after prompts of 2 and 3 tokens, each with its own request; filters cut one token's set."""
    real = torch.ones(2, 6)
    actions = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])
    carried = [trajectory({3: [1, 2]}, V, 6, prompt=3), trajectory({}, V, 6, prompt=4)]
    requests = [RequestedDraws(1.0, training_step=2, answer=answer, answers=2) for answer in range(2)]
    for is_scheduled in (True, False):
        sampler = Sampler(schedule=HALVED if is_scheduled else None)
        centering = ScoreCentering(policy_loss(), sampler, action_mask=actions, attention_mask=real)
        draws = centering._draws(unpack(carried), requests)
        if not is_scheduled:
            assert draws.places == [0] and draws.ids_left[0].tolist() == [1, 2] and len(draws.requests) == 0
            continue
        assert draws.places == [0, 1, 2, 3, 4]
        assert draws.generated.tolist() == [0, 1, 2, 0, 1]
        assert [request.answer for request in draws.requests] == [0, 0, 0, 1, 1]
        assert [ids is None for ids in draws.ids_left] == [False, True, True, True, True]


def test_without_weights_it_is_the_gradient_of_the_corrected_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """e_y − p − (q − p) = e_y − q, which is ∇ log π_S(y): for filters alone the two flags agree at ratio 1."""
    gradients = []
    for flag in ("score_centering", "correct_mask"):
        run_with(monkeypatch, sampling={"top_k": 4, flag: True})
        logits, made, _ = experience()
        actor_trainer(Trainer)(logits, policy_loss(), False).training_step(made, 0.0, 0)
        gradients.append(logits.grad)
    torch.testing.assert_close(*gradients)


def test_a_credit_changes_the_advantages_of_both_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The advantages that the loss is called with weigh the drawn token and the mean alike."""
    run_with(monkeypatch, sampling={"top_k": 4, "score_centering": True})
    logits, made, log_sampled = experience()
    made.advantages = torch.linspace(-1.0, 2.0, B * A, dtype=torch.float64).view(B, A)
    actor_trainer(Trainer)(logits, policy_loss(), False).training_step(made, 0.0, 0)
    other = logits.detach().clone().requires_grad_()
    stated_loss(other, made, log_sampled, None).backward()
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-6, atol=1e-9)


def test_what_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, sampling={"score_centering": True})
    logits, made, _ = experience()
    made.mm_train_inputs = [trajectory(None, V, 6), *made.mm_train_inputs[1:]]
    with pytest.raises(RuntimeError, match="1 of 3 samples came without their sampling mask"):
        actor_trainer(Trainer)(logits, policy_loss(), False).training_step(made, 0.0, 0)

    class Fused(Trainer):
        def training_step(self, experience: Any, kl_ctl: float, step: int) -> dict[str, Any]:
            if step:
                zeros = torch.zeros(B, A)
                self.actor_loss_fn(zeros, zeros, zeros, action_mask=ACTIONS)
            return {"metrics": {}, "weights": {}}

    for step in (0, 1):
        _, made, _ = experience()
        with pytest.raises(RuntimeError, match="score_centering did not come into effect"):
            actor_trainer(Fused)(logits, policy_loss(), False).training_step(made, 0.0, step)


def test_what_a_schedule_goes_by_rides_in_a_sample() -> None:
    request = RequestedDraws(temperature=0.7, training_step=12, answer=3, answers=8)
    found, none = requested_draws([request.pack(), None], 2)
    assert none is None
    assert (found.training_step, found.answer, found.answers) == (12, 3, 8)
    assert found.temperature == pytest.approx(0.7)
    with pytest.raises(ValueError, match="a sample's requested draws"):
        RequestedDraws.unpack(request.pack()["requested_draws"][:-1])


def test_a_response_carries_what_its_schedule_goes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three responses, in step 4, at a temperature that E3 has raised; nothing without the flag."""

    class Executor:
        async def execute(self, **kwargs: Any) -> dict[str, Any]:
            conversation = rollout_actor._conversation.get()
            conversation.trajectory = FinishedTrajectory.unpack(trajectory({}, V, 4))
            conversation._tokens = np.arange(4)
            return {"observation_tokens": [0, 1, 2, 3]}

    schedule = sampling_schedules.create("ladder").spec()
    arguments = {"round": 5, "training_step": 4, "answers": 3}
    params = SimpleNamespace(temperature=0.9, extra_args={"perturbation": arguments})
    for is_centered in (True, False):
        sampling = {"score_centering": is_centered, "correct_mask": True}
        run_with(monkeypatch, sampling=sampling, sampling_schedule=schedule)
        executor = rollout_actor.RecordingExecutor(Executor())
        for _ in range(2):
            response = asyncio.run(executor.execute(prompt="p", sampling_params=params))
        (found,) = requested_draws([response["mm_train_inputs"]], 1)
        expected = RequestedDraws(pytest.approx(0.9), training_step=4, answer=1, answers=3)
        assert found == (expected if is_centered else None)


def test_log_probabilities_stay_those_of_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mismatch compares with the trainer's, which are over the tokens left with --sampling.correct_mask alone."""
    found = []
    for correct_mask in (True, False):
        run_with(monkeypatch, sampling={"score_centering": True, "correct_mask": correct_mask})
        config = rollout_actor.engine_settings({"name": "none"})
        found.append((config[settings.SAMPLING_MASKS], config[settings.FULL_LOG_PROBS]))
    assert found == [(True, False), (True, True)]
    with pytest.raises(UsageError, match=r"full_log_probs'\]=1: must be True or False"):
        settings.read({settings.FULL_LOG_PROBS: 1})


@pytest.mark.parametrize(
    ("words", "run", "has_note"),
    [
        ("", {}, True),
        ("--rollout.top_p 0.9", {}, False),
        ("", {"perturbation": {"name": "soft"}}, True),
        ("", {"perturbation": {"name": "cuts"}}, False),
        ("", {"sampling_schedule": {"name": "ead"}}, False),
        ("--rollout.top_p 0.9", {"sampling": {"correct_mask": True}}, True),
    ],
)
def test_a_run_with_nothing_to_center_is_told_so(words: str, run: dict[str, Any], has_note: bool) -> None:
    sampling = {"score_centering": True, **run.get("sampling", {})}
    complete = CompleteRun(run=run_of(**{**run, "sampling": sampling}), flags=Flags(words.split()))
    notes = [*run_notes.centering_notes(complete)]
    assert len(notes) == has_note
    assert all("has nothing to center" in note for note in notes)


def test_a_centered_score_is_not_warned_of() -> None:
    """CUTS and advantages with a sum: the baseline is free once the score is centered."""
    for is_centered in (False, True):
        run = run_of(
            sampling={"score_centering": is_centered}, perturbation={"name": "cuts"}, advantage={"name": "nsr"}
        )
        notes = [*run_notes.loss_notes(CompleteRun(run=run, flags=Flags([])))]
        assert bool(notes) != is_centered
        filtered = run_of(sampling={"score_centering": is_centered, "top_k": 4}).sampling
        assert bool(filtered.notes(Flags([]))) != is_centered


# ---- a bandit ------------------------------------------------------------------------------------------------------

DRAWS = 40_000
BANDIT = torch.tensor([1.1, 0.4, 0.2, -0.3, -0.9, -1.6])


def sampler_and_law(name: str) -> tuple[Sampler, TokenDraws, Tensor]:
    """How a bandit is drawn, and q."""
    if name == "top-k":
        draws = draws_of(DRAWS, left=[0, 1, 2])
        return Sampler(), draws, BANDIT.masked_fill(torch.arange(6) > 2, -torch.inf).softmax(-1)
    if name == "schedule":
        return Sampler(schedule=HALVED), draws_of(DRAWS, request=REQUEST), (BANDIT / 2.0).softmax(-1)
    cuts = create("cuts", k=4, delta=0.1, until="none")  # p = (.42, .21, .17, .10, …): four candidates
    return Sampler(perturbation=cuts), draws_of(DRAWS, perturbed=True), torch.tensor([0.25] * 4 + [0.0] * 2)


def scores_of(sampler: Sampler, draws: TokenDraws, tokens: Tensor, centered: bool) -> Tensor:
    """The score of each token by OpenRLHF's loss with A = 1, without weights, (DRAWS, 6): the gradient times −DRAWS."""
    logits = BANDIT.repeat(1, DRAWS + 1, 1).requires_grad_()
    sequences = torch.cat([torch.zeros(1, dtype=torch.int64), tokens]).unsqueeze(0)
    action_mask = torch.ones(1, DRAWS)
    loss: Any = policy_loss()
    if centered:
        loss = ScoreCentering(loss, sampler, action_mask=action_mask, attention_mask=torch.ones(1, DRAWS + 1))
        loss._look(draws, logits, sequences.shape)
    log_probs = log_probs_of(logits, sequences.roll(-1, 1))[:, :-1]
    total, *_ = loss(log_probs, log_probs.detach(), torch.ones(1, DRAWS), action_mask=action_mask)
    total.backward()
    return -DRAWS * logits.grad[0, :-1]


@pytest.mark.parametrize("name", ["top-k", "schedule", "cuts"])
def test_the_mean_score_of_a_bandit(name: str) -> None:
    """With it the mean score is 0 within three standard errors; without it, it is q − p within three."""
    sampler, draws, law = sampler_and_law(name)
    tokens = torch.multinomial(law, DRAWS, replacement=True, generator=torch.Generator().manual_seed(5))
    bias = law - BANDIT.softmax(-1)
    assert bias.abs().max() > 0.08
    for centered, expected in ((True, torch.zeros(6)), (False, bias)):
        scores = scores_of(sampler, draws, tokens, centered)
        error = scores.std(dim=0) / DRAWS**0.5
        assert ((scores.mean(dim=0) - expected).abs() <= 3.0 * error + 1e-6).all()
        # The other mean is out of reach of the error, so the test tells the two apart.
        other = bias if centered else torch.zeros(6)
        assert ((scores.mean(dim=0) - other).abs() > 6.0 * error).any()


def test_the_expected_gradient_is_the_covariance() -> None:
    """Σ_y q_y A_y (s_y − E s) = Cov_q(A, s), which a baseline does not change."""
    sampler, _, law = sampler_and_law("cuts")
    (mean,) = mean_scores(sampler, draws_of(1, perturbed=True), BANDIT.unsqueeze(0))
    scores = torch.eye(6) - BANDIT.softmax(-1)
    rewards = torch.tensor([1.0, -0.5, 0.3, 0.9, 0.2, -1.0])
    expected = [((rewards + baseline) * law) @ (scores - mean) for baseline in (0.0, 3.0)]
    torch.testing.assert_close(*expected, rtol=0, atol=1e-6)
    covariance = (law * rewards) @ scores - (law @ rewards) * (law @ scores)
    torch.testing.assert_close(expected[0], covariance, rtol=0, atol=1e-6)


# ---- bfloat16 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["top-k", "cuts", "schedule"])
def test_the_gradient_in_bfloat16(name: str) -> None:
    """A head of 64 × 500 that multiplies in bfloat16: the cosine of its gradient with float32's is above 0.99.

    With cuts rounding moves tokens across its threshold; the others are above 0.999.
    """
    generator = torch.Generator().manual_seed(2)
    tokens_count, width, vocabulary = 48, 64, 500
    states = torch.randn(tokens_count + 1, width, generator=generator)
    weight = 0.3 * torch.randn(vocabulary, width, generator=generator)
    perturbation: Perturbation | None = None
    left: dict[int, list[int]] = {}
    requests = [None]
    perturbed: tuple[int, ...] = ()
    schedule = None
    positions = range(1, tokens_count + 1)
    logits = states @ weight.T
    tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)[:-1]
    if name == "top-k":
        left = {t: logits[t - 1].topk(40).indices.sort().values.tolist() for t in positions}
        tokens = logits.argmax(-1)[:-1]
    if name == "cuts":
        perturbation = create("cuts", k=5, delta=0.01, until="none")
        perturbed = tuple(positions)
    if name == "schedule":
        schedule = sampling_schedules.create("ladder", least=1.4, most=1.4)
        requests = [REQUEST]
    sampler = Sampler(perturbation=perturbation, schedule=schedule)
    carried = unpack([trajectory(left, vocabulary, tokens_count + 1, perturbed)])
    sequences = torch.cat([torch.zeros(1, dtype=torch.int64), tokens]).unsqueeze(0)
    advantages = torch.randn(1, tokens_count, generator=generator)
    action_mask = torch.ones(1, tokens_count)

    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        head = weight.clone().requires_grad_()
        centering = ScoreCentering(
            policy_loss(), sampler, action_mask=action_mask, attention_mask=torch.ones(1, tokens_count + 1)
        )
        with centering.watching(carried, requests):
            of_head = (states.to(dtype) @ head.to(dtype).T).float().unsqueeze(0)
            log_probs = with_overrides(log_probs_of)(of_head, sequences.roll(-1, 1))[:, :-1]
        total, *_ = centering(log_probs, log_probs.detach(), advantages, action_mask=action_mask)
        total.backward()
        gradients.append(head.grad.flatten())
    cosine = torch.nn.functional.cosine_similarity(*gradients, dim=0)
    assert cosine > (0.99 if name == "cuts" else 0.999)


def test_with_the_corrected_mask_a_schedule_is_still_centered() -> None:
    """p and q are both over the tokens left, q at twice the temperature: the mean score is q_S − π_S."""
    left = [0, 2, 5]
    logits = BANDIT.repeat(1, 2, 1).double().requires_grad_()
    carried = unpack([trajectory({1: left}, 6, 2)])
    mask = torch.ones(1, 2)
    centering = ScoreCentering(
        policy_loss(),
        Sampler(schedule=HALVED, corrects_mask=True),
        action_mask=torch.ones(1, 1),
        attention_mask=mask,
    )
    with corrected(carried, mask), centering.watching(carried, [REQUEST]):
        log_probs = with_overrides(log_probs_of)(logits, torch.tensor([[2, 0]]))[:, :-1]
    total, *_ = centering(log_probs, log_probs.detach(), torch.ones(1, 1).double(), action_mask=torch.ones(1, 1))
    total.backward()
    drawn = torch.zeros(6).double()
    drawn[left] = (BANDIT[left] / 2.0).double().softmax(-1)
    expected = drawn.clone()
    expected[2] -= 1.0
    torch.testing.assert_close(logits.grad[0, 0], expected, rtol=0, atol=1e-7)
