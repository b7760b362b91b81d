"""Math answers, checked by math-verify in a process of its own.

math-verify limits its time by an alarm, which works on the main thread only and cannot stop a number such as
9^(9^9) being multiplied out. A child process can be stopped from any thread, whatever it does.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

from ngrpo.evaluate.problem import Verdict
from perturbations.errors import UsageError

# The child gives up by itself after some 12 s (math_worker.py); this is for what it cannot interrupt.
HARD_LIMIT_SECONDS = 30.0
# Importing sympy takes a second, on a busy machine many.
_START_SECONDS = 180.0
_ROOT = str(Path(__file__).resolve().parents[2])


class MathChecker:
    """A child process that compares answers, restarted when it hangs or dies; usable from any thread."""

    def __init__(self, limit: float = HARD_LIMIT_SECONDS) -> None:
        """
        Args:
            limit: seconds for one comparison, after which the answer counts as unreadable.
        """
        self._limit = limit
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def check(self, answer: str, text: str) -> Verdict:
        """As :func:`check`."""
        with self._lock:
            reply = self._ask(answer, text)
        if reply is None:
            return Verdict(0.0, False, None, False)
        correct = bool(reply["correct"])
        return Verdict(float(correct), correct, reply["extracted"], reply["extracted"] is not None)

    def close(self) -> None:
        """Ends the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()

    def _ask(self, answer: str, text: str) -> dict[str, object] | None:
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._child = _start()
        child = self._child
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps({"answer": answer, "text": text}) + "\n")
            child.stdin.flush()
            ready, _, _ = select.select([child.stdout], [], [], self._limit)
            line = child.stdout.readline() if ready else ""
            if line:
                return json.loads(line)
        except (OSError, ValueError):
            pass
        self.close()
        return None


def _start() -> subprocess.Popen[str]:
    if find_spec("math_verify") is None:
        raise UsageError(
            "math answers are checked by math-verify, which is not installed. Run: pip install math-verify"
        )
    path = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
    child = subprocess.Popen(
        [sys.executable, "-m", "ngrpo.evaluate.math_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": path},
    )
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], _START_SECONDS)
    if not ready or not child.stdout.readline():
        child.kill()
        raise UsageError(
            f"the process that checks math answers did not start. Try: {sys.executable} -m ngrpo.evaluate.math_worker"
        )
    return child


_shared = MathChecker()
atexit.register(_shared.close)


def check(answer: str, text: str) -> Verdict:
    """Compares a model's answer with the reference.

    Args:
        answer: the reference: LaTeX or plain, without dollar signs or with them.
        text: what the model said. The last ``\\boxed{}`` counts, else what is stated as the answer, else the whole
            text where it is nothing but an answer, else the last expression that math-verify finds.

    Returns:
        The verdict; ``extracted`` is sympy's form of the answer. An answer that takes longer than
        :data:`HARD_LIMIT_SECONDS` counts as unreadable.

    Raises:
        UsageError: where math-verify is not installed.
    """
    return _shared.check(answer, text)
