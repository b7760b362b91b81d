# SPDX-License-Identifier: Apache-2.0
"""What works in a program's main thread alone, found in a user's reward file before a start; the file is not run.

Python sets signal handlers in the main thread only, and rewards are computed in others. math-verify's time limits are
alarms: its `parse` and `verify` raise there, and a reward function that catches the error gives each response 0.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class _TimeLimit(NamedTuple):
    """An argument of math-verify that limits the time of a call, and its place among the positional ones."""

    argument: str
    place: int


_LIMITS = {"parse": _TimeLimit("parsing_timeout", place=4), "verify": _TimeLimit("timeout_seconds", place=6)}
_SIGNAL = ("signal.signal",)
_METRIC = ("math_verify.metric.math_metric", "math_verify.math_metric")


def alarm_notes(subject: str, path: str) -> Iterator[str]:
    """A warning for each line that raises outside of the main thread.

    Of a reward file, and of the files of its folder that it imports. One that cannot be read has no warning.
    """
    waiting = [Path(path).expanduser()]
    read: set[Path] = set()
    while waiting:
        file = waiting.pop(0)
        read.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):  # which a start refuses
            continue
        names = _imported(tree)
        yield from _notes(f"{subject} {file}", tree, names)
        beside = {file.with_name(f"{name.partition('.')[0]}.py") for name in names.values()}
        waiting += sorted(other for other in beside - read - {*waiting} if other.is_file())


def _notes(subject: str, tree: ast.AST, names: Mapping[str, str]) -> Iterator[str]:
    """A warning for each line of one file."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    for call in sorted(calls, key=lambda node: node.lineno):
        called = _full_name(call.func, names)
        package, _, name = called.rpartition(".")
        fix = ""
        if called in _SIGNAL:
            fix = "Take the signal out, or compute the reward in a process of its own."
        elif called in _METRIC:
            fix = "Call math-verify's parse with parsing_timeout=None and its verify with timeout_seconds=None."
        elif package.partition(".")[0] == "math_verify" and name in _LIMITS:
            limit = _LIMITS[name]
            if _sets_alarm(call, limit):
                fix = f"Write {name}(..., {limit.argument}=None)."
        if fix:
            yield (
                f"{subject}: line {call.lineno}: {called} sets a signal handler, and raises ValueError outside"
                f" of the main thread, where rewards are computed. {fix}"
            )


def _imported(tree: ast.AST) -> dict[str, str]:
    """The full name of each imported name."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names |= {alias.asname: alias.name} if alias.asname else {first: first}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _full_name(node: ast.expr, names: Mapping[str, str]) -> str:
    """The full name of what is called, such as ``math_verify.parse``; empty for anything that was not imported."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = _full_name(node.value, names)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _sets_alarm(call: ast.Call, limit: _TimeLimit) -> bool:
    """Whether a call of math-verify has a time limit: without the argument, or with a positive number."""
    if len(call.args) > limit.place:
        return _is_positive(call.args[limit.place])
    if any(isinstance(value, ast.Starred) for value in call.args):
        return False  # `*arguments` may have it
    values = {keyword.arg: keyword.value for keyword in call.keywords}
    if limit.argument not in values:
        return None not in values  # `**options` may have it
    return _is_positive(values[limit.argument])


def _is_positive(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and bool(value.value)
