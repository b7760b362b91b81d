# SPDX-License-Identifier: Apache-2.0
"""The replay behind pictures, and the routes of a mixture of experts, as docs/models.md has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT

VISION = ROOT / ".venv" / "vision"
pytestmark = [pytest.mark.stack, pytest.mark.slow]


def printed(*words: str) -> str:
    paths = [str(ROOT), *([str(VISION)] if VISION.is_dir() else []), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=True
    ).stdout


@pytest.mark.skipif(not VISION.is_dir() and find_spec("torchvision") is None, reason="torchvision is missing")
def test_the_replay_behind_a_picture_is_exact(tmp_path: Path) -> None:
    printed("benchmarks.models.picture_rollouts", "qwen3_vl", "--json", str(tmp_path / "rows"))
    row = json.loads((tmp_path / "rows").read_text())
    assert row["unperturbed"][0] < 1e-4, row
    assert row["perturbed"][0] < 1e-4, row
    assert row["unreplayed"][0] > 0.1, row


def test_in_float32_no_token_is_routed_otherwise() -> None:
    output = printed("benchmarks.routing", "qwen3_moe", "--dtype", "float32")
    lines = [line for line in output.splitlines() if "routed otherwise" in line]  # DeepSpeed prints there too
    assert len(lines) == 2, output
    assert all(" 0 of 768 tokens routed otherwise" in line for line in lines), output
