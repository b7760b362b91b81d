# SPDX-License-Identifier: Apache-2.0
"""Sampling schedules and request limits in a real engine: what is drawn, and its score.

Each schedule with a perturbation is in test_v2.py, for both runners.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.methods import sampling_schedules
from ngrpo.rollout import set_perturbation
from tests.stack.harness import build_engine, chat_prompts, sample, worker_of
from tests.stack.request_limits import EVERY, answers, check_mixed_batch, name_of
from tests.stack.schedule_truth import scheduled_gaps

# Its τ_min is reached within the answers of these tests.
EAD: dict[str, Any] = {"d_0": 20, "growth": 0, "c": 3}
SEEDS = [{"seed": i} for i in range(4)]


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[Any]:
    """A schedule and no perturbation, prefills in chunks, log-probabilities as OpenRLHF asks for them."""
    config = {"sampling_schedule": {"name": "ead", **EAD}}
    options = {"max_num_batched_tokens": 64, "enable_prefix_caching": True, "logprobs_mode": "processed_logprobs"}
    yield build_engine(model, None, additional_config=config, **options)


def test_a_schedule_alone(llm: Any, hf_model: Any) -> None:
    """As the engine was built; the log-probabilities that vLLM hands over, and OpenRLHF trains with, are these too."""
    rollouts = sample(llm, chat_prompts(llm), SEEDS, max_tokens=32)
    assert scheduled_gaps(hf_model, rollouts, "ead", EAD).max() <= 1e-4
    assert scheduled_gaps(hf_model, rollouts, None, {}).max() >= 0.1, "one temperature throughout would show"
    assert all(len(rollout.record) == 0 for rollout in rollouts)
    (alone,) = sample(llm, [rollouts[2].prompt], SEEDS[2:3], max_tokens=32)
    assert alone.tokens == rollouts[2].tokens, "whatever the batch"
    for rollout in rollouts:
        np.testing.assert_allclose(rollout.engine_log_probs, rollout.log_probs, rtol=1e-5, atol=1e-4)


def test_a_mixed_batch(llm: Any, hf_model: Any) -> None:
    """One that follows the schedule, a later step of the training, one without a schedule; greedy ones; filters."""
    prompts = chat_prompts(llm)[:3]
    arguments = [{"seed": 1}, {"seed": 2, "training_step": 100_000}, {"seed": 3, "scheduled": False}]
    worker_of(llm).perturbation.schedule = sampling_schedules.create("ead", d_0=20, growth=5, c=0, tau_max=1.2)
    set_perturbation(llm, "none")
    mixed = sample(llm, prompts, arguments, max_tokens=24)
    assert scheduled_gaps(hf_model, mixed[:1], "ead", {"d_0": 20, "c": 0}).max() <= 1e-4
    assert scheduled_gaps(hf_model, mixed[1:2], "ead", {"d_0": 40_000, "c": 0}).max() <= 1e-4
    assert scheduled_gaps(hf_model, mixed[2:], None, {}).max() <= 1e-4
    greedy = sample(llm, prompts, arguments, max_tokens=8, temperature=0.0)
    assert scheduled_gaps(hf_model, greedy, None, {}).max() <= 1e-4
    # min-p keeps what is likely at the schedule's temperature: hot at first, then cold.
    filtered = sample(llm, prompts[:1], [{"seed": 5}], max_tokens=24, min_p=0.3, top_k=50)
    assert scheduled_gaps(hf_model, filtered, "ead", {"d_0": 20, "c": 0}).max() <= 1e-4


# --- limits: filters, lists of tokens, a grammar ----------------------------------------------------------------


@pytest.fixture
def limited(llm: Any) -> Any:
    worker_of(llm).perturbation.schedule = None
    return llm


@pytest.mark.parametrize("spec", EVERY, ids=name_of)
def test_every_answer_is_legal(limited: Any, spec: dict[str, Any]) -> None:
    check_mixed_batch(limited, spec)


def test_a_position_whose_proposal_is_excluded_is_an_ordinary_one(limited: Any) -> None:
    """`RunnerUp` proposes the second likeliest token: always there for top-k 2, never for top-k 1."""
    spec = {"name": "tests.stack.own_perturbations:RunnerUp", "until": None}
    two, one, some = answers(limited, spec, [{"top_k": 2}, {"top_k": 1}, {"top_p": 0.8}])
    assert len(two[1]) == 12 and len(one[1]) == 0
    scores = [step[token].logprob for step, token in zip(one[0].logprobs, one[0].token_ids)]
    assert scores == [0.0] * 12  # the only token that top-k 1 leaves
    record = some[1]
    perturbed = np.isin(np.arange(12) + record.prompt_tokens, record.positions)
    assert 0 < perturbed.sum() < 12
    # The runner-up is never likelier than one half; the ordinary draw of a set of one token is certain.
    processed = np.array([step[token].logprob for step, token in zip(some[0].logprobs, some[0].token_ids)])
    assert (processed[perturbed] < np.log(0.5) + 1e-6).all() and (processed[~perturbed] == 0.0).all()


def test_the_sampling_correction_is_finite(limited: Any) -> None:
    """GSPO and truncated importance sampling weigh log π_trainer − log π_rollout: one −inf would make all of it NaN."""
    from ngrpo.machine.hardware.stand_ins import flash_attn_stand_in

    with flash_attn_stand_in():
        from openrlhf.models.loss import PolicyLoss

    spec = {"name": "tests.stack.own_perturbations:RunnerUp", "until": None}
    rows = answers(limited, spec, [{"top_p": 0.8}, {"top_k": 1}, {"min_p": 0.5}])
    rollout = torch.tensor([[s[t].logprob for s, t in zip(c.logprobs, c.token_ids)] for c, _, _ in rows])
    for kind, options in {
        "gspo": {"is_correction_level": "token"},
        "ppo": {"is_correction_level": "token", "is_correction_mode": "clip"},
        "ppo-seq": {"is_correction_level": "seq"},
    }.items():
        trainer = torch.from_numpy(np.stack([log_probs for *_, log_probs in rows])).requires_grad_(True)
        loss_fn = PolicyLoss(policy_loss_type=kind.split("-")[0], **options)
        loss = loss_fn(trainer, trainer.detach(), torch.ones_like(rollout), torch.ones_like(rollout), rollout)[0]
        loss.backward()
        assert loss.isfinite() and trainer.grad.isfinite().all()
