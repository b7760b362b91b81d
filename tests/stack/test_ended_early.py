# SPDX-License-Identifier: Apache-2.0
"""`ngrpo eval` ended by signals while its engine runs: nothing stays, what was sampled is kept."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow
EVALUATION = [
    *("--task", "arithmetic"),
    *("--n", "400"),
    *("--max-tokens", "24"),
    *("--temperature", "1"),
    *("--hardware", "cpu"),
]


def size_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def start(folder: Path, smollm2: str, apart: bool) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """An evaluation that has begun to keep samples, and the processes below it.

    Args:
        folder: where its samples go.
        smollm2: the model.
        apart: whether the engine is a process of its own, as it is with CUDA.
    """
    samples = folder / "samples.jsonl"
    size_before = size_of(samples)
    environment = dict(os.environ)
    if apart:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    process = subprocess.Popen(
        [sys.executable, "-m", "ngrpo.cli", "eval", "--model", smollm2, *EVALUATION, "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    deadline = time.monotonic() + 120
    while size_of(samples) == size_before:
        is_waiting = process.poll() is None and time.monotonic() < deadline
        assert is_waiting, process.stdout and process.stdout.read()
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    commands = [" ".join(child.cmdline()) for child in children]
    assert any("EngineCore" in command for command in commands) == apart
    return process, children


@pytest.mark.parametrize("apart", [True, False])
def test_ended_by_signals(apart: bool, tmp_path: Path, smollm2: str) -> None:
    folder = tmp_path / "out"
    process, children = start(folder, smollm2, apart)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert "Traceback" not in output
    assert f"what was finished is kept in {folder}. Go on with: ngrpo eval" in output
    _, alive = psutil.wait_procs(children, timeout=1)
    assert alive == []
    kept = len((folder / "samples.jsonl").read_text().splitlines())

    process, children = start(folder, smollm2, apart)
    process.kill()
    output, _ = process.communicate(timeout=60)
    assert f"going on: {kept} of" in output
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
