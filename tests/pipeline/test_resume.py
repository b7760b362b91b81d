# SPDX-License-Identifier: Apache-2.0
"""A run that was killed and resumed from its checkpoint is the run that was never killed, step by step."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipeline.harness import LOUD, begun, small, train

FLAGS = [
    *["--perturbation", "neighbor", "--perturbation.rate", "0.5", "--advantage", "copo"],
    *["--ckpt.save_steps", "1", "--ckpt.max_num", "1", "--train.num_episodes", "2"],
]
# Wall-clock times differ from run to run, and so do sizes that depend on them. A resumed process measures its own scale
# of gaps, and the drift of neighbor sets from its own start on.
CLOCK = ("seconds", "tokens_per_second", "gap_unperturbed_mean", "neighbors_changed", "neighbors_changed_since_start")


def same(step: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in step.items() if not key.endswith(CLOCK)}


def steps(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "summary.json").read_text())["steps"]


@pytest.mark.slow
def test_killed_in_a_step_and_resumed(tmp_path: Path, smollm2: str) -> None:
    """Four steps over two epochs, so that prompts come again; the trainer is killed once step 2 is saved."""
    whole, killed, flags = tmp_path / "whole", tmp_path / "killed", [*LOUD, *FLAGS, "--reproducible"]
    result = train(whole, smollm2, *flags)
    assert result.returncode == 0, result.stdout[-4000:]
    resumed = killed_and_resumed(killed, smollm2, *flags)
    assert [same(step) for step in resumed] == [same(step) for step in steps(whole)[2:]]


@pytest.mark.slow
def test_where_asynchronous_the_round_and_the_counts_go_on(tmp_path: Path, smollm2: str) -> None:
    """Its rollouts are a step ahead of the training, so it is no copy of a whole run; what it counts goes on."""
    folder = tmp_path / "run"
    resumed = killed_and_resumed(folder, smollm2, *LOUD, *FLAGS, "--train.async_enable")
    third, fourth = (step["advantage_outcomes"] for step in resumed)
    assert 16 < third <= fourth, "a step has 16 answers, so some are of the steps before the kill"
    (states,) = folder.glob("checkpoints/_actor/global_step4/mp_rank_*_model_states.pt")
    kept = torch.load(states, weights_only=False)
    assert kept["data_loader_state_dict"]["ngrpo_round"] == 4
    assert len(kept["ngrpo"]["visits"]) == fourth


def killed_and_resumed(folder: Path, smollm2: str, *flags: str) -> list[dict[str, Any]]:
    """The steps after the second of a run that is killed once that one is saved, and then goes on."""
    with begun(small(folder, smollm2, *flags, "--log-file", str(folder.with_suffix(".log")))) as process:
        # The file that names the newest checkpoint is written last; by then the next rollout has begun.
        latest = folder / "checkpoints" / "_actor" / "latest"
        until = time.monotonic() + 400.0
        while not (latest.is_file() and latest.read_text() == "global_step2"):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        time.sleep(1.0)
        os.kill(process.pid, signal.SIGKILL)
    result = train(folder, smollm2, *flags, "--ckpt.load_enable")
    assert result.returncode == 0, result.stdout[-4000:]
    resumed = [step for step in steps(folder) if step["step"] > 2]
    assert [step["step"] for step in resumed] == [3, 4]
    return resumed
