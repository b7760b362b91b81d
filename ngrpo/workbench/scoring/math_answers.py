# SPDX-License-Identifier: Apache-2.0
"""Math answers, checked in a process of its own (math_worker.py).

Some answers take sympy for ever, such as 9^(9^9) multiplied out, which no exception interrupts. A child process may be
ended whatever it does. It is a program of its own and neither a fork nor one of multiprocessing: the parent may hold a
model and its threads, and may be a script that must not run twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from ngrpo.workbench.scoring import TIMED_OUT, Verdict
from perturbations.errors import UsageError

_lock = threading.Lock()
_child: Any = None


def check(answer: str, text: str) -> Verdict:
    """Compares a model's answer with the reference; from any thread.

    Args:
        answer: the reference: LaTeX or plain, without dollar signs or with them.
        text: what the model said. docs/evaluation.md says which part of it counts.

    Returns:
        The verdict; ``timed_out`` where two tries took more seconds of the processor than
        :data:`ngrpo.workbench.scoring.math_worker.CPU_SECONDS` each, however busy the machine.

    Raises:
        UsageError: where math-verify is not installed.
    """
    with _lock:
        for _ in range(2):
            verdict = _ask(answer, text)
            if verdict.verdict != TIMED_OUT:
                break
        return verdict


def _ask(answer: str, text: str) -> Verdict:
    """The child's verdict; a new child's where the last one has ended. A child ends with its parent's pipe."""
    global _child
    if _child is None or _child.poll() is not None:
        if find_spec("math_verify") is None:
            raise UsageError(
                "math answers are checked by math-verify, which is not installed. Run: pip install math-verify"
            )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "ngrpo.workbench.scoring.math_worker"]
        pipe = subprocess.PIPE
        _child = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, text=True
        )
    with suppress(BrokenPipeError):
        print(json.dumps([answer, text]), file=_child.stdin, flush=True)
    reply = _child.stdout.readline()
    if reply:
        return Verdict(**json.loads(reply))
    if _child.wait() > 0:  # neither ended by its time limit nor by the system
        raise UsageError(
            f"the process that checks math answers did not start. Try: {sys.executable} -c 'import math_verify'"
        )
    return Verdict(TIMED_OUT)
