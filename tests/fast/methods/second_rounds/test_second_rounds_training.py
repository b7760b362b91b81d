# SPDX-License-Identifier: Apache-2.0
"""Second rounds in training: advantages of both rounds, the loss's ratio, metrics, and what they go with."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ngrpo.config import complete_run
from ngrpo.config.parse import run_config
from ngrpo.methods import advantages, second_rounds
from ngrpo.trainers.common import sample_records
from ngrpo.trainers.common.policy_loss import TwoRoundsLoss, second_round_log_probs
from ngrpo.trainers.common.sample_records import TwoRounds
from ngrpo.trainers.openrlhf import experience_maker, step_advantages
from perturbations.errors import UsageError
from tests.support.gradient_problem import policy_loss
from tests.support.run import run_with

# --- advantages ------------------------------------------------------------------------------------------------------

# Of 4 + 4 responses the seventh is right; it took the place of the first response of the first round.
REWARDS_OF_BOTH_ROUNDS = np.float32([0, 0, 0, 0, 0, 0, 1, 0])
CARRIED = [TwoRounds(REWARDS_OF_BOTH_ROUNDS, place) for place in (6, 1, 2, 3)]


def test_advantages_of_both_rounds_by_hand() -> None:
    """Of 4 + 4 responses one is right: mean 1/8, deviation √(1/8), so 2.474874 and −0.353553; of the kept 1.5, −0.5.

    The second group had one round.
    """
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    group_norm = advantages.create("group_norm")
    of_kept = group_norm.compute(rewards)
    rounds_by_response = CARRIED + [None] * 4
    of_all = step_advantages.advantages_of_all(group_norm, rewards, of_kept, rounds_by_response)
    expected = [2.474874, -0.353553, -0.353553, -0.353553]
    assert of_all[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(of_all[1], of_kept[1])


def test_advantages_of_both_rounds_with_a_penalty_by_hand() -> None:
    """Penalties are OpenRLHF's, of the four kept responses alone: deviation √(0.5/7)."""
    penalised = torch.tensor([[0.5, 0.0, 0.0, -0.5]])
    group_norm = advantages.create("group_norm")
    of_all = step_advantages.advantages_of_all(group_norm, penalised, group_norm.compute(penalised), CARRIED)
    assert of_all[0].tolist() == pytest.approx([1.870829, 0.0, 0.0, -1.870829], abs=1e-6)


def test_a_step_s_normalisation_is_over_the_advantages_of_both_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first group has r − 2/8 of both rounds, the second r − 1/2; all eight are then normalised together."""

    class LessMean(type(advantages.create("group_norm"))):
        normalized_over_step = True

        def formula(self, rewards: Tensor, further: Tensor | None) -> Tensor:
            return rewards - rewards.mean(-1, keepdim=True)

    run_with(monkeypatch, second_round={"name": "lope"})
    both_rounds = np.float32([0, 0, 0, 0, 0, 0, 1, 1])
    carried = [TwoRounds(both_rounds, place).pack() for place in (6, 1, 2, 3)]
    experience = SimpleNamespace(
        index=list(range(8)),
        rewards=torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]),
        prompts=["p"] * 4 + ["q"] * 4,
        mm_train_inputs=carried + [None] * 4,
    )
    maker = SimpleNamespace(args=SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=4)), training_step=0)
    (of_step,) = step_advantages.compute(maker, [experience], LessMean()).advantages
    raw = torch.tensor([0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5])
    assert of_step.tolist() == pytest.approx(((raw - raw.mean()) / raw.std()).tolist(), abs=1e-5)


# --- the loss --------------------------------------------------------------------------------------------------------


def experience(log_probs: list[float]) -> SimpleNamespace:
    """Two responses, the second of the second round with these log-probabilities; one more column is no token's."""
    mask = torch.ones(2, len(log_probs) + 1)
    mask[:, -1] = 0
    of_second_round = TwoRounds(np.float32([0, 1]), 1, np.float32(log_probs))
    return SimpleNamespace(action_mask=mask, mm_train_inputs=[None, of_second_round.pack()])


def two_rounds_loss(method: Any, loss: Any, batch: Any) -> TwoRoundsLoss:
    rounds_by_response = sample_records.two_rounds(batch.mm_train_inputs, len(batch.action_mask))
    return TwoRoundsLoss(method, loss, rounds_by_response, batch.action_mask)


def clipped_objective(ratio: Tensor, advantage: float) -> Tensor:
    """PPO's, token by token."""
    return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


@pytest.mark.parametrize("shaping", [0.1, None])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_loss_is_the_formula_and_its_gradient(shaping: float | None, sign: float) -> None:
    """ρ / (ρ + γ) without clip for either sign; without shaping PPO's ρ, clipped; other responses as ever."""
    old = torch.tensor(
        [
            [-1.0, -2.0, -0.5, -1.5, 0.0],
            [-1.0, -0.1, -3.0, -0.7, 0.0],
        ]
    )
    change = torch.tensor([0.05, -0.1, 0.4, 0.0, 0.0])
    behavior_log_probs = [-1.1, -2.5, -0.3, -0.7]
    first_advantage = 0.5
    second_advantage = sign * 1.5
    batch = experience(behavior_log_probs)
    loss_fn = two_rounds_loss(second_rounds.create("lope", shaping=shaping), policy_loss(), batch)
    advantage = torch.tensor([[first_advantage] * 5, [second_advantage] * 5])
    log_probs = (old + change).requires_grad_()
    loss, *_ = loss_fn(log_probs, old, advantage, action_mask=batch.action_mask)
    (gradient,) = torch.autograd.grad(loss, log_probs)

    log_probs = (old + change).requires_grad_()
    ratio = (log_probs - old).exp()[0, :4]
    rho = (log_probs[1, :4] - torch.tensor(behavior_log_probs)).exp()
    first = clipped_objective(ratio, first_advantage)
    if shaping is None:
        second = clipped_objective(rho, second_advantage)
    else:
        second = second_advantage * rho / (rho + shaping)
    expected = -(first.sum() + second.sum()) / 8
    (expected_gradient,) = torch.autograd.grad(expected, log_probs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
    assert gradient[1, :4].abs().max() > 1e-3


def test_expected_gradient_is_that_of_the_prompt_of_the_data() -> None:
    """Over all responses of one token, drawn from the policy at another prompt: Σ π(o|p′) ρ A ∇log π = Σ A ∇π(o|p)."""
    theta = torch.tensor([0.3, -0.2, 0.1, 0.4], dtype=torch.float64)
    change = torch.tensor([0.1, -0.1, 0.05, 0.0])  # near enough for no clip
    behavior_log_probs = (theta + change).log_softmax(-1)
    reward = torch.tensor([1.0, 0.25, 0.5, 0.75], dtype=torch.float64)
    method = second_rounds.create("lope", shaping=None)

    gradient = torch.zeros(4, dtype=torch.float64)
    for token in range(4):
        logits = theta.clone().requires_grad_()
        log_prob = logits.log_softmax(-1)[token].reshape(1, 1)
        of_second_round = TwoRounds(np.float32([0, 1]), 1, np.float32([behavior_log_probs[token]]))
        batch = SimpleNamespace(action_mask=torch.ones(1, 1), mm_train_inputs=[of_second_round.pack()])
        loss_fn = two_rounds_loss(method, policy_loss(), batch)
        advantage = reward[token].reshape(1, 1)
        loss, *_ = loss_fn(log_prob, log_prob.detach(), advantage, action_mask=batch.action_mask)
        (of_token,) = torch.autograd.grad(loss, logits)
        gradient += behavior_log_probs[token].exp() * of_token

    logits = theta.clone().requires_grad_()
    expected_reward = (logits.softmax(-1) * reward).sum()
    (true_gradient,) = torch.autograd.grad(-expected_reward, logits)
    assert torch.allclose(gradient, true_gradient, atol=1e-7)
    assert true_gradient.abs().max() > 0.01


def test_weights_of_another_policy_are_not_taken_twice() -> None:
    """The first response has OpenRLHF's weight e^0.3, the second ρ / (ρ + 0.1) with ρ = e^0.2 and no weight."""
    old = torch.full((2, 5), -1.0)
    rollout = torch.full((2, 5), -1.3)
    batch = experience([-1.2] * 4)
    corrected = type(policy_loss())(
        is_correction_level="token",
        is_correction_mode="clip",
        is_correction_threshold=[0, 10],
    )
    loss_fn = two_rounds_loss(second_rounds.create("lope"), corrected, batch)
    loss, *_ = loss_fn(old, old, torch.ones(2, 5), action_mask=batch.action_mask, rollout_log_probs=rollout)
    rho = math.exp(0.2)
    expected = -(math.exp(0.3) + rho / (rho + 0.1)) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_a_response_that_was_cut_keeps_its_first_log_probabilities() -> None:
    mask = torch.ones(1, 3)
    log_probs, is_known = second_round_log_probs(mask, [TwoRounds(np.float32([0]), 0, np.float32([-1, -2, -3, -4]))])
    assert log_probs.tolist() == [[-1, -2, -3]]
    assert is_known.all()


def test_a_response_that_grew_is_refused() -> None:
    mask = torch.ones(1, 3)
    with pytest.raises(RuntimeError, match="3 tokens has 2"):
        second_round_log_probs(mask, [TwoRounds(np.float32([0]), 0, np.float32([-1, -2]))])


# --- metrics ---------------------------------------------------------------------------------------------------------


def batch_of(*carried: TwoRounds | None) -> SimpleNamespace:
    """Responses of two tokens with log-probabilities of −1, which carry this."""
    count = len(carried)
    return SimpleNamespace(
        action_mask=torch.ones(count, 2),
        action_log_probs=torch.full((count, 2), -1.0),
        mm_train_inputs=[None if rounds is None else rounds.pack() for rounds in carried],
    )


def test_measures_by_hand() -> None:
    """Two responses of four had a second round, and one of them is of it: ρ = 1 and e."""
    rewards = np.float32([0, 0, 1, 0, 1, 0])
    batch = batch_of(
        TwoRounds(rewards, 2, np.float32([-1, -2])),
        TwoRounds(rewards, 1),
        None,
        None,
    )
    method = second_rounds.create("lope", prompts=1, answers=4)
    assert experience_maker.second_round_measures([batch], method) == {
        "second_round/asked": pytest.approx(0.5),
        "second_round/trained": pytest.approx(0.25),
        "second_round/right": pytest.approx(0.5),
        "second_round/solved": pytest.approx(1.0),
        "second_round/ratio": pytest.approx((1 + math.e) / 2),
    }


def test_measures_of_a_step_without_a_second_round() -> None:
    batch = batch_of(None, None)
    batch.mm_train_inputs = None
    method = second_rounds.create("lope", prompts=1, answers=4)
    assert experience_maker.second_round_measures([batch], method) == {
        "second_round/asked": 0.0,
        "second_round/trained": 0.0,
    }


def test_measures_of_refinements_by_hand() -> None:
    """Drafts 0, 0.5 and 1, 0.5; refinements 1, 0 and 1, 1: the ordinary ratio, so none of its own."""
    first_group = np.float32([0, 0.5, 1, 0])
    second_group = np.float32([1, 0.5, 1, 1])
    rounds_by_response = [
        TwoRounds(first_group, 2),
        TwoRounds(first_group, 3),
        TwoRounds(second_group, 2),
        TwoRounds(second_group, 3),
        None,
    ]
    batch = batch_of(*rounds_by_response)
    method = second_rounds.create("igrpo")
    assert experience_maker.second_round_measures([batch], method) == {
        "second_round/asked": pytest.approx(0.8),
        "second_round/trained": pytest.approx(0.8),
        "second_round/right": pytest.approx(0.75),
        "second_round/solved": pytest.approx(1.0),
        "second_round/drafts": pytest.approx(0.5),
        "second_round/best_draft": pytest.approx(0.75),
    }
    _, has_own_ratio = second_round_log_probs(batch.action_mask, rounds_by_response)
    assert not has_own_ratio.any()


# ---- the command line -----------------------------------------------------------------------------------------------

MODEL = ["--model", "smollm2-135m", "--task", "arithmetic", "--rollout.n_samples_per_prompt", "4"]
LOPE = [*MODEL, "--second_round", "lope", "--advantage", "group_norm"]


def kl_coefficient(words: list[str]) -> str:
    return complete_run.make(run_config(words)).flags.value("--algo.kl.init_coef")


def test_there_is_no_kl_term_unless_it_is_asked_for() -> None:
    assert kl_coefficient(LOPE) == "0"
    assert kl_coefficient([*LOPE, "--algo.kl.init_coef", "0.01"]) == "0.01"


def test_groups_of_the_kept_responses_need_no_advantage() -> None:
    run = run_config([*MODEL, "--second_round", "repeat", "--second_round.group", "kept"])
    assert "second_round" in run.conditions
    complete_run.make(run)


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
    igrpo = [*MODEL, "--second_round", "igrpo", "--rollout.max_new_tokens", "64"]
    assert kl_coefficient([*igrpo, *words.split()]) != "0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "lope --second_round.least 5 --second_round.most 4",
            r"least=5: must be in \[1, 4\]",
        ),
        (
            "lope --second_round.shaping 0",
            "shaping='0': must be greater than 0",
        ),
        (
            "igrpo --second_round.shaping 0.1",
            "'shaping' belongs to second round lope and repeat",
        ),
        (
            "igrpo",
            "no --rollout.max_new_tokens cannot be used with --second_round igrpo",
        ),
        (
            "igrpo --rollout.max_new_tokens 64 --data.max_len 128",
            "--data.max_len 128 .*: a prompt, a",
        ),
        (
            "igrpo --rollout.max_new_tokens 64 --advantage copo",
            "--advantage copo cannot",
        ),
        (
            "lope --second_round.group kept --advantage spo",
            "--advantage spo cannot be used with --second_round lope: a",
        ),
        (
            "repeat --second_round.group kept --advantage spo",
            "--advantage spo cannot be used with --second_round repeat",
        ),
        (
            "igrpo --rollout.max_new_tokens 64 --train.agent_func_path agent.py",
            "agent.py cannot",
        ),
    ],
)
def test_what_is_refused(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        complete_run.make(run_config([*MODEL, "--second_round", *words.split()]))
