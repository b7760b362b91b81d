# SPDX-License-Identifier: Apache-2.0
"""`--log-file`: everything the engines print goes into a file, and a few lines of progress to the screen."""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

# First sight of a text in the log, and what is going on from there. From OpenRLHF 0.11.2, Ray 2.55 and vLLM 0.29; where
# a later release words it otherwise, the line is merely missing.
_MILESTONES = (
    ("Started a local Ray instance", "importing OpenRLHF and vLLM in Ray's workers"),
    ("RolloutRayActor", "starting the vLLM engine"),
    ("PolicyModelActor", "loading the model into the trainer"),
    ("Episode [", "loading the model into vLLM, then sampling the first answers"),
)
# What recurs in every step: told only where it lasts.
_ACTIVITIES = (
    ("Generate samples:", "sampling answers"),
    ("forward: ", "computing log-probabilities"),
    ("Train epoch [", "updating the weights"),
    ("Evaluation start time", "evaluating"),
)
_STEP = re.compile(r"Global step (\d+): .*?'rollout/reward_mean': ([-+.\deE]+)")
_WARNING = re.compile(r"ngrpo (warning: .*)")
_SECONDS = re.compile(r"'timing/step_total': ([-+.\deE]+)")
_TOTAL = re.compile(r"Episode \[\d+/(\d+)\]:[^\r\n]*?\| *\d+/(\d+) ")
_HEARTBEAT = 30.0
_TAIL_LINES = 40


@dataclass(frozen=True)
class StepLine:
    """A training step in OpenRLHF's log: its number, mean reward, and seconds (None where not logged)."""

    step: int
    reward: float
    seconds: float | None


def read_step(line: str) -> StepLine | None:
    """The training step that a line of the log reports, if it does."""
    match = _STEP.search(line)
    if match is None:
        return None
    seconds = _SECONDS.search(line)
    return StepLine(int(match[1]), float(match[2]), float(seconds[1]) if seconds else None)


def read_total(line: str) -> int | None:
    """The number of prompts of all episodes, from OpenRLHF's progress bar."""
    match = _TOTAL.search(line)
    return int(match[1]) * int(match[2]) if match else None


def span(seconds: float) -> str:
    """A span of time for people: ``48 s``, ``12 min``, ``3 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60:,} h {minutes % 60:02d} min"


@contextmanager
def into_file(path: Path) -> Iterator[None]:
    """Sends this process's output, and that of its children, into a file while the block runs.

    Args:
        path: the file; made anew.

    Where the file's disk is full, the screen says so and the block goes on: a log is not worth a run.

    Raises:
        Whatever the block raises, after the log's last lines have been shown.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept_streams = sys.stdout, sys.stderr
    for stream in kept_streams:
        stream.flush()
    # File descriptors, not sys.stdout: Ray and the engines write from C and from other processes.
    descriptors = [os.dup(1), os.dup(2)]
    with path.open("wb") as log, os.fdopen(os.dup(descriptors[0]), "w") as screen:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        done = threading.Event()
        reporter = Reporter(screen, lambda: _is_full(path))
        watcher = threading.Thread(target=lambda: [reporter.line(x) for x in follow(path, done.is_set)], daemon=True)
        watcher.start()
        failed = True
        sys.stdout, sys.stderr = map(_UntilFull, kept_streams)
        try:
            yield
            failed = False
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            sys.stdout, sys.stderr = kept_streams
            for number, descriptor in enumerate(descriptors, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            done.set()
            watcher.join()
            if failed:
                last = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
                print("\n".join(last) + f"\nngrpo: the whole log: {path}", file=sys.stderr)


class _UntilFull:
    """A stream whose text is lost once its disk is full, where :func:`print` would end the run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _lost_where_full():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _lost_where_full():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _lost_where_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def _is_full(path: Path) -> str:
    """Why nothing more can be written to a file; "" where there is room."""
    with suppress(OSError):
        if os.statvfs(path).f_bavail == 0:
            return f"no space is left for {path}: the log ends here, the run goes on"
    return ""


def follow(path: Path, ended: Callable[[], bool], every: float = 0.5) -> Iterator[str]:
    """The lines of a log as it grows, until ``ended`` says so and all has been read.

    A progress bar's updates are lines too. After each look at the file comes an empty line, so that the caller has a
    turn while nothing is written.
    """
    with path.open(errors="replace", newline="") as log:
        rest = ""
        while True:
            last = ended()
            *lines, rest = (rest + log.read()).replace("\r", "\n").split("\n")
            yield from [*lines, ""]
            if last:
                return
            time.sleep(every)


class Reporter:
    """Turns log text into lines of progress."""

    def __init__(self, screen: TextIO, why_ended: Callable[[], str] = lambda: "") -> None:
        """
        Args:
            screen: where the lines go.
            why_ended: why nothing more can be logged, to be said once; "" while it can.
        """
        self._screen, self._why_ended = screen, why_ended
        self._log_ended = False
        self._began = self._spoke = time.monotonic()
        self._ahead = list(_MILESTONES)
        self._now = "starting Ray"

    def line(self, line: str) -> None:
        """Takes the next line of the log, or an empty one where there is none yet."""
        if time.monotonic() - self._spoke > _HEARTBEAT:
            self._say(f"still {self._now}")
        if not line and not self._log_ended and (why := self._why_ended()):
            self._log_ended = True
            self._say(f"warning: {why}")
        step = read_step(line)
        if step is not None:
            took = "" if step.seconds is None else f", {step.seconds:.0f} s"
            self._say(f"step {step.step}: reward {step.reward:.3f}{took}")
        warning = _WARNING.search(line)
        if warning is not None:
            self._say(f"{warning[1]} (more in the log)")
        for milestone in self._ahead:
            if milestone[0] in line:
                self._ahead.remove(milestone)
                self._now = milestone[1]
                self._say(self._now)
                break
        self._now = next((activity for text, activity in _ACTIVITIES if text in line), self._now)

    def _say(self, text: str) -> None:
        self._spoke = time.monotonic()
        print(f"  {self._spoke - self._began:5.0f} s  {text}", file=self._screen, flush=True)
