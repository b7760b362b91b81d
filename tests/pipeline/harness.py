# SPDX-License-Identifier: Apache-2.0
"""Whole runs of `ngrpo train` in processes of their own, small enough for a test."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
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
    "--ds.attn_implementation": "eager",  # The fastest for short answers; test_training.py has the default too.
}
# The learning rate is large so that a weight sync that misses a tensor shows in the gap of step 2.
LOUD = ["--actor.adam.lr", "1e-4", "--actor.lr_warmup_ratio", "0"]

GAP = 1e-4
"""The gap between rollout and trainer is smaller where the replay is exact in float32, in which a CPU trains.

Without the replay the gap is more than 0.3.
"""

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
    """As :func:`completed`, of a command that still runs."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment_with_scripts(), **(env or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def environment_with_scripts() -> dict[str, str]:
    """The environment of this process, with the scripts beside this Python first on its PATH."""
    scripts = Path(sys.executable).parent
    return {**os.environ, "PATH": os.pathsep.join([str(scripts), os.environ["PATH"]])}


def words_of(options: Mapping[str, str]) -> list[str]:
    """Flags and their values as the words of a command line."""
    words: list[str] = []
    for flag, value in options.items():
        words += [flag, value]
    return words


def small(folder: Path, model: str, *flags: str, program: Sequence[str] = PROGRAM) -> list[str]:
    """The words of a small run."""
    return [*program, str(folder), "--model", model, *words_of(SMALL), *flags]


def train(
    folder: Path,
    model: str,
    *flags: str,
    env: dict[str, str] | None = None,
    program: Sequence[str] = PROGRAM,
) -> subprocess.CompletedProcess[str]:
    """A small run that has ended."""
    return completed(small(folder, model, *flags, program=program), env)


def summary_of(
    folder: Path,
    model: str,
    *flags: str,
    env: dict[str, str] | None = None,
    program: Sequence[str] = PROGRAM,
) -> dict[str, Any]:
    """The summary of a small run, which must succeed."""
    result = train(folder, model, *flags, env=env, program=program)
    assert result.returncode == 0, result.stdout[-6000:]
    return json.loads((folder / "summary.json").read_text())


def steps_of(
    folder: Path,
    model: str,
    *flags: str,
    env: dict[str, str] | None = None,
    program: Sequence[str] = PROGRAM,
) -> list[dict[str, Any]]:
    """The two steps of a small run, which must succeed."""
    steps = summary_of(folder, model, *flags, env=env, program=program)["steps"]
    assert len(steps) == 2
    return steps


def assert_nothing_runs(folder: Path) -> None:
    """No process of a run in this folder is left soon after its end, also none of its engines."""
    # An engine frees its memory before it ends, which takes long beside other programs.
    deadline = time.monotonic() + 60
    while True:
        left = _commands_of_run(folder)
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def _commands_of_run(folder: Path) -> list[list[str]]:
    """The commands of all other processes that name the folder.

    vLLM's processes have other names than their command's, but they have the variables that the run gave them.
    """
    commands = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        command = process.info["cmdline"] or []
        environment = process.info["environ"] or {}
        words = [*command, *environment.values()]
        if process.pid != os.getpid() and any(str(folder) in word for word in words):
            commands.append(command)
    return commands
