# SPDX-License-Identifier: Apache-2.0
"""Math answers, checked by math-verify in a process of its own.

math-verify limits its time by an alarm, which works on the main thread only and cannot stop a number such as
9^(9^9) being multiplied out. A child process can be stopped from any thread, whatever it does.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from multiprocessing import Pipe
from typing import Any

from ngrpo.scoring.problem import UNREADABLE, Verdict
from perturbations.errors import UsageError

# The child gives up by itself after some 12 s (math_worker.py); this is for what it cannot interrupt.
HARD_LIMIT_SECONDS = 30.0
# Importing sympy takes a second, on a busy machine many.
_START_SECONDS = 180.0
_WORKER = "ngrpo.scoring.math_worker"


class MathChecker:
    """A child process that compares answers, restarted when it hangs or dies; usable from any thread."""

    def __init__(self, limit: float = HARD_LIMIT_SECONDS) -> None:
        """
        Args:
            limit: seconds for one comparison, after which the answer counts as unreadable.
        """
        self._limit = limit
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, answer: str, text: str) -> Verdict:
        """As :func:`check`."""
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._start()
            try:
                self._channel.send((answer, text))
                return self._reply(self._limit)
            except (OSError, EOFError):
                self.close()
                return UNREADABLE

    def close(self) -> None:
        """Ends the child."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._channel.close()
        self._child = None

    def _reply(self, seconds: float) -> Any:
        if not self._channel.poll(seconds):
            raise TimeoutError
        return self._channel.recv()

    def _start(self) -> None:
        """A program of its own and not a fork: the parent may be a user's script, or hold a model and its threads."""
        if find_spec("math_verify") is None:
            raise UsageError(
                "math answers are checked by math-verify, which is not installed. Run: pip install math-verify"
            )
        self.close()
        self._channel, theirs = Pipe()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", _WORKER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        try:
            self._reply(_START_SECONDS)
        except (OSError, EOFError):
            self.close()
            raise UsageError(
                f"the process that checks math answers did not start. Try: {sys.executable} -c 'import math_verify'"
            ) from None


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
