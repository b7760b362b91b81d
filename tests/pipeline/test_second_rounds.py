# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF trains on answers of a second round. Slow: `make test-all`.

Rewards are such that the first round is always wrong, so that what is trained follows from the method alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ngrpo.methods.second_rounds.lope import WORDS
from tests.pipeline.harness import LOUD, steps_of

pytestmark = pytest.mark.slow

AFTER_NONSENSE = f"""
import torch

WORDS = {set(WORDS)!r}


def reward_func(queries, prompts, labels, **kwargs):
    found = [len(WORDS & set(prompt.split())) > 5 for prompt in prompts]
    return {{"rewards": torch.tensor(found).float(), "scores": torch.tensor(found).float()}}
"""
# The prompt of each call is counted where it is rewarded: in the engine's process, from 4 answers on it is right.
AFTER_FOUR = """
from collections import Counter

import torch

asked = Counter()


def reward_func(queries, prompts, labels, **kwargs):
    found = []
    for prompt in prompts:
        asked[prompt] += 1
        found.append(asked[prompt] > 4)
    return {"rewards": torch.tensor(found).float(), "scores": torch.tensor(found).float()}
"""
FLAGS = [*LOUD, "--advantage", "group_norm"]


def test_answers_after_nonsense_are_trained(tmp_path: Path, smollm2: str) -> None:
    """In a run with an evaluation, which has no second round: its score is 0."""
    (tmp_path / "rewards.py").write_text(AFTER_NONSENSE)
    flags = ["--second_round", "lope", "--second_round.prompts", "2", "--second_round.answers", "2"]
    flags += ["--second_round.least", "20", "--second_round.most", "40", "--eval.steps", "1"]
    steps = steps_of(tmp_path / "run", smollm2, *FLAGS, *flags, "--reward.remote_url", str(tmp_path / "rewards.py"))
    for step in steps:
        assert step["second_round_asked"] == step["second_round_right"] == step["second_round_solved"] == 1.0
        assert step["second_round_trained"] == 0.75, "of four answers a wrong one stays"
        assert step["reward"] == pytest.approx(0.75)
        assert 0.3 < step["second_round_ratio"] < 3.0 and abs(step["second_round_ratio"] - 1.0) > 0.02
        # Four of eight answers are right: deviation √(2/7), so ±0.935414.
        assert step["advantage_mean"] == pytest.approx(0.935414 * 0.5, abs=1e-5)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["second_round"]["name"] == "lope"
    assert summary["evaluation"]["eval/eval_default_pass1"] == {"1": 0.0, "2": 0.0}


def test_answers_to_the_same_prompt_have_a_ratio_of_one(tmp_path: Path, smollm2: str) -> None:
    """So the engine's log-probabilities stand at the tokens that they are of, and temperature is in them."""
    (tmp_path / "rewards.py").write_text(AFTER_FOUR)
    flags = ["--second_round", "repeat", "--second_round.answers", "4", "--second_round.group", "kept"]
    flags += ["--rollout.temperature", "0.7", "--reproducible", "--report.groups", "1"]
    steps = steps_of(tmp_path / "run", smollm2, *FLAGS, *flags, "--reward.remote_url", str(tmp_path / "rewards.py"))
    for step in steps:
        assert step["second_round_asked"] == 1.0 and step["second_round_trained"] == 0.75
        assert step["second_round_ratio"] == pytest.approx(1.0, abs=0.03)
        assert step["advantage_max"] == pytest.approx(0.5, abs=1e-4), "of the four that are trained"
