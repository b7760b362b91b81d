# SPDX-License-Identifier: Apache-2.0
"""``--sampling.correct_mask`` in a real training run without a perturbation.

Slow, `make test-all`: tests/stack/test_sampling_mask.py holds the log-probabilities.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.pipeline.harness import GAP, steps_of

pytestmark = [pytest.mark.stack, pytest.mark.slow]
# At this temperature the twenty likeliest tokens hold so little, on average exp(-0.56) in answers to such prompts, that
# a trainer of the whole distribution would show a gap, and a vllm_kl, of 0.56.
TRUNCATED = ["--sampling.top_k", "20", "--rollout.temperature", "1.5", "--sampling.correct_mask"]


def test_the_trainer_scores_what_the_rollout_drew_from(tmp_path: Path, smollm2: str) -> None:
    correction = ["--algo.advantage.is_correction_level", "token", "--algo.advantage.is_correction_mode", "clip"]
    steps = steps_of(tmp_path, smollm2, "--perturbation", "none", *TRUNCATED, *correction)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["sampling"] == {
        "temperature": 1.5,
        "top_p": 1.0,
        "top_k": 20,
        "min_p": None,
        "correct_mask": True,
    }
    for number, step in enumerate(steps, start=1):
        # OpenRLHF's own: the mean of log π_rollout − log π_trainer, with the engine's processed log-probabilities.
        kl = summary["scalars"]["train/vllm_kl"][str(number)]
        print(f"step {number}: gap {step['gap_plain_mean']:.1e}, at most {step['gap_plain_max']:.1e}; vllm_kl {kl:.1e}")
        assert step["gap_plain_mean"] <= GAP and abs(kl) <= GAP
        assert math.isfinite(summary["scalars"]["train/policy_loss"][str(number)])
