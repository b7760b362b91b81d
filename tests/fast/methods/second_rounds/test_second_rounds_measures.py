# SPDX-License-Identifier: Apache-2.0
"""Responses to another prompt than the trained one are left out where rollout policy and trainer are compared.

Their log-probabilities differ by the prompt. Noise on weights and temperature schedules follow these measures.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.trainers.common.sample_records import TwoRounds
from ngrpo.trainers.openrlhf import experience_maker, kept_groups
from tests.support.run import run_with

MOVED = 0.8  # nats between the two prompts, at each token


def micro_batch(moved: bool) -> Any:
    """Two responses of two tokens, drawn by the trained policy itself; the second was drawn given another prompt."""
    trainer = torch.tensor([[-1.0, -2.0], [-1.5, -2.5]])
    rollout = trainer.clone()
    inputs: list[dict[str, bytes] | None] = [None, None]
    if moved:
        rollout[1] -= MOVED
        rounds = TwoRounds(rewards=np.float32([0, 1]), place=1, log_probs=rollout[1].numpy())
        inputs[1] = rounds.pack()
    return SimpleNamespace(
        index=[0, 1],
        action_mask=torch.ones(2, 2),
        action_log_probs=trainer,
        rollout_log_probs=rollout,
        mm_train_inputs=inputs,
    )


@pytest.fixture
def policy_maker(monkeypatch: pytest.MonkeyPatch) -> Any:
    run_with(monkeypatch)
    correction = SimpleNamespace(
        is_correction_level="token",
        is_correction_mode="clip",
        is_correction_gating="ratio",
        is_correction_threshold=[0.0, 10.0],
    )
    args = SimpleNamespace(algo=SimpleNamespace(advantage=correction), actor=SimpleNamespace(policy_loss_type="ppo"))
    return SimpleNamespace(strategy=SimpleNamespace(args=args))


def test_divergence_and_entropy_are_of_responses_to_the_trained_prompt(policy_maker: Any) -> None:
    """The first response's entropy is (1 + 2) / 2."""
    measures = experience_maker.rollout_policy_measures(policy_maker, [micro_batch(moved=True)])
    assert measures == {"importance/divergence": 0.0, "importance/weight": 1.0, "importance/cut": 0.0}
    assert policy_maker.rollout_entropy == 1.5


def test_a_step_without_such_a_response_has_no_measures(policy_maker: Any) -> None:
    alone = micro_batch(moved=True)
    alone.action_mask[0] = 0.0
    assert experience_maker.rollout_policy_measures(policy_maker, [alone]) == {}
    assert policy_maker.rollout_entropy is None
    assert policy_maker.rollout_divergence is None


def test_mismatch_by_age_is_of_responses_to_the_trained_prompt() -> None:
    measures = experience_maker.staleness_measures([micro_batch(moved=True)], np.array([0, 1]), None)
    assert measures["staleness/gap_0"] == 0.0
    assert "staleness/gap_1" not in measures
    assert measures["staleness/tokens_1"] == 2.0


@pytest.mark.parametrize("moved", [False, True])
def test_kept_responses_have_gaps_where_both_have_one_prompt(moved: bool) -> None:
    response = kept_groups._Response(micro_batch(moved), 1, None)
    log_probs = kept_groups._rollout_log_probs(response, [1, 2])
    assert log_probs == (None if moved else [-1.5, -2.5])
