# SPDX-License-Identifier: Apache-2.0
"""Rollout against replay on the pretrained SmolLM2; every perturbation on a random model is in test_v2.py."""

from typing import Any

import pytest

from ngrpo.rollout import set_perturbation
from tests.stack.harness import assert_exact


@pytest.fixture(scope="module")
def model(smollm2: str) -> str:
    return smollm2


@pytest.mark.parametrize(("name", "rate"), [("neighbor", 0.1), ("gumbel", 1.0)])
def test_replay_equals_rollout(engine: Any, hf_model: Any, name: str, rate: float) -> None:
    set_perturbation(engine, name, rate=rate)
    rollouts, tokens = assert_exact(engine, hf_model, rate)
    if name == "neighbor":
        bytes_of_records = sum(len(rollout.record.to_bytes()) for rollout in rollouts)
        assert bytes_of_records <= 3 * tokens
