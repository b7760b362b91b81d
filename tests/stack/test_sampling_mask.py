# SPDX-License-Identifier: Apache-2.0
"""Sampling masks of a real engine: its processed log-probability is the trainer's corrected one, in float32."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.rollout import set_perturbation
from tests.stack.harness import (
    CROWDED,
    build_engine,
    chat_prompts,
    note_preemptions,
    sample_with_masks,
    trainer_log_probs,
)

# With each, what a log-probability of the whole distribution is off by somewhere, at least.
TRUNCATED = [
    ({"top_p": 0.95}, 0.02),
    ({"top_k": 50}, 0.02),
    ({"min_p": 0.05}, 0.02),
    ({"top_p": 0.8, "top_k": 10, "temperature": 1.3}, 0.1),
    ({"top_p": 0.999, "temperature": 1.5}, 5e-4),  # thousands of tokens are left at some positions
]
PERTURBATIONS = [
    {"name": "none"},
    {"name": "neighbor", "rate": 0.3},
    {"name": "gumbel", "top_p": 1.0},
    {"name": "gaussian", "base": "token"},
]


@pytest.fixture(scope="module")
def recording(model: str) -> Iterator[Any]:
    """Nothing but the masks is asked for: the unperturbed arm of a comparison."""
    options = {"logprobs_mode": "processed_logprobs", "max_num_batched_tokens": 64}
    yield build_engine(model, None, additional_config={"sampling_masks": True}, **options)


@pytest.mark.parametrize("perturbation", PERTURBATIONS, ids=lambda perturbation: perturbation["name"])
def test_rollout_and_trainer_agree(recording: Any, hf_model: Any, perturbation: dict[str, Any]) -> None:
    set_perturbation(recording, **perturbation)
    for params, effect in TRUNCATED if perturbation["name"] == "none" else TRUNCATED[:1]:
        rollouts, masks = sample_with_masks(recording, chat_prompts(recording), **{"max_tokens": 40, **params})
        processed = torch.tensor([lp for r in rollouts for lp in r.engine_log_probs])
        ours = torch.from_numpy(np.concatenate([r.log_probs for r in rollouts]))
        temperature = params.get("temperature", 1.0)
        corrected = trainer_log_probs(hf_model, rollouts, masks, temperature)
        plain = trainer_log_probs(hf_model, rollouts, [None] * len(rollouts), temperature)
        assert (processed - ours).abs().max() < 1e-5
        assert (corrected - processed).abs().max() < 1e-4
        # π_S is never smaller than π, and the difference is what a trainer without the correction is off by.
        assert (corrected - plain).min() > -1e-5 and (plain - processed).abs().max() > effect
        if perturbation["name"] != "none":
            assert sum(len(r.record) for r in rollouts) > 10


def test_nothing_is_recorded_where_nothing_is_cut(recording: Any) -> None:
    set_perturbation(recording, "none")
    _, masks = sample_with_masks(recording, chat_prompts(recording), max_tokens=8)
    assert [len(mask) for mask in masks] == [0, 0, 0, 0]
    _, masks = sample_with_masks(recording, chat_prompts(recording), max_tokens=8, ignore_eos=False, min_tokens=1)
    for mask in masks:  # the end of the answer is not allowed as its first token: one token cut, one id kept
        assert mask.cut.all() and [len(ids) for _, ids in mask.by_position().values()] == [1]


def test_masks_survive_preemption(model: str, hf_model: Any) -> None:
    """A cache of eight blocks of 32 tokens, as in test_invariance: trajectories are computed again."""
    config = {"perturbation": {"name": "neighbor", "rate": 0.3}, "sampling_masks": True}
    small = build_engine(model, None, additional_config=config, logprobs_mode="processed_logprobs", **CROWDED)
    preempted = note_preemptions(small)
    rollouts, masks = sample_with_masks(small, chat_prompts(small, copies=2), top_p=0.9)
    assert len(preempted) >= 3
    processed = torch.tensor([lp for r in rollouts for lp in r.engine_log_probs])
    assert (trainer_log_probs(hf_model, rollouts, masks) - processed).abs().max() < 1e-4
