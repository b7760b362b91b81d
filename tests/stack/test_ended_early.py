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
WORDS = ["--task", "arithmetic", "--n", "400", "--max-tokens", "24", "--temperature", "1", "--hardware", "cpu"]


def start(folder: Path, smollm2: str, apart: bool) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """An evaluation that has begun to keep samples, and the processes below it.

    Args:
        folder: where its samples go.
        smollm2: the model.
        apart: whether the engine is a process of its own, as it is with CUDA.
    """
    samples = folder / "samples.jsonl"
    before = samples.stat().st_size if samples.exists() else 0
    process = subprocess.Popen(
        [sys.executable, "-m", "ngrpo.cli", "eval", "--model", smollm2, *WORDS, "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} if apart else {})},
    )
    deadline = time.monotonic() + 120
    while not samples.exists() or samples.stat().st_size == before:
        assert process.poll() is None and time.monotonic() < deadline, process.stdout and process.stdout.read()
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    assert any("EngineCore" in " ".join(child.cmdline()) for child in children) == apart
    return process, children


@pytest.mark.parametrize("apart", [True, False])
def test_ended_by_signals(apart: bool, tmp_path: Path, smollm2: str) -> None:
    folder = tmp_path / "out"
    process, children = start(folder, smollm2, apart)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "Traceback" not in output, output
    assert f"what was finished is kept in {folder}. Go on with: ngrpo eval" in output
    assert psutil.wait_procs(children, timeout=1)[1] == []
    kept = len((folder / "samples.jsonl").read_text().splitlines())

    process, children = start(folder, smollm2, apart)
    process.kill()
    output, _ = process.communicate(timeout=60)
    assert f"going on: {kept} of" in output
    assert psutil.wait_procs(children, timeout=20)[1] == []
