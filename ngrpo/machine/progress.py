# SPDX-License-Identifier: Apache-2.0
"""A run with `--log-file`: the log holds everything, the screen what the run is doing and the lines for the user.

A line for the user begins with ``ngrpo: `` in the log of whichever process. One that ends with `` …`` is a phase
(:func:`announce`). Phases of upstream's own work are read from its lines (`upstream/log_phases.py`).
"""

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ngrpo.machine.upstream.log_phases import DRAWING, Status, status_of

# Ray adds to a line that several processes write how often it was repeated.
_OURS = re.compile(r"\bngrpo: (.*?)(?:\x1b\[\d+m \[repeated \d+x across cluster\].*)?$")
_PHASE = re.compile(r"(?P<text>.*?)(?:: (?P<done>\d+) of (?P<total>\d+))? …$")
# Ray's name of a process. A progress bar begins with a carriage return, which parts it from the name before it.
_ACTOR = re.compile(r"\(\w+ pid=[^)]*\)")
_EVALUATION = "evaluating"  # how the phase of an evaluation begins
_EVALUATION_END = "Evaluation completed"  # OpenRLHF 0.11.2, trainer/ppo_trainer.py
_HEARTBEAT_SECONDS = 30.0  # between two lines on a screen whose lines cannot be written again, such as CI's log
_TAIL_LINES = 40
_BAR_COLUMNS = 24
_FIRST = "starting"  # the status before any line shows one


def announce(text: str, done: int | None = None, total: int | None = None) -> None:
    """Tells the user that a phase of a run begins, or how far it is.

    The line goes to stderr: the stdout of `ngrpo eval` has its table alone.
    """
    count = "" if done is None else f": {done} of {total}"
    print(f"ngrpo: {text}{count} …", file=sys.stderr, flush=True)


@contextmanager
def into_file(path: Path) -> Iterator[None]:
    """Appends this process's output, and its children's, to a file while the block runs.

    Where the block fails, the log's last lines are shown.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # File descriptors, not sys.stdout: Ray and the engines write from C and from other processes.
    descriptors = [os.dup(1), os.dup(2)]
    screen_descriptor = os.dup(descriptors[0])
    with path.open("ab") as log, os.fdopen(screen_descriptor, "w", errors="replace") as screen:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        run_ended = threading.Event()
        new_lines = follow(path, run_ended.is_set, start=log.tell())
        watcher = threading.Thread(target=show_progress, args=(new_lines, screen), daemon=True)
        watcher.start()
        failed = True
        try:
            yield
            failed = False
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for number, descriptor in enumerate(descriptors, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            run_ended.set()
            watcher.join()
            if failed:
                last_lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
                print("\n".join([*last_lines, f"ngrpo: the whole log: {path}"]), file=sys.stderr)


def follow(path: Path, ended: Callable[[], bool], every: float = 0.5, start: int = 0) -> Iterator[str]:
    """The lines of a growing file from byte ``start``, until ``ended`` returns True.

    A last line without a newline is left out: its writer was stopped half-way. A progress bar's updates are lines too.
    An empty line follows each look at the file, so that the caller has a turn while nothing is written.
    """
    with path.open(encoding="utf-8", errors="replace") as log:
        log.seek(start)
        unfinished_line = ""
        while True:
            is_last_look = ended()  # before the read, so that what is written until then is read
            *lines, unfinished_line = (unfinished_line + log.read()).split("\n")
            yield from [*lines, ""]
            if is_last_look:
                return
            time.sleep(every)


def show_progress(lines: Iterable[str], screen: TextIO) -> None:
    """Shows the lines of a run's log that are for the user, and between them what the run is doing."""
    reader = _StatusReader()
    shown = _Terminal(screen) if _can_rewrite(screen) else _PlainScreen(screen)
    for line in lines:
        ours = _OURS.search(line)
        if ours is not None and not ours[1].endswith(" …"):
            shown.line(ours[1])
            continue
        reader.read(line, ours)
        shown.status(reader.status)
    shown.close()


def _can_rewrite(screen: TextIO) -> bool:
    return screen.isatty() and os.environ.get("TERM") != "dumb"


class _StatusReader:
    """The status of a run, by the lines of its log so far."""

    def __init__(self) -> None:
        self.status = Status(_FIRST)
        self._actor = ""
        self._evaluation: Status | None = None  # as it was when the current batch of its prompts was sent

    def read(self, line: str, ours: re.Match[str] | None) -> None:
        """Takes the next line; ``ours`` is its match of a line for the user, here a phase."""
        if ours is not None:
            self._take_phase(ours[1])
            return
        actor = _ACTOR.search(line)
        if actor is not None:
            self._actor = actor[0]
        else:
            line = f"{self._actor} {line}"
        if _EVALUATION_END in line:
            self._evaluation = None
            return
        status = status_of(line)
        if status is None:
            return
        if status.text == DRAWING and self._evaluation is not None:
            # OpenRLHF's bar is of one batch of prompts, and an evaluation may have several.
            status = self._evaluation._replace(done=(self._evaluation.done or 0) + (status.done or 0))
        self.status = status

    def _take_phase(self, text: str) -> None:
        phase = _PHASE.fullmatch(text)
        if phase is None:
            return
        status = Status(phase["text"])
        if phase["total"] is not None:
            status = Status(phase["text"], int(phase["done"]), int(phase["total"]))
        self._evaluation = status if phase["text"].startswith(_EVALUATION) else None
        self.status = status


class _PlainScreen:
    """A screen whose lines stay: a phase has a line when it first begins, and again after half a minute of silence."""

    def __init__(self, screen: TextIO) -> None:
        self._screen = screen
        self._began = time.monotonic()
        self._last = self._began
        self._told = {_FIRST}

    def line(self, text: str) -> None:
        """Shows a line for the user."""
        self._last = time.monotonic()
        print(f"  {self._last - self._began:5.0f} s  {text}", file=self._screen, flush=True)

    def status(self, status: Status) -> None:
        """Shows what the run is doing, where it is time to."""
        is_silent = time.monotonic() - self._last > _HEARTBEAT_SECONDS
        if status.text in self._told and not is_silent:
            return
        self._told.add(status.text)
        count = f": {status.done} of {status.total} {status.unit}".rstrip() if status.done else ""
        self.line(f"{status.text}{count}")

    def close(self) -> None:
        """Nothing is left to clear."""


class _Terminal:
    """A terminal: below the lines for the user, one that is written again and again has the status and a bar."""

    def __init__(self, screen: TextIO) -> None:
        self._screen = screen
        self._began = time.monotonic()
        self._shown = ""

    def line(self, text: str) -> None:
        """Shows a line for the user."""
        self.close()
        print(f"  {time.monotonic() - self._began:5.0f} s  {text}", file=self._screen, flush=True)

    def status(self, status: Status) -> None:
        """Shows what the run is doing."""
        bar = ""
        if status.done is not None and status.total:
            filled = round(_BAR_COLUMNS * min(status.done / status.total, 1.0))
            bar = f"  [{'=' * filled:<{_BAR_COLUMNS}}] {status.done}/{status.total} {status.unit}"
        text = f"  {time.monotonic() - self._began:5.0f} s  {status.text}{bar}".rstrip()
        text = text[: self._columns() - 1]  # a line that wraps could not be written again
        if text != self._shown:
            self._shown = text
            print(f"\r{text}\x1b[K", end="", file=self._screen, flush=True)

    def close(self) -> None:
        """Clears the status."""
        if self._shown:
            print("\r\x1b[K", end="", file=self._screen, flush=True)
        self._shown = ""

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._screen.fileno()).columns
        except (OSError, ValueError):
            return 80
