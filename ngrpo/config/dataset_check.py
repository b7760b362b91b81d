# SPDX-License-Identifier: Apache-2.0
"""What can be known of OpenRLHF's datasets before any model loads: files, columns, and what stands in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ngrpo.machine.storage.datafiles import ENDINGS, read_rows
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError
from perturbations.options import nearest

_CHECKED = 100_000  # rows that are looked at before a run: a second or two
_IN_FOLDERS = (*ENDINGS, ".arrow", ".txt", ".gz", ".zst")
_NOTHING, _TEXT, _MESSAGES = "nothing", "a text", "chat messages"


@dataclass(frozen=True)
class Columns:
    """The columns that a run reads.

    Attributes:
        input: of ``--data.input_key``.
        label: of ``--data.label_key``; None where none is asked for.
        messages: whether ``--data.apply_chat_template`` is given, without which OpenRLHF takes texts alone.
    """

    input: str
    label: str | None = None
    messages: bool = False

    @classmethod
    def of(cls, flags: Flags) -> Columns:
        """The columns that OpenRLHF's flags name."""
        label, messages = flags.value("--data.label_key") or None, flags.has("--data.apply_chat_template")
        return cls(flags.value("--data.input_key") or "input", label, messages)

    @property
    def flags(self) -> dict[str, str]:
        """Each column's flag, and the column."""
        label = {} if self.label is None else {"--data.label_key": self.label}
        return {"--data.input_key": self.input, **label}


def check_files(flags: Flags) -> None:
    """Checks the datasets that OpenRLHF would open only after every model has loaded.

    Raises:
        UsageError: for a missing or empty dataset, a missing column, or one that cannot be used.
    """
    train = flags.value("--data.prompt_dataset")
    if not train:
        raise UsageError("no prompts: give --task arithmetic, or --data.prompt_dataset with a file or hub dataset.")
    check_dataset("--data.prompt_dataset", train, Columns.of(flags))
    evaluation = flags.value("--eval.dataset")
    if evaluation:
        check_dataset("--eval.dataset", evaluation, Columns.of(flags))


def check_dataset(flag: str, value: str, columns: Columns) -> None:
    """Checks what can be known of OpenRLHF's dataset without loading it; hub names are left to OpenRLHF.

    Args:
        flag: the flag that names it, for messages.
        value: its value: files, folders or hub names, separated by commas.
        columns: the columns that it must have.

    Raises:
        UsageError: for a missing or empty file, one that cannot be read, a column that is missing, in the file or in
            one of its first 100,000 rows, an input that is neither a text nor, with a chat template, chat messages, or
            a label that is a text in one row and something else in another.
    """
    for name in local_files(flag, value):
        path = Path(name).expanduser()
        by_column = _read(flag, name, path.stat().st_mtime_ns if path.is_file() else 0)[0]
        if name.startswith("~"):
            raise UsageError(f"{flag} {name}: OpenRLHF does not expand '~'. Write {path}.")
        for column_flag, column in columns.flags.items():
            if column not in by_column:
                raise UsageError(
                    f"{flag} {name} has no column {column!r} ({column_flag}).{nearest(column, by_column)}"
                    f" Its columns: {', '.join(by_column)}. Name the right one with {column_flag}."
                )
            if _NOTHING in by_column[column]:
                raise UsageError(
                    f"{flag} {name}: row {by_column[column][_NOTHING]} has no {column!r} ({column_flag}). Give it one,"
                    " or leave it out."
                )
        _check_input(f"{flag} {name}", by_column[columns.input], columns)
        if columns.label is not None:
            _check_label(f"{flag} {name}", by_column[columns.label], columns.label)


def label_note(flag: str, flags: Flags) -> str | None:
    """A sentence for labels that are neither texts nor numbers: only a reward that expects them can read them."""
    columns = Columns.of(flags)
    for name in local_files(flag, flags.value(flag) or "") if columns.label is not None else ():
        path = Path(name).expanduser()
        by_column = _read(flag, name, path.stat().st_mtime_ns if path.is_file() else 0)[0]
        for kind in ("a list", _MESSAGES, "an object"):
            rows = by_column.get(columns.label or "", {})
            if kind in rows:
                return (
                    f"{flag} {name}: the label {columns.label!r} is {kind} in row {rows[kind]}; the"
                    " reward is given it as it is."
                )
    return None


def rows_of(flag: str, value: str) -> list[int] | None:
    """Rows of each of the named datasets; None where one is no file, is missing, or has more than are looked at."""
    names = value.split(",")
    try:
        files = list(local_files(flag, value))
        rows = [_read(flag, name, Path(name).expanduser().stat().st_mtime_ns)[1] for name in files]
    except (OSError, UsageError):
        return None
    return rows if len(files) == len(names) and max(rows, default=_CHECKED) < _CHECKED else None


def is_checked(flag: str, value: str) -> bool:
    """Whether :func:`check_dataset` looks into each of the named datasets; hub names and folders are OpenRLHF's."""
    return len(list(local_files(flag, value))) == len(value.split(","))


def local_files(flag: str, value: str) -> Iterable[str]:
    """The files, among the names of a flag, of which the rows are checked.

    Raises:
        UsageError: for a name that OpenRLHF could not load: a folder without data, or a file of another kind.
    """
    for name in (part.strip().split("@")[0].strip() for part in value.split(",")):
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


def _check_input(label: str, kinds: dict[str, int], columns: Columns) -> None:
    for kind, row in kinds.items():
        if kind == _TEXT or (kind == _MESSAGES and columns.messages):
            continue
        if kind == _MESSAGES:
            fix = "Add --data.apply_chat_template, or write the prompts as texts."
        else:
            fix = 'A prompt is a text, or a list of chat messages: {"role": "user", "content": "…"}.'
        raise UsageError(f"{label}: the input {columns.input!r} is {kind} in row {row}. {fix}")


def _check_label(label: str, kinds: dict[str, int], column: str) -> None:
    # `datasets` 5.2, with which OpenRLHF reads files, makes the number 7 of the text 007 in such a column.
    if len(kinds) > 1 and _TEXT in kinds:
        other, row = next((kind, row) for kind, row in kinds.items() if kind != _TEXT)
        raise UsageError(
            f"{label}: the label {column!r} is a text in row {kinds[_TEXT]} and {other} in row {row}, and texts would"
            " be read as numbers where they can be. Write all of them as texts."
        )


@lru_cache
def _read(flag: str, name: str, mtime: int) -> tuple[dict[str, dict[str, int]], int]:
    """A file's columns by its first row, and what stands in each: the kind, and the number of the first such row.

    How many rows were looked at comes with them.

    Kept, because a comparison checks the same file for each of its strategies.

    Args:
        flag: the flag that names the file, for messages.
        name: the file.
        mtime: when it was, so that another content is read anew.
    """
    rows = read_rows(flag, name, _CHECKED)
    by_column: dict[str, dict[str, int]] = {column: {} for column in rows[0]}
    for number, row in enumerate(rows, start=1):
        for column, kinds in by_column.items():
            kinds.setdefault(_kind(row.get(column)), number)
    return by_column, len(rows)


def _kind(value: object) -> str:
    """What a value is, in words."""
    if isinstance(value, list):
        messages = bool(value) and all(isinstance(each, dict) and {"role", "content"} <= set(each) for each in value)
        return _MESSAGES if messages else "a list"
    if isinstance(value, bool):
        return "true or false"
    kinds = ((type(None), _NOTHING), (str, _TEXT), (dict, "an object"), ((int, float), "a number"))
    return next((word for kind, word in kinds if isinstance(value, kind)), f"a {type(value).__name__}")
