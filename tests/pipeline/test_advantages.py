# SPDX-License-Identifier: Apache-2.0
"""Our advantages and sampling where OpenRLHF uses them: its own experience maker, and a real training run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ngrpo.methods.advantages import compute, create
from tests.own_process import run_module
from tests.pipeline.harness import GAP, steps_of
from tests.pipeline.openrlhf_experience import REWARDS, SIZE

GROUPS = torch.tensor(REWARDS).reshape(-1, SIZE)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What OpenRLHF's own classes computed with the patches in place."""
    return json.loads(run_module("tests.pipeline.openrlhf_experience").splitlines()[-1])


def check_tokens(answers: list[list[float]], expected: torch.Tensor) -> None:
    """Every token of an answer has the answer's advantage, in the order in which they were generated."""
    flat = expected.flatten().tolist()
    assert [len(tokens) for tokens in answers] == [1 + place % 3 for place in range(len(flat))]
    for tokens, value in zip(answers, flat, strict=True):
        assert tokens == pytest.approx([value] * len(tokens), abs=1e-6)


def test_each_answer_gets_our_advantage(found: dict[str, Any]) -> None:
    """Which for `group_norm` is OpenRLHF's own, to the bit, where rewards are 0 and 1."""
    assert found["group_norm"] == found["stock"]
    for name in ("group_norm", "ngrpo", "nsr"):
        check_tokens(found[name], compute(name, GROUPS))
    assert "12 responses are not a whole number of groups of 5" in found["incomplete"]


def test_answers_that_were_cut_off_are_out_of_their_groups(found: dict[str, Any]) -> None:
    """Places 2, 5, 8, 11, of three tokens."""
    overlong = torch.tensor([place % 3 == 2 for place in range(len(REWARDS))]).reshape(-1, SIZE)
    check_tokens(found["exclude"], create("group_norm", overlong="exclude").compute(GROUPS, overlong=overlong))
    assert found["exclude"] != found["group_norm"] and found["excluded"] == pytest.approx(1 / 3)


def test_copo_counts_over_steps(found: dict[str, Any]) -> None:
    """With β = 1. First step: N is how many others say the same, 0 1 1 0 for prompt a, so 1 + 1, 1/√2, 1/√2, 1; with
    the mean 1.1035534 and the deviation 0.6133731. Second step: 1 3 3 1 (each was seen once more by every visit of the
    first step), so 1 + 1/√2, 1/2, 1/2, 1/√2; mean 0.8535534, deviation 1/√3. In prompt b one answer differs from three
    equal ones (as in group_norm of 1 0 0 0), in c none does."""
    rest = [1.5, -0.5, -0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    first, second = found["copo"]
    check_tokens(first, torch.tensor([1.4615030, -0.6463384, -0.6463384, -0.1688261, *rest]))
    check_tokens(second, torch.tensor([1.4783978, -0.6123724, -0.6123724, -0.2536530, *rest]))
    assert found["copo_metrics"]["advantage/count_mean"] == pytest.approx((8 + 16 + 28) / 12)
    assert found["copo_metrics"]["advantage/outcomes"] == 3 + 2 + 1


def test_k_follows_the_step(found: dict[str, Any]) -> None:
    first, later = found["pass_at_k"]
    check_tokens(first, compute("pass_at_k", GROUPS, k=2))
    check_tokens(later, compute("pass_at_k", GROUPS, k=1))


def test_openrlhfs_length_penalty_comes_first(found: dict[str, Any]) -> None:
    """Places 2, 5, 8, 11 have three tokens, of which one lies in the buffer of two: they lose 1/2."""
    rewards = torch.tensor([reward - 0.5 * (place % 3 == 2) for place, reward in enumerate(REWARDS)])
    check_tokens(found["ngrpo_overlong"], compute("ngrpo", rewards.reshape(-1, SIZE)))
    assert found["metrics"]["advantage/uniform_groups"] == pytest.approx(2 / 3)
    assert found["metrics"]["advantage/uniform_mean"] == pytest.approx(-0.2 / math.sqrt(0.2) / 2, abs=1e-5)


def test_masks_are_on_in_rollouts_and_off_in_evaluation(found: dict[str, Any]) -> None:
    masked = [0.9, 0.8, 5, 0.1]
    assert found["sampling"] == {"rollout": masked, "evaluation": [0.6, 0.8, -1, 0.0], "again": masked}


def test_ngrpo_with_neighbor_mixing_and_masks_trains(tmp_path: Path, random_model: str) -> None:
    """Both near-equal names at once. With n = 1 and four answers, all-wrong groups get -0.2/√0.2 (test_advantages in
    tests/fast), and nothing else can be uniform, since all-correct prompts are filtered out."""
    flags = ["--advantage", "ngrpo", "--perturbation", "neighbor", "--sampling.top_k", "20", "--sampling.min_p", "0.1"]
    flags += ["--credit", "top_entropy"]
    steps = steps_of(tmp_path, random_model, *flags, "--algo.kl.init_coef", "0")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["advantage"] == {"name": "ngrpo", "n": 1, "max_reward": 1.0}
    assert summary["versions"]["model runner"] == "V1"
    assert summary["sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 20, "min_p": 0.1, "correct_mask": False}
    assert "--actor.eps_clip_low_high 0.16 0.24" in " ".join(summary["openrlhf_args"])
    all_wrong = [step["advantage_uniform_mean"] for step in steps if "advantage_uniform_mean" in step]
    assert all_wrong == pytest.approx([-0.2 / math.sqrt(0.2)] * len(all_wrong), abs=1e-5) and all_wrong
    for number, step in enumerate(steps, start=1):
        # What the trainer itself trained on: OpenRLHF's "return" is the mean over the samples it received.
        assert summary["scalars"]["train/return"][str(number)] == pytest.approx(step["advantage_mean"], abs=1e-5)
        assert 0.0 < step["credit_trained"] < 0.6 and step["credit_entropy"] > 0.1  # a fifth, more or less in a group
        assert step["gap_plain_mean"] <= GAP  # log-probabilities are those before the masks, on both sides
