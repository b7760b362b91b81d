# SPDX-License-Identifier: Apache-2.0
"""Text for a terminal: tables, tokens, and the progress of a run with `--log-file`."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ngrpo.machine.upstream.types import TokenizerLike

if TYPE_CHECKING:
    from perturbations import ReplayRecord

Report = Callable[[str], None]
"""Takes a further line for the user."""

_DIGITS = 4
# Text in the log, and the activity that begins there. From OpenRLHF 0.11.2, Ray 2.55 and vLLM 0.29; a release that
# words it otherwise only loses the line.
_MILESTONES = (
    ("Started a local Ray instance", "importing OpenRLHF and vLLM in Ray's workers"),
    ("RolloutRayActor", "starting the vLLM engine"),
    ("PolicyModelActor", "loading the model into the trainer"),
    ("Episode [", "loading the model into vLLM, then sampling the first responses"),
)
# Recurring activities are reported only where they last.
_ACTIVITIES = (
    ("Generate samples:", "sampling responses"),
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


def text_table(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Rows of equal length as lines; the first ``left`` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    forms = [f"{'<' if i < left else '>'}{width}" for i, width in enumerate(widths)]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]


def help_entry(term: str, text: str, *, column: int, width: int = 80) -> list[str]:
    """A term and its description from a column on, on the next line where the term is too long."""
    lines = textwrap.wrap(text, width - column, break_long_words=False, break_on_hyphens=False)
    head = [term] if len(term) + 2 > column else [f"{term:<{column}}{lines.pop(0)}"] if lines else [term]
    return [*head, *(" " * column + line for line in lines)]


def token_texts(tokens: Sequence[int], tokenizer: TokenizerLike) -> list[str]:
    """The text of each token. A token that ends within a character is empty; the next one has the whole character."""
    texts, pending = [], []
    for token in tokens:
        pending.append(token)
        text = tokenizer.decode(pending)
        if text.endswith("\ufffd") and len(pending) < 4:
            texts.append("")
            continue
        texts.append(text)
        pending = []
    return texts


def fed_texts(record: ReplayRecord, row: int, tokenizer: TokenizerLike) -> dict[str, Any]:
    """The input at the record's perturbed position ``row``: ``candidates`` (text and weight), ``sigma`` if noisy."""
    pairs = zip(record.ids[row].tolist(), record.weights[row].tolist())
    entry: dict[str, Any] = {"candidates": [[tokenizer.decode([c]), round(w, _DIGITS)] for c, w in pairs if w > 0.0]}
    if record.sigma is not None:
        entry["sigma"] = round(float(record.sigma[row]), _DIGITS + 2)
    return entry


# ---- the progress of a run ----


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
    """Appends this process's output, and its children's, to a file while the block runs.

    Where the block fails, the log's last lines are shown.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # File descriptors, not sys.stdout: Ray and the engines write from C and from other processes.
    descriptors = [os.dup(1), os.dup(2)]
    with path.open("ab") as log, os.fdopen(os.dup(descriptors[0]), "w") as screen:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        done = threading.Event()
        reporter = Reporter(screen)
        new_lines = follow(path, done.is_set, start=log.tell())
        watcher = threading.Thread(target=lambda: [reporter.line(line) for line in new_lines], daemon=True)
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
            done.set()
            watcher.join()
            if failed:
                last = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
                print("\n".join(last) + f"\nngrpo: the whole log: {path}", file=sys.stderr)


def follow(path: Path, ended: Callable[[], bool], every: float = 0.5, start: int = 0) -> Iterator[str]:
    """The lines of a growing log from byte ``start``, until ``ended`` returns True and all lines have been read.

    A progress bar's updates are lines too. An empty line follows each look at the file, so that the caller has a turn
    while nothing is written.
    """
    with path.open(errors="replace", newline="") as log:
        log.seek(start)
        rest = ""
        while True:
            last = ended()
            *lines, rest = (rest + log.read()).replace("\r", "\n").split("\n")
            yield from [*lines, ""]
            if last:
                return
            time.sleep(every)


class Reporter:
    """Turns log text into lines of progress on a screen."""

    def __init__(self, screen: TextIO) -> None:
        self._screen = screen
        self._began = self._spoke = time.monotonic()
        self._ahead = list(_MILESTONES)
        self._now = "starting Ray"

    def line(self, line: str) -> None:
        """Takes the next line of the log, or an empty one where there is none yet."""
        if time.monotonic() - self._spoke > _HEARTBEAT:
            self._say(f"still {self._now}")
        if (step := read_step(line)) is not None:
            took = "" if step.seconds is None else f", {step.seconds:.0f} s"
            self._say(f"step {step.step}: reward {step.reward:.3f}{took}")
        if (warning := _WARNING.search(line)) is not None:
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
