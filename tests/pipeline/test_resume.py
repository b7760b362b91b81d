# SPDX-License-Identifier: Apache-2.0
"""A run that was killed and resumed from its checkpoint is the run that was never killed, step by step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.harness import LOUD, start, train

FLAGS = [
    *["--perturbation", "neighbor", "--perturbation.rate", "0.5", "--advantage", "copo", "--reproducible"],
    *["--ckpt.save_steps", "1", "--ckpt.max_num", "1", "--train.num_episodes", "2"],
]
# Wall-clock times differ from run to run, and so do sizes that depend on them.
CLOCK = ("seconds", "tokens_per_second")


def same(step: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in step.items() if not key.endswith(CLOCK)}


def steps(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "summary.json").read_text())["steps"]


def wait_for(path: Path, process: subprocess.Popen, seconds: float = 400.0) -> None:
    until = time.monotonic() + seconds
    while not path.is_file():
        assert process.poll() is None and time.monotonic() < until, f"{path} never came"
        time.sleep(0.05)


@pytest.mark.slow
def test_killed_in_a_step_and_resumed(tmp_path: Path, smollm2: str) -> None:
    """Four steps over two epochs, so that prompts come again; the trainer is killed once step 2 is saved."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    result = train(whole, smollm2, *LOUD, *FLAGS)
    assert result.returncode == 0, result.stdout[-4000:]
    log = tmp_path / "log"
    with start(killed, smollm2, *LOUD, *FLAGS, "--log-file", str(log)) as process:
        # The file that names the newest checkpoint is written last; by then the next rollout has begun.
        latest = killed / "checkpoints" / "_actor" / "latest"
        wait_for(latest, process)
        while latest.read_text() != "global_step2":
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(1.0)
        os.kill(process.pid, signal.SIGKILL)
    result = train(killed, smollm2, *LOUD, *FLAGS, "--ckpt.load_enable")
    assert result.returncode == 0, result.stdout[-4000:]
    resumed = [step for step in steps(killed) if step["step"] > 2]
    assert [step["step"] for step in resumed] == [3, 4]
    assert [same(step) for step in resumed] == [same(step) for step in steps(whole)[2:]]
