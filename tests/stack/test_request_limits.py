# SPDX-License-Identifier: Apache-2.0
"""What a request excludes stays out of its text at perturbed positions too: filters, lists of tokens, a grammar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.stack.harness import build_engine
from tests.stack.request_limits import EVERY, answers, check_mixed_batch, name_of

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def limited(model: str) -> Iterator[Any]:
    yield build_engine(model, {"name": "neighbor"}, max_model_len=128, logprobs_mode="processed_logprobs")


@pytest.mark.parametrize("spec", EVERY, ids=name_of)
def test_every_answer_is_legal(limited: Any, spec: dict[str, Any]) -> None:
    check_mixed_batch(limited, spec)


@pytest.mark.parametrize("spec", EVERY, ids=name_of)
def test_temperature_0_is_greedy(limited: Any, spec: dict[str, Any]) -> None:
    """Each token is the likeliest after the perturbed inputs before it, whatever token the noise picked."""
    # In one batch with a request that draws.
    *cold, _ = answers(limited, spec, [{"temperature": 0}, {"temperature": 0, "logit_bias": {17: 1.0}}, {}])
    for completion, record, log_probs in cold:
        assert [step[token].rank for step, token in zip(completion.logprobs, completion.token_ids)] == [1] * 12
        assert np.isfinite(log_probs).all()
        assert record.agreed.all()
        assert not (spec["name"].endswith("RunnerUp") and len(record)), "the second likeliest is never the likeliest"


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
