# SPDX-License-Identifier: Apache-2.0
"""What a file of a dataset holds: the kinds of value in its columns, and prompts to render."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ngrpo.machine.models import conversation
from ngrpo.machine.models.conversation import TOOLS, ValueKind
from ngrpo.machine.storage.datafiles import Row, is_nothing, read_rows
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

CHECKED_ROWS = 100_000
"""Rows that are read before a run, which takes a second or two."""
_KEPT_EXAMPLES = 64


@dataclass(frozen=True)
class ColumnNames:
    """The columns that OpenRLHF reads."""

    prompt: str
    label: str
    images: str

    @classmethod
    def of(cls, flags: Flags) -> "ColumnNames":
        """The names that OpenRLHF's flags give, or OpenRLHF's defaults."""
        return cls(
            prompt=flags.value("--data.input_key") or "input",
            label=flags.value("--data.label_key") or "",
            images=flags.value("--data.image_key") or "images",
        )


@dataclass
class Column:
    """One column of a file.

    Attributes:
        first_rows: the kinds of value in the column, each with the number of the first row that has it.
    """

    first_rows: dict[ValueKind, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Example:
    """The prompt of one row.

    Attributes:
        row: the row's number, from 1.
        prompt: a text or chat messages.
        tools: the template's argument with the row's tools; empty without.
    """

    row: int
    prompt: Any
    tools: dict[str, Any]


@dataclass(frozen=True)
class DatasetFile:
    """What the first :data:`CHECKED_ROWS` rows of a file hold.

    Attributes:
        columns: by their names.
        row_count: the number of rows that were read.
        examples: one row of each form of conversation (:func:`_form`).
        longest: the row whose prompt has the most characters.
    """

    columns: dict[str, Column]
    row_count: int
    examples: list[Example]
    longest: Example


def read(flag: str, name: str, flags: Flags) -> DatasetFile:
    """Reads a file that ``flag`` names; raises ``UsageError`` for one that cannot be read."""
    path = Path(name).expanduser()
    modified = path.stat().st_mtime_ns if path.is_file() else 0
    return _read(flag, name, ColumnNames.of(flags), modified)


@lru_cache  # A comparison checks the same file for each of its arms. `modified` is read by the cache alone.
def _read(flag: str, name: str, names: ColumnNames, modified: int) -> DatasetFile:
    rows = read_rows(flag, name, CHECKED_ROWS)
    prompts = []
    for number, row in enumerate(rows, start=1):
        tools = _tools_of(row, names, subject=f"{flag} {name}: row {number}")
        prompts.append(Example(row=number, prompt=row.get(names.prompt), tools=tools))
    return DatasetFile(
        columns=_columns(rows, names),
        row_count=len(rows),
        examples=_one_of_each_form(prompts),
        longest=max(prompts, key=lambda example: len(str(example.prompt))),
    )


def _columns(rows: Sequence[Row], names: ColumnNames) -> dict[str, Column]:
    """The columns that any row has, by name, with the first row of each kind of value."""
    columns = {column_name: Column() for row in rows for column_name in row}
    for number, row in enumerate(rows, start=1):
        for column_name, column in columns.items():
            column.first_rows.setdefault(kind_in(row, column_name, names), number)
    return columns


def _one_of_each_form(prompts: Sequence[Example]) -> list[Example]:
    """The first prompt of each form that a template can render; at most :data:`_KEPT_EXAMPLES`."""
    by_form: dict[tuple[object, ...], Example] = {}
    for example in prompts:
        if len(by_form) == _KEPT_EXAMPLES:
            break
        if _prompt_kind(example.prompt) in (ValueKind.TEXT, ValueKind.MESSAGES):
            by_form.setdefault(_form(example), example)
    return list(by_form.values())


def _tools_of(row: Mapping[str, Any], names: ColumnNames, *, subject: str) -> dict[str, Any]:
    """The row's tools, unless the column ``tools`` is that of prompts or labels."""
    if TOOLS in (names.prompt, names.label):
        return {}
    try:
        return conversation.tools_of(row)
    except UsageError as error:
        raise UsageError(f"{subject}: {error}") from None


def _form(example: Example) -> tuple[object, ...]:
    """Equal for prompts that a template renders alike: roles, types of content, calls, and whether there are tools."""
    form: list[object] = [bool(example.tools)]
    if isinstance(example.prompt, list):
        for message in example.prompt:
            form.append((message["role"], type(message.get("content")), bool(message.get("tool_calls"))))
    return tuple(form)


def kind_in(row: Mapping[str, Any], column_name: str, names: ColumnNames) -> ValueKind:
    """The kind of a row's value in a column."""
    value = row.get(column_name)
    if column_name == names.prompt:
        return _prompt_kind(value)
    if column_name != names.label:
        # Rows without pictures or tools have an empty value where other rows have some.
        is_optional = column_name in (TOOLS, names.images)
        if value == [] or (is_optional and not value):
            return ValueKind.MISSING
    kind = kind_of(value)
    return ValueKind.MESSAGES if kind is ValueKind.ANSWERED_MESSAGES else kind


def _prompt_kind(value: object) -> ValueKind:
    """The kind of a prompt: of texts there are more kinds than in other columns."""
    if not isinstance(value, str):
        return kind_of(value)
    fault = conversation.fault(value)
    if fault is None and "<image>" in value:
        return ValueKind.TEXT_WITH_IMAGE
    return fault or ValueKind.TEXT


def kind_of(value: object) -> ValueKind:
    """The kind of any value."""
    if isinstance(value, list):
        return conversation.fault(value) or ValueKind.MESSAGES
    if isinstance(value, str):
        return ValueKind.TEXT if value.strip() else ValueKind.EMPTY
    if isinstance(value, bool):
        return ValueKind.BOOLEAN
    if is_nothing(value):
        return ValueKind.MISSING
    if isinstance(value, dict):
        return ValueKind.OBJECT
    if isinstance(value, (int, float)):
        return ValueKind.NUMBER
    return ValueKind.OTHER
