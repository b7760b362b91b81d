# SPDX-License-Identifier: Apache-2.0
"""Text for a terminal: tables, tokens, and the progress of a run with `--log-file`."""

from __future__ import annotations

import ast
import inspect
import io
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

from ngrpo.machine.upstream.types import TokenizerLike

if TYPE_CHECKING:
    from perturbations import ReplayRecord

Report = Callable[[str], None]
"""Takes a further line for the user."""

_DIGITS = 4
_OURS = re.compile(r"\bngrpo: (.*)")  # a line for the user, of whichever process of a run
_HEARTBEAT = 30.0  # seconds
_TAIL_LINES = 40


def open_streams() -> None:
    """Gives this process streams that take any text: /dev/null for a closed one, and ``?`` for what stdout cannot show.

    The next file that is opened would otherwise get the number of a closed stream, and with it what a library prints.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def docstring(target: ModuleType | type | Callable[..., Any]) -> str:
    """The docstring of a module, class or function, which commands print as help.

    ``PYTHONOPTIMIZE=2`` drops docstrings, so that they are read from the source.
    """
    if sys.flags.optimize < 2:
        return target.__doc__ or ""
    tree = ast.parse(textwrap.dedent(inspect.getsource(target)))
    node = tree if inspect.ismodule(target) else tree.body[0]
    if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
        return ""
    return ast.get_docstring(node, clean=False) or ""


def text_table(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Rows of equal length as lines; the first ``left`` columns are aligned to the left, the others to the right."""
    formats = []
    for index, column in enumerate(zip(*rows)):
        alignment = "<" if index < left else ">"
        width = max(len(cell) for cell in column)
        formats.append(f"{alignment}{width}")
    return ["  ".join(map(format, row, formats)).rstrip() for row in rows]


def help_entry(term: str, text: str, *, column: int, width: int = 80) -> list[str]:
    """A term and its description from a column on, on the next line where the term is too long."""
    lines = textwrap.wrap(text, width - column, break_long_words=False, break_on_hyphens=False)
    term_fits = len(term) + 2 <= column
    first_line = f"{term:<{column}}{lines.pop(0)}" if term_fits and lines else term
    return [first_line, *(" " * column + line for line in lines)]


def hanging(text: str, indent: str, *, width: int = 100) -> str:
    """A text in lines of at most ``width`` columns, each but the first behind ``indent``; its own lines stay apart."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        lines += textwrap.wrap(paragraph, width - len(indent), break_long_words=False, break_on_hyphens=False)
    return f"\n{indent}".join(lines)


def token_texts(tokens: Sequence[int], tokenizer: TokenizerLike) -> list[str]:
    """The text of each token. A token that ends within a character is empty; the next one has the whole character."""
    texts: list[str] = []
    pending: list[int] = []  # tokens of a character that is not whole yet
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
    candidates = []
    for token, weight in zip(record.ids[row].tolist(), record.weights[row].tolist()):
        if weight > 0.0:
            candidates.append([tokenizer.decode([token]), round(weight, _DIGITS)])
    entry: dict[str, Any] = {"candidates": candidates}
    if record.sigma is not None:
        entry["sigma"] = round(float(record.sigma[row]), _DIGITS + 2)
    return entry


# ---- the progress of a run ----


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
    screen_descriptor = os.dup(descriptors[0])
    with path.open("ab") as log, os.fdopen(screen_descriptor, "w", errors="replace") as screen:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        done = threading.Event()
        new_lines = follow(path, done.is_set, start=log.tell())
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
            done.set()
            watcher.join()
            if failed:
                last_lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
                print("\n".join([*last_lines, f"ngrpo: the whole log: {path}"]), file=sys.stderr)


def follow(path: Path, ended: Callable[[], bool], every: float = 0.5, start: int = 0) -> Iterator[str]:
    """The lines of a growing file from byte ``start``, until ``ended`` returns True and all lines have been read.

    A progress bar's updates are lines too. An empty line follows each look at the file, so that the caller has a turn
    while nothing is written.
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
    """Shows the lines of a run's log that are for the user, and "still at work" after half a minute without one."""
    began = time.monotonic()
    last_shown = began
    for line in lines:
        ours = _OURS.search(line)
        now = time.monotonic()
        if ours or now - last_shown > _HEARTBEAT:
            last_shown = now
            text = ours[1] if ours else "still at work"
            print(f"  {now - began:5.0f} s  {text}", file=screen, flush=True)
