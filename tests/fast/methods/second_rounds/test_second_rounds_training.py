# SPDX-License-Identifier: Apache-2.0
"""Second rounds in training: advantages of both rounds, the loss's ratio, metrics, and what they go with."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.config import complete_run
from ngrpo.config.parse import run_config
from ngrpo.methods import advantages, second_rounds
from ngrpo.trainers.common import sample_records
from ngrpo.trainers.common.policy_loss import TwoRoundsLoss, behavior
from ngrpo.trainers.common.sample_records import TwoRounds
from ngrpo.trainers.openrlhf import experience_maker, step_advantages
from perturbations.errors import UsageError
from tests.support.gradient_problem import policy_loss


def test_advantages_of_both_rounds_by_hand() -> None:
    """Of 4 + 4 answers one is right: mean 1/8, deviation √(1/8), so 2.474874 and −0.353553; of the kept 1.5, −0.5."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    advantage = advantages.create("group_norm")
    of_kept = advantage.compute(rewards)
    every = np.float32([0, 0, 0, 0, 0, 0, 1, 0])
    carried = [TwoRounds(every, place) for place in (6, 1, 2, 3)] + [None] * 4
    found = step_advantages.advantages_of_all(advantage, rewards, of_kept, carried)
    assert found[0].tolist() == pytest.approx([2.474874, *[-0.353553] * 3], abs=1e-6)
    assert torch.equal(found[1], of_kept[1])
    penalised = torch.tensor([[0.5, 0.0, 0.0, -0.5]])  # by OpenRLHF, of these four alone: deviation √(0.5/7)
    found = step_advantages.advantages_of_all(advantage, penalised, advantage.compute(penalised), carried[:4])
    assert found[0].tolist() == pytest.approx([1.870829, 0.0, 0.0, -1.870829], abs=1e-6)


def experience(log_probs: list[float] | None, tokens: int = 4) -> SimpleNamespace:
    """Two answers of which the second one may be of the second round; one more column, which is no token's."""
    mask = torch.ones(2, tokens + 1)
    mask[:, -1] = 0
    given = None if log_probs is None else np.float32(log_probs)
    packed = TwoRounds(np.float32([0, 1]), 1, given).pack()
    return SimpleNamespace(action_mask=mask, mm_train_inputs=[None, packed])


def two_rounds_loss(method: Any, loss: Any, batch: Any) -> TwoRoundsLoss:
    carried = sample_records.two_rounds(batch.mm_train_inputs, len(batch.action_mask))
    return TwoRoundsLoss(method, loss, carried, batch.action_mask)


@pytest.mark.parametrize("shaping", [0.1, None])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_loss_is_the_formula_and_its_gradient(shaping: float | None, sign: float) -> None:
    """ρ / (ρ + γ) without clip for either sign; without shaping PPO's ρ, clipped; other answers as ever."""
    old = torch.tensor([[-1.0, -2.0, -0.5, -1.5, 0.0], [-1.0, -0.1, -3.0, -0.7, 0.0]])
    given = [-1.1, -2.5, -0.3, -0.7]
    moved = torch.tensor([0.05, -0.1, 0.4, 0.0, 0.0])
    advantage = torch.tensor([[0.5] * 5, [sign * 1.5] * 5])
    method, batch = second_rounds.create("lope", shaping=shaping), experience(given)
    log_probs = (old + moved).requires_grad_()
    ours = two_rounds_loss(method, policy_loss(), batch)
    loss = ours(log_probs, old, advantage, action_mask=batch.action_mask)[0]
    (gradient,) = torch.autograd.grad(loss, log_probs)

    again = (old + moved).requires_grad_()
    ratio = (again - old).exp()
    rho = (again[1, :4] - torch.tensor(given)).exp()
    first = torch.minimum(ratio[0, :4] * 0.5, ratio[0, :4].clamp(0.8, 1.2) * 0.5)
    if shaping is None:
        second = torch.minimum(rho * sign * 1.5, rho.clamp(0.8, 1.2) * sign * 1.5)
    else:
        second = sign * 1.5 * rho / (rho + shaping)
    expected = -(first.sum() + second.sum()) / 8
    (known,) = torch.autograd.grad(expected, again)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(gradient, known, rtol=1e-5, atol=1e-7) and gradient[1, :4].abs().max() > 1e-3


def test_expected_gradient_is_that_of_the_prompt_of_the_data() -> None:
    """Over all answers of one token, drawn from the policy at another prompt: Σ π(o|p′) ρ A ∇log π = Σ A ∇π(o|p)."""
    theta = torch.tensor([0.3, -0.2, 0.1, 0.4], dtype=torch.float64)
    drawn_from = (theta + torch.tensor([0.1, -0.1, 0.05, 0.0])).log_softmax(-1)  # near enough for no clip
    reward = torch.tensor([1.0, 0.25, 0.5, 0.75], dtype=torch.float64)
    method, found = second_rounds.create("lope", shaping=None), torch.zeros(4, dtype=torch.float64)
    for token in range(4):
        logits = theta.clone().requires_grad_()
        log_prob = logits.log_softmax(-1)[token].reshape(1, 1)
        kept = TwoRounds(np.float32([0, 1]), 1, np.float32([drawn_from[token]])).pack()
        batch = SimpleNamespace(action_mask=torch.ones(1, 1), mm_train_inputs=[kept])
        ours = two_rounds_loss(method, policy_loss(), batch)
        loss = ours(log_prob, log_prob.detach(), reward[token].reshape(1, 1), action_mask=batch.action_mask)[0]
        found += drawn_from[token].exp() * torch.autograd.grad(loss, logits)[0]
    logits = theta.clone().requires_grad_()
    (known,) = torch.autograd.grad(-(logits.softmax(-1) * reward).sum(), logits)
    assert torch.allclose(found, known, atol=1e-7) and known.abs().max() > 0.01


def test_weights_of_another_policy_are_not_taken_twice() -> None:
    old = torch.full((2, 5), -1.0)
    rollout = torch.full((2, 5), -1.3)
    batch, method = experience([-1.2] * 4), second_rounds.create("lope")
    plain = type(policy_loss())(is_correction_level="token", is_correction_mode="clip", is_correction_threshold=[0, 10])
    ours = two_rounds_loss(method, plain, batch)
    loss = ours(old, old, torch.ones(2, 5), action_mask=batch.action_mask, rollout_log_probs=rollout)[0]
    rho = math.exp(0.2)
    assert loss.item() == pytest.approx(-(math.exp(0.3) + rho / (rho + 0.1)) / 2, rel=1e-5)


def test_an_answer_that_was_cut_and_one_that_grew() -> None:
    given, there = behavior(torch.ones(1, 3), [TwoRounds(np.float32([0]), 0, np.float32([-1, -2, -3, -4]))])
    assert given.tolist() == [[-1, -2, -3]] and there.all()
    with pytest.raises(RuntimeError, match="3 tokens has 2"):
        behavior(torch.ones(1, 3), [TwoRounds(np.float32([0]), 0, np.float32([-1, -2]))])


def test_measures_by_hand() -> None:
    method, rewards = second_rounds.create("lope", prompts=1, answers=4), np.float32([0, 0, 1, 0, 1, 0])
    batch = SimpleNamespace(action_mask=torch.ones(4, 2), action_log_probs=torch.full((4, 2), -1.0))
    carried = TwoRounds(rewards, 2, np.float32([-1, -2])), TwoRounds(rewards, 1)
    batch.mm_train_inputs = [*(each.pack() for each in carried), None, None]
    found = experience_maker.second_round_measures([batch], method)
    expected = {"asked": 0.5, "trained": 0.25, "right": 0.5, "solved": 1.0, "ratio": (1 + math.e) / 2}
    assert found == {f"second_round/{name}": pytest.approx(value) for name, value in expected.items()}
    batch.mm_train_inputs = None
    nothing = {"second_round/asked": 0.0, "second_round/trained": 0.0}
    assert experience_maker.second_round_measures([batch], method) == nothing


def test_measures_of_refinements_by_hand() -> None:
    """Drafts 0, 0.5 and 1, 0.5; refinements 1, 0 and 1, 1: the ordinary ratio, so none of its own."""
    method, batch = second_rounds.create("igrpo"), SimpleNamespace(action_mask=torch.ones(5, 2))
    batch.action_log_probs = torch.full((5, 2), -1.0)
    groups = [np.float32([0, 0.5, 1, 0]), np.float32([1, 0.5, 1, 1])]
    carried = [TwoRounds(rewards, place) for rewards in groups for place in (2, 3)]
    batch.mm_train_inputs = [*(each.pack() for each in carried), None]
    expected = {"asked": 0.8, "trained": 0.8, "right": 0.75, "solved": 1.0, "drafts": 0.5, "best_draft": 0.75}
    found = experience_maker.second_round_measures([batch], method)
    assert found == {f"second_round/{name}": pytest.approx(value) for name, value in expected.items()}
    assert not behavior(batch.action_mask, [*carried, None])[1].any()


# ---- the command line -----------------------------------------------------------------------------------------------

MODEL = ["--model", "smollm2-135m", "--task", "arithmetic", "--rollout.n_samples_per_prompt", "4"]


def test_there_is_no_kl_term_unless_it_is_asked_for() -> None:
    words = [*MODEL, "--second_round", "lope", "--advantage", "group_norm"]
    assert complete_run.make(run_config(words)).flags.value("--algo.kl.init_coef") == "0"
    assert (
        complete_run.make(run_config([*words, "--algo.kl.init_coef", "0.01"])).flags.value("--algo.kl.init_coef")
        == "0.01"
    )
    kept = run_config([*MODEL, "--second_round", "repeat", "--second_round.group", "kept"])
    assert complete_run.make(kept) and "second_round" in kept.conditions


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--perturbation neighbor",
        "--sampling.top_k 5 --sampling.correct_mask",
        "--actor.policy_loss_type gspo",
        "--advantage group_norm --advantage.overlong exclude",
        "--advantage group_norm --credit simko",
    ],
)
def test_what_refinements_go_with(words: str) -> None:
    run = run_config([*MODEL, "--second_round", "igrpo", "--rollout.max_new_tokens", "64", *words.split()])
    assert complete_run.make(run).flags.value("--algo.kl.init_coef") != "0"


@pytest.mark.parametrize(
    "words, told",
    [
        ("lope --second_round.least 5 --second_round.most 4", "least=5: must be at most most=4"),
        ("lope --second_round.shaping 0", "shaping='0': must be greater than 0"),
        ("igrpo --second_round.shaping 0.1", "'shaping' belongs to second round lope and repeat"),
        ("igrpo", "no --rollout.max_new_tokens cannot be used with --second_round igrpo"),
        ("igrpo --rollout.max_new_tokens 64 --data.max_len 128", "--data.max_len 128 .*: a prompt, a"),
        ("igrpo --rollout.max_new_tokens 64 --advantage copo", "--advantage copo cannot"),
        (
            "lope --second_round.group kept --advantage spo",
            "--advantage spo cannot be used with --second_round lope: a",
        ),
        (
            "repeat --second_round.group kept --advantage spo",
            "--advantage spo cannot be used with --second_round repeat",
        ),
        ("igrpo --rollout.max_new_tokens 64 --train.agent_func_path agent.py", "agent.py cannot"),
    ],
)
def test_what_is_refused(words: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        complete_run.make(run_config([*MODEL, "--second_round", *words.split()]))
