# SPDX-License-Identifier: Apache-2.0
"""An engine of two tensor-parallel ranks, which vLLM places by Ray as on CUDA, in a run's own Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["neighbor", pytest.param("none", marks=pytest.mark.slow)])
def test_an_engine_of_two_ranks_starts_in_ray(tiny: str, name: str) -> None:
    """With RAY_ADDRESS=local, which an engine's core must not take for itself; unperturbed without flash-attn too."""
    folders = [str(HERE / "ray_on_cpu"), str(HERE.parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "RAY_ADDRESS": "local"}
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # as on CUDA: the engine's core is a process of its own
    program = [sys.executable, str(HERE / "ray_engine.py"), tiny, name]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=400, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, (done.stdout + done.stderr)[-6000:]
    result = json.loads(lines[0].removeprefix("RESULT "))
    assert result == {"tokens": 8, "ranks": 2, "at once": 8}, "--engine.max_num_seqs holds, perturbed or not"
