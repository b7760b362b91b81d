# SPDX-License-Identifier: Apache-2.0
"""Groups that a run keeps for its report: which steps, which answers, what of each token, and how much."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.trainers.openrlhf.kept_groups import STEP_BYTES, STEPS, KeptGroups, diversity, of_step, read
from perturbations import FinishedTrajectory
from tests.support.openrlhf_doubles import maker
from tests.support.replay_examples import small
from tests.support.run import run_with


class Tokenizer:
    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(96 + token) for token in tokens)


def experiences(size: int = 2, prompts: int = 2, *, length: int = 3, perturbed: bool = True) -> list[Any]:
    """One batch with the responses in reverse: response i of i + 1's token, its advantages i, its reward i mod 2."""
    total = size * prompts
    order = list(reversed(range(total)))
    sequences = torch.full((total, 2 + length), 26)
    sequences[:, 2:] = torch.tensor(order).unsqueeze(1) % 20 + 1
    mask = torch.ones(total, 1 + length)
    mask[:, 0] = 0
    rollout = np.array([np.nan, np.nan, -1.5] + [-1.0] * (length - 1), np.float32)
    record = dataclasses.replace(small([3]), prompt_tokens=2, num_tokens=5)  # tokens 1 and 3, half and half
    packed = FinishedTrajectory(record, rollout).pack()
    experience = SimpleNamespace(
        sequences=sequences,
        action_mask=mask,
        index=order,
        rewards=torch.tensor([float(place % 2) for place in order]),
        advantages=torch.tensor([[0.0] + [float(place)] * length for place in order]),
        action_log_probs=torch.full((total, 1 + length), -1.0),
        rollout_log_probs=None,
        prompts=[f"prompt {place // size}" for place in order],
        mm_train_inputs=[],
        info={},
    )
    if perturbed:
        experience.mm_train_inputs = [packed if place % 2 else None for place in order]
    return [experience]


def test_a_step_by_hand() -> None:
    kept = of_step(experiences(), Tokenizer(), size=2, groups=2, seed="0")
    assert kept["rewards"] == [0.0, 1.0, 0.0, 1.0]
    assert kept["size"] == 2
    assert [group["prompt"] for group in kept["groups"]] == ["prompt 0", "prompt 1"]
    plain, mixed = kept["groups"][1]["answers"]
    assert plain == {"reward": 0.0, "advantage": 2.0, "tokens": ["c", "c", "c"]}
    assert mixed == {
        "reward": 1.0,
        "advantage": 3.0,
        "tokens": ["d", "d", "d"],
        # The first token's log-probability was −1.5 at the rollout, the others' −1.
        "gaps": [0.5, 0.0, 0.0],
        # Position 3 is the second token.
        "fed": [[1, {"candidates": [["a", 0.5], ["c", 0.5]]}]],
    }


def test_a_step_stays_small() -> None:
    long = experiences(size=8, prompts=8, length=2000, perturbed=False)
    kept = of_step(long, Tokenizer(), size=8, groups=8, seed="0")
    assert len(json.dumps(kept, ensure_ascii=False).encode()) <= STEP_BYTES
    assert len(kept["rewards"]) == 64
    response = kept["groups"][0]["answers"][0]
    assert 32 <= len(response["tokens"]) <= 512
    assert response["cut"] == 2000 - len(response["tokens"])


def test_diversity_by_hand() -> None:
    # Pairs: 12, 23 | 12, 24 | 12, 23: three different of six. Common prefixes: 2, 3, 2.
    of_three = {"different": 2.0, "distinct_2": 0.5, "common_prefix": pytest.approx(7 / 3)}
    assert diversity([[1, 2, 3], [1, 2, 4], [1, 2, 3]]) == of_three
    assert diversity([[1], [1]]) == {"different": 1.0, "common_prefix": 1.0}


@pytest.mark.parametrize("steps", [1, 5, STEPS, STEPS + 1, 100, 1000])
def test_kept_steps_are_few_and_spread_evenly(tmp_path: Path, steps: int) -> None:
    groups = KeptGroups(tmp_path, 0)
    computed = []

    def compute() -> dict[str, Any]:
        computed.append(1)
        return {"groups": []}

    for step in range(steps):
        groups.add(step, compute)

    kept_steps = [line["step"] for line in read(tmp_path)]
    distances = {later - earlier for earlier, later in pairwise(kept_steps)}
    assert kept_steps[0] == 1
    assert min(steps, STEPS) // 2 < len(kept_steps) <= STEPS
    assert len(distances) <= 1
    assert len(computed) <= 60


def kept_steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in read(folder)]


def test_a_resumed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    interrupted = KeptGroups(tmp_path, 0)
    for step in range(20):
        interrupted.add(step, dict)
    assert kept_steps_of(tmp_path) == list(range(1, 21, 2))

    # From a checkpoint of step 10: what came after it is forgotten.
    resumed = KeptGroups(tmp_path, 10)
    for step in range(10, 14):
        resumed.add(step, dict)
    assert kept_steps_of(tmp_path) == [1, 3, 5, 7, 9, 11, 13]


def test_a_new_run_begins_anew(tmp_path: Path) -> None:
    earlier = KeptGroups(tmp_path, 0)
    for step in range(20):
        earlier.add(step, dict)
    KeptGroups(tmp_path, 0).add(0, dict)
    assert kept_steps_of(tmp_path) == [1]


def test_a_folder_without_groups_has_none(tmp_path: Path) -> None:
    assert read(tmp_path / "none") == []


def test_what_cannot_be_written_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    kept = KeptGroups(tmp_path / "file", 0)
    for step in range(3):
        kept.add(step, dict)
    assert capsys.readouterr().out.count("groups for the report are not kept") == 1


def test_the_experience_maker_keeps_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, report_groups=1, run_dir=str(tmp_path))
    args = SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=2), train=SimpleNamespace(seed=1))
    experience_maker = maker(strategy=SimpleNamespace(args=args), training_step=0)
    experience_maker.tokenizer = Tokenizer()
    batch = experiences()

    assert experience_maker.make_experience_batch(batch) is batch

    assert experience_maker.step_measures == {"generated_tokens": 12.0}
    (line,) = read(tmp_path)
    assert line["step"] == 1
    assert len(line["groups"]) == 1
