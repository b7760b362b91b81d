# SPDX-License-Identifier: Apache-2.0
"""Runs a module of the tests in a process of its own: for what would change this one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.conftest import ROOT

RESULT = "RESULT "
"""How the line of a result begins, among all that engines print."""


def run_module(module: str, *arguments: str, timeout: float = 300.0) -> str:
    """What ``python -m module *arguments`` printed; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def result_of(module: str, *arguments: str, timeout: float = 300.0) -> Any:
    """The JSON on the line of the result."""
    printed = run_module(module, *arguments, timeout=timeout)
    return json.loads(next(line for line in printed.splitlines() if line.startswith(RESULT)).removeprefix(RESULT))
