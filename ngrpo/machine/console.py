# SPDX-License-Identifier: Apache-2.0
"""Text for a terminal: tables, tokens and spans of time."""

from __future__ import annotations

import ast
import inspect
import io
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ngrpo.machine.upstream.types import TokenizerLike

if TYPE_CHECKING:
    from perturbations import ReplayRecord

Report = Callable[[str], None]
"""Takes a further line for the user."""

_DIGITS = 4


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
    before: list[int] = []  # tokens of the last whole character: some decoders strip the blank that a text begins with
    pending: list[int] = []  # tokens of a character that is not whole yet
    for token in tokens:
        pending.append(token)
        length_before = len(tokenizer.decode(before)) if before else 0
        text = tokenizer.decode([*before, *pending])[length_before:]
        if text.endswith("\ufffd") and len(pending) < 4:
            texts.append("")
            continue
        texts.append(text)
        before = pending
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


def span(seconds: float) -> str:
    """A span of time for people: ``48 s``, ``12 min``, ``3 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60:,} h {minutes % 60:02d} min"
