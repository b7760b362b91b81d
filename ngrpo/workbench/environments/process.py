# SPDX-License-Identifier: Apache-2.0
"""The side that asks an environment: one process for each, started on first use.

A process of its own, because the package handles signals, has an event loop, and wants the main thread to be made in;
OpenRLHF calls reward functions in threads.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing import Pipe
from typing import Any

from ngrpo.workbench.environments import Row, Scored
from perturbations.errors import UsageError

INSTALL = "pip install 'verifiers>=0.2,<0.5'"
_WORKER = "ngrpo.workbench.environments.worker"
_QUIET = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
# Environments load datasets.
_START_SECONDS = 600.0


def module_of(environment: str) -> tuple[str, str]:
    """Module and name of ``MODULE[:NAME]``; ``owner/some-environment@1.0`` is the module ``some_environment``."""
    module, _, name = environment.partition(":")
    return module.rpartition("/")[2].partition("@")[0].replace("-", "_"), name


def check(environment: str) -> None:
    """Raises ``UsageError`` unless ``verifiers`` and the environment's module are installed; imports neither."""
    if find_spec("verifiers") is None:
        raise UsageError(f"--task verifiers:{environment}: the package verifiers is not installed. Run: {INSTALL}")
    module, name = module_of(environment)
    try:
        exists = all(part.isidentifier() for part in module.split(".")) and find_spec(module) is not None
    except (ImportError, ValueError):
        exists = False
    if not exists:
        raise UsageError(
            f"--task verifiers:{environment}: there is no installed module {module!r}. Install the environment's"
            " package, or put the folder of your own file into PYTHONPATH."
        )
    if name and not name.isidentifier():
        raise UsageError(
            f"--task verifiers:{environment}: {name!r} is no name of Python. Name the function that makes the"
            " environment, or its Taskset."
        )


class EnvironmentProcess:
    """An environment in a process of its own; usable from any thread."""

    def __init__(self, environment: str) -> None:
        """
        Args:
            environment: ``MODULE[:NAME]``.

        Raises:
            UsageError: where it is not installed, cannot be loaded, or is not served.
        """
        check(environment)
        self._environment = environment
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._asked = 0
        self._channel, theirs = Pipe()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", _WORKER, str(theirs.fileno()), *module_of(environment)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,  # a command's own output stays free of what an environment prints
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **_QUIET},
            )
        self._loaded()
        threading.Thread(target=self._read, daemon=True).start()

    def rows(self) -> tuple[list[Row], list[Row]]:
        """Training and held-out problems.

        Raises:
            UsageError: where the environment has none, or some that are not served.
        """
        try:
            return self._ask(None, "")
        except RuntimeError as error:
            raise UsageError(f"--task verifiers:{self._environment} cannot be used: {error}.") from None

    def score(self, data: dict[str, Any], answer: str) -> Scored:
        """What the environment says of an answer; waits for it, while other threads may ask too.

        Args:
            data: a row's.
            answer: what the model said.

        Raises:
            RuntimeError: where the environment's scoring, or its process, ends in an error.
        """
        return self._ask(data, answer)

    def close(self) -> None:
        """Ends the process."""
        self._child.kill()
        self._child.wait()

    def _ask(self, data: dict[str, Any] | None, answer: str) -> Any:
        future: Future[Any] = Future()
        with self._lock:
            if self._channel.closed:
                raise RuntimeError(self._gone())
            self._asked += 1
            self._waiting[self._asked] = future
            try:
                self._channel.send((self._asked, data, answer))
            except OSError:
                raise RuntimeError(self._gone()) from None
        return future.result()

    def _loaded(self) -> None:
        fault = f"it has not loaded within {_START_SECONDS:g} s"
        try:
            if self._channel.poll(_START_SECONDS):
                fault = self._channel.recv()
        except (EOFError, OSError):
            fault = "its process ended while it was loading; what it printed stands above"
        if fault is not None:
            self.close()
            raise UsageError(f"--task verifiers:{self._environment} cannot be used: {fault}.{_older()}")

    def _read(self) -> None:
        """Hands replies to those who wait for them, until the process is gone."""
        try:
            while True:
                number, score, fault = self._channel.recv()
                future = self._waiting.pop(number)
                future.set_exception(RuntimeError(fault)) if fault else future.set_result(score)
        except (EOFError, OSError):
            with self._lock:
                self._channel.close()
                while self._waiting:
                    self._waiting.popitem()[1].set_exception(RuntimeError(self._gone()))

    def _gone(self) -> str:
        return f"the process of the environment {self._environment} has ended"


def _older() -> str:
    """Where the installed verifiers has no classic environments: which have."""
    try:
        release = version("verifiers")
    except PackageNotFoundError:
        return ""
    first, second = (int(part) for part in release.split(".")[:2])
    return (
        ""
        if (first, second) < (0, 4)
        else f" verifiers {release} is installed; environments with load_environment need: pip install 'verifiers<0.4'"
    )


_lock = threading.Lock()
_started: dict[str, EnvironmentProcess] = {}


def process_of(environment: str) -> EnvironmentProcess:
    """This process's one :class:`EnvironmentProcess` of an environment, started on first use."""
    with _lock:
        if environment not in _started:
            _started[environment] = EnvironmentProcess(environment)
            atexit.register(_started[environment].close)
        return _started[environment]
