# SPDX-License-Identifier: Apache-2.0
"""Whole runs of `ngrpo train` in processes of their own, small enough for a test."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "--task": "arithmetic",
    "--algo.advantage.estimator": "group_norm",
    "--rollout.batch_size": "4",
    "--rollout.n_samples_per_prompt": "4",
    "--rollout.micro_batch_size": "8",
    "--rollout.max_new_tokens": "12",
    "--train.batch_size": "16",
    "--train.micro_batch_size": "8",
    "--data.max_len": "128",
    "--data.max_samples": "8",
    "--actor.lr_scheduler": "constant",
    "--ds.attn_implementation": "eager",  # the fastest for answers as short as these; test_training has the default too
}
# The learning rate is large so that a weight sync that misses a tensor shows in the gap of step 2.
LOUD = ["--actor.adam.lr", "1e-4", "--actor.lr_warmup_ratio", "0"]

# An exact replay in float32, in which a CPU trains, has a smaller gap between rollout and trainer; a missed one
# has more than 0.3.
GAP = 1e-4

PROGRAM = [sys.executable, "-m", "ngrpo.cli", "train", "--run-dir"]
EXAMPLE = ["bash", "examples/train_neighbor_cpu.sh"]


def completed(command: Sequence[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command that has ended, from the project's root; both of its streams are ``stdout``."""
    with begun(command, env) as process:
        try:
            output, _ = process.communicate(timeout=1500)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def begun(command: Sequence[str], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    whole = {**os.environ, "PATH": scripts, **(env or {})}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=whole, text=True, **streams)


def small(folder: Path, model: str, *flags: str, program: Sequence[str] = PROGRAM) -> list[str]:
    """The words of a small run."""
    return [*program, str(folder), "--model", model, *(word for pair in SMALL.items() for word in pair), *flags]


def train(
    folder: Path, model: str, *flags: str, env: dict[str, str] | None = None, program: Sequence[str] = PROGRAM
) -> subprocess.CompletedProcess[str]:
    return completed(small(folder, model, *flags, program=program), env)


def steps_of(folder: Path, model: str, *flags: str, program: Sequence[str] = PROGRAM) -> list[dict[str, Any]]:
    result = train(folder, model, *flags, program=program)
    assert result.returncode == 0, result.stdout[-6000:]
    steps = json.loads((folder / "summary.json").read_text())["steps"]
    assert len(steps) == 2
    return steps


def assert_nothing_runs(folder: Path) -> None:
    """No process of a run in this folder is left soon after its end, also none of its engines."""

    def named(process: psutil.Process) -> bool:
        # vLLM's processes have other names than their command's, but the variables that the run gave them.
        words = (*(process.info["cmdline"] or ()), *(process.info["environ"] or {}).values())
        return any(str(folder) in word for word in words)

    until = time.monotonic() + 60  # an engine clears up its memory first, which takes long beside other programs
    while True:
        everyone = psutil.process_iter(["cmdline", "environ"])
        left = [p.info["cmdline"] for p in everyone if p.pid != os.getpid() and named(p)]
        if not left:
            return
        assert time.monotonic() < until, left
        time.sleep(0.5)
