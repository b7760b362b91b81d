# SPDX-License-Identifier: Apache-2.0
"""What V2's sampler hands to the perturber: the adapter's side of it, in seconds and for each release of vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack


def test_the_perturber_sees_every_kind_of_request() -> None:
    command = [sys.executable, "-m", "tests.stack.v2_sampler"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200, check=False)
    assert "RIGHT" in done.stdout, done.stdout[-1000:] + done.stderr[-4000:]
