# SPDX-License-Identifier: Apache-2.0
"""Rollout against replay on the pretrained SmolLM2; every perturbation on a random model is in test_v2.py."""

from typing import Any

import numpy as np
import pytest

from ngrpo.rollout import set_perturbation
from tests.stack.harness import chat_prompts, gaps, sample

CASES: list[tuple[str, dict[str, Any]]] = [("neighbor", {"rate": 0.1}), ("gumbel", {"rate": 1.0})]
# At rate 1 every position has the inputs of the perturbation; each with its defaults is in test_v2.py.
FURTHER: list[tuple[str, dict[str, Any]]] = [
    ("neighbor", {"variant": "released", "rate": 1.0}),
    ("neighbor", {"metric": "l2", "mix_temperature": 3.0, "rate": 1.0}),
    ("gaussian", {"base": "soft", "rate": 1.0}),
    ("multiplex", {"draws": "distinct", "rate": 1.0}),
]


@pytest.fixture(scope="module")
def model(smollm2: str) -> str:
    return smollm2


@pytest.mark.filterwarnings("ignore:neighbor with rate 1")
@pytest.mark.parametrize(
    ("name", "options"), [*CASES, *(pytest.param(*case, marks=pytest.mark.more) for case in FURTHER)], ids=str
)
def test_replay_equals_rollout(engine: Any, hf_model: Any, name: str, options: dict[str, Any]) -> None:
    set_perturbation(engine, name, **options)
    rollouts = sample(engine, chat_prompts(engine, copies=4), max_tokens=80)
    gap = gaps(hf_model, rollouts)
    # What OpenRLHF's importance sampling compares with the trainer's: vLLM's own log-probability, of the same token.
    for rollout in rollouts:
        np.testing.assert_allclose(rollout.engine_log_probs, rollout.log_probs, atol=1e-4)
    perturbed = sum(len(r.record) for r in rollouts)
    assert len(gap) >= 1000
    assert gap.max() <= 1e-4
    assert gap.mean() <= 1e-5
    assert perturbed == pytest.approx(options["rate"] * len(gap), rel=0.25)
    if name == "neighbor" and options["rate"] == 0.1:
        assert sum(len(r.record.to_bytes()) for r in rollouts) <= 3 * len(gap)
    without = gaps(hf_model, rollouts[::4], replay=False)
    assert without.max() >= 1e-2, "leaving the replay out must show, or this test shows nothing"
