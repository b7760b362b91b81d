# SPDX-License-Identifier: Apache-2.0
"""Checks of OpenRLHF's datasets before any model loads: their files, columns and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ngrpo.machine.models import conversation
from ngrpo.machine.storage.datafiles import ENDINGS, read_rows
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError
from perturbations.options import nearest

_CHECKED = 100_000  # rows that are looked at before a run: a second or two
_IN_FOLDERS = (*ENDINGS, ".arrow", ".txt", ".gz", ".zst")
_NOTHING, _EMPTY, _TEXT, _MESSAGES = "nothing", "empty", "a text", "chat messages"


def check_files(flags: Flags) -> None:
    """Checks the datasets that OpenRLHF would open only after every model has loaded; hub names are left to it.

    Raises:
        UsageError: for a missing or empty file, one that cannot be read, a column that is missing, in the file or in
            one of its first 100,000 rows, an input that is neither a text nor, with a chat template, chat messages, a
            tool, or a label that is a text in one row and something else in another.
    """
    if not flags.value("--data.prompt_dataset"):
        raise UsageError("no prompts: give --task arithmetic, or --data.prompt_dataset with a file or hub dataset.")
    for flag in ("--data.prompt_dataset", "--eval.dataset"):
        for name in local_files(flag, flags.value(flag)):
            _check_file(flag, name, flags)


def _check_file(flag: str, name: str, flags: Flags) -> None:
    by_column = _read(flag, name).kinds
    subject, prompt = f"{flag} {name}", flags.value("--data.input_key") or "input"
    label = flags.value("--data.label_key")
    if name.startswith("~"):
        raise UsageError(f"{subject}: OpenRLHF does not expand '~'. Write {Path(name).expanduser()}.")
    for column_flag, column in (("--data.input_key", prompt), ("--data.label_key", label)):
        if column and column not in by_column:
            raise UsageError(
                f"{subject} has no column {column!r} ({column_flag}).{nearest(column, by_column)} Its columns:"
                f" {', '.join(by_column)}. Name the right one with {column_flag}."
            )
        if column and _NOTHING in by_column[column]:
            row = by_column[column][_NOTHING]
            raise UsageError(f"{subject}: row {row} has no {column!r} ({column_flag}). Give it one, or leave it out.")
    fixes = {_MESSAGES: "Add --data.apply_chat_template, or write the prompts as texts.", _TEXT: ""}
    if flags.has("--data.apply_chat_template"):
        fixes[_MESSAGES] = ""
    for kind, row in by_column[prompt].items():
        if fix := fixes.get(kind, conversation.PROMPT):
            raise UsageError(f"{subject}: the input {prompt!r} is {kind} in row {row}. {fix}")
    for row in _read(flag, name).chats.get(prompt, ()):
        if conversation.TOOLS in row.arguments and not flags.has("--data.apply_chat_template"):
            raise UsageError(
                f"{subject}: row {row.number} has tools, which no text shows. Add --data.apply_chat_template."
            )
    kinds = {_TEXT if kind == _EMPTY else kind: row for kind, row in reversed(by_column.get(label or "", {}).items())}
    # `datasets` 5.2, with which OpenRLHF reads files, makes the number 7 of the text 007 in such a column.
    if len(kinds) > 1 and _TEXT in kinds:
        other, row = next((kind, row) for kind, row in kinds.items() if kind != _TEXT)
        raise UsageError(
            f"{subject}: the label {label!r} is a text in row {kinds[_TEXT]} and {other} in row {row}, and texts would"
            " be read as numbers where they can be. Write all of them as texts."
        )


def label_note(flag: str, flags: Flags) -> str | None:
    """A warning about labels that are neither texts nor numbers, which only some rewards can read."""
    label = flags.value("--data.label_key")
    for name in local_files(flag, flags.value(flag)) if label else ():
        rows = _read(flag, name).kinds.get(label or "", {})
        for kind in ("a list", _MESSAGES, "an object"):
            if kind in rows:
                subject = f"{flag} {name}: the label {label!r} is {kind} in row {rows[kind]}"
                return f"{subject}; the reward is given it as it is."
    return None


def rows_of(flag: str, value: str) -> list[int] | None:
    """Rows of each of the named datasets; None where one is no file, is missing, or has more than are looked at."""
    try:
        rows = [_read(flag, name).rows for name in local_files(flag, value)]
    except UsageError:
        return None
    return rows if len(rows) == len(value.split(",")) and max(rows, default=_CHECKED) < _CHECKED else None


def is_checked(flag: str, value: str) -> bool:
    """Whether :func:`check_files` looks into each of the named datasets; hub names and folders are OpenRLHF's."""
    return len(list(local_files(flag, value))) == len(value.split(","))


def local_files(flag: str, value: str | None) -> Iterator[str]:
    """The files with checked rows among the names of a flag.

    Raises:
        UsageError: for a name that OpenRLHF could not load: a folder without data, or a file of another kind.
    """
    for name in (part.strip().split("@")[0].strip() for part in value.split(",")) if value else ():
        path = Path(name).expanduser()
        # OpenRLHF 0.11.2 (datasets/utils.py) loads files of our endings and .arrow; all else is a folder or a hub name.
        if path.is_dir() and not any(file.suffix in _IN_FOLDERS for file in path.rglob("*")):
            raise UsageError(
                f"{flag} {name}: the folder holds no data files ({', '.join(_IN_FOLDERS)}). Give a file, or a folder"
                " that holds some."
            )
        if path.suffix in ENDINGS or (path.suffix == ".arrow" and not path.exists()):
            yield name  # a missing file is told where it is read
        elif path.exists() and not path.is_dir() and path.suffix != ".arrow":
            raise UsageError(
                f"{flag} {name}: is no dataset; OpenRLHF reads files that end in {', '.join((*ENDINGS, '.arrow'))}."
                " Give one of these, a folder or a hub dataset."
            )
        elif not path.exists() and name.startswith(("/", ".", "~")):
            raise UsageError(f"{flag} {name}: there is no such folder. Give an existing file or a hub dataset.")


def check_rendered(flags: Flags, tokenizer: Callable[[], Any], arguments: Mapping[str, Any]) -> None:
    """Renders the first conversation of each form: roles, kinds of content, calls, tools.

    Args:
        flags: OpenRLHF's.
        tokenizer: loads it, where there is a conversation.
        arguments: of the chat template.

    Raises:
        UsageError: for one that the chat template cannot render, by row.
    """
    prompt = flags.value("--data.input_key") or "input"
    for flag in ("--data.prompt_dataset", "--eval.dataset"):
        for name in local_files(flag, flags.value(flag)):
            for row in _read(flag, name).chats.get(prompt, ()):
                try:
                    conversation.rendered(tokenizer(), row.messages, {**arguments, **row.arguments})
                except UsageError as error:
                    raise UsageError(f"{flag} {name}: row {row.number}: {error}") from None


class _Chat(NamedTuple):
    number: int
    messages: list[dict[str, Any]]
    arguments: dict[str, Any]


class _File(NamedTuple):
    """Rows that were looked at; by column, the first row of each kind of value, and of each form of conversation."""

    rows: int
    kinds: dict[str, dict[str, int]]
    chats: dict[str, list[_Chat]]


def _read(flag: str, name: str) -> _File:
    path = Path(name).expanduser()
    return _read_once(flag, name, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache  # a comparison checks the same file for each of its strategies
def _read_once(flag: str, name: str, mtime: int) -> _File:
    rows = read_rows(flag, name, _CHECKED)
    kinds: dict[str, dict[str, int]] = {column: {} for column in rows[0]}
    chats: dict[str, dict[Any, _Chat]] = {column: {} for column in rows[0]}
    for number, row in enumerate(rows, start=1):
        try:
            tools = conversation.tools_of(row)
        except UsageError as error:
            raise UsageError(f"{flag} {name}: row {number}: {error}") from None
        for column in kinds:
            value = row.get(column)
            kind = _kind(value)
            kinds[column].setdefault(kind, number)
            if kind == _MESSAGES or (kind == _TEXT and tools):
                chat = [{"role": "user", "content": value}] if kind == _TEXT else value
                form = (bool(tools), *((m["role"], type(m.get("content")), bool(m.get("tool_calls"))) for m in chat))
                chats[column].setdefault(form, _Chat(number, chat, tools))
    return _File(len(rows), kinds, {column: [*forms.values()] for column, forms in chats.items()})


def _kind(value: object) -> str:
    """A word for the kind of a value."""
    if isinstance(value, list):
        fault = conversation.fault(value)
        return _MESSAGES if fault in ("", conversation.PICTURES) else fault
    if isinstance(value, str):
        return _TEXT if value.strip() else _EMPTY
    if isinstance(value, bool):
        return "true or false"
    kinds = ((type(None), _NOTHING), (dict, "an object"), ((int, float), "a number"))
    return next((word for kind, word in kinds if isinstance(value, kind)), f"a {type(value).__name__}")
