# SPDX-License-Identifier: Apache-2.0
"""Sampling masks of a real engine: its processed log-probability is the trainer's corrected one, in float32."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.rollout import set_perturbation
from tests.stack.harness import (
    CROWDED,
    Rollout,
    build_engine,
    chat_prompts,
    note_preemptions,
    sample_with_masks,
    trainer_log_probs,
)

# Sampling parameters, and the least by which log π over the whole vocabulary must differ somewhere from the masked one.
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
    """An engine that records masks and has no perturbation, as the unperturbed arm of a comparison has."""
    options = {"logprobs_mode": "processed_logprobs", "max_num_batched_tokens": 64}
    yield build_engine(model, None, additional_config={"sampling_masks": True}, **options)


def processed_log_probs(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """vLLM's own log-probabilities of all generated tokens, one rollout after the other."""
    return torch.tensor([log_prob for rollout in rollouts for log_prob in rollout.engine_log_probs])


@pytest.mark.parametrize("perturbation", PERTURBATIONS, ids=lambda perturbation: perturbation["name"])
def test_rollout_and_trainer_agree(recording: Any, hf_model: Any, perturbation: dict[str, Any]) -> None:
    set_perturbation(recording, **perturbation)
    is_perturbed = perturbation["name"] != "none"
    truncated = TRUNCATED[:1] if is_perturbed else TRUNCATED
    for params, effect in truncated:
        temperature = params.get("temperature", 1.0)
        rollouts, masks = sample_with_masks(recording, chat_prompts(recording), max_tokens=40, **params)
        processed = processed_log_probs(rollouts)
        recorded = torch.from_numpy(np.concatenate([rollout.log_probs for rollout in rollouts]))
        corrected = trainer_log_probs(hf_model, rollouts, masks, temperature)
        uncorrected = trainer_log_probs(hf_model, rollouts, [None] * len(rollouts), temperature)
        assert (processed - recorded).abs().max() < 1e-5
        assert (corrected - processed).abs().max() < 1e-4
        assert (corrected - uncorrected).min() > -1e-5, "π among the tokens left is never smaller than π"
        assert (uncorrected - processed).abs().max() > effect, "leaving the correction out must show"
        if is_perturbed:
            assert sum(len(rollout.record) for rollout in rollouts) > 10


def test_nothing_is_recorded_where_nothing_is_cut(recording: Any) -> None:
    """`min_tokens=1` cuts one token at one position: the end of the answer, which may not be its first token."""
    set_perturbation(recording, "none")
    prompts = chat_prompts(recording)
    _, masks = sample_with_masks(recording, prompts, max_tokens=8)
    assert [len(mask) for mask in masks] == [0, 0, 0, 0]

    _, masks = sample_with_masks(recording, prompts, max_tokens=8, ignore_eos=False, min_tokens=1)
    for mask in masks:
        assert mask.cut.all(), "the ids are those of the tokens that were cut"
        ((_, ids),) = mask.by_position().values()
        assert len(ids) == 1


def test_masks_survive_preemption(model: str, hf_model: Any) -> None:
    """The cache has eight blocks of 32 tokens, as in test_invariance.py: trajectories are computed again."""
    config = {"perturbation": {"name": "neighbor", "rate": 0.3}, "sampling_masks": True}
    small = build_engine(model, None, additional_config=config, logprobs_mode="processed_logprobs", **CROWDED)
    preempted = note_preemptions(small)
    rollouts, masks = sample_with_masks(small, chat_prompts(small, copies=2), top_p=0.9)
    assert len(preempted) >= 3
    corrected = trainer_log_probs(hf_model, rollouts, masks)
    assert (corrected - processed_log_probs(rollouts)).abs().max() < 1e-4
