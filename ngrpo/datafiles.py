"""Local dataset files: are they there, do they hold anything, have they the columns?"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path

from perturbations.options import nearest

# Endings that OpenRLHF 0.11.2 loads as a file (datasets/utils.py); all else is a folder or a hub name.
_ENDINGS = (".json", ".jsonl", ".csv", ".parquet", ".arrow")


def check_dataset(flag: str, value: str, columns: Mapping[str, str]) -> None:
    """Checks what can be known of a dataset without loading it; hub names are left to OpenRLHF.

    Args:
        flag: the flag that names it, for messages.
        value: its value: files, folders or hub names, separated by commas.
        columns: the columns it must have, by the flag that names each.

    Raises:
        ValueError: for a missing or empty file, one that cannot be read, or a missing column.
    """
    for name in (part.strip().split("@")[0].strip() for part in value.split(",")):
        path = Path(name).expanduser()
        if path.suffix not in _ENDINGS:
            if not path.exists() and name.startswith(("/", ".", "~")):
                raise ValueError(f"{flag} {name}: there is no such folder. Give an existing file or a hub dataset.")
            continue
        if not path.is_file():
            raise ValueError(f"{flag} {name}: there is no such file.{_neighbour(path)} Give an existing file.")
        if name.startswith("~"):
            raise ValueError(f"{flag} {name}: OpenRLHF does not expand '~'. Write {path}.")
        found = _columns(flag, name, path)
        if found is None:
            continue
        for column_flag, column in columns.items():
            if column not in found:
                raise ValueError(
                    f"{flag} {name} has no column {column!r} ({column_flag}).{nearest(column, found)}"
                    f" Its columns: {', '.join(found)}. Name the right one with {column_flag}."
                )


def _neighbour(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    return nearest(path.name, [other.name for other in path.parent.iterdir()])


def _columns(flag: str, name: str, path: Path) -> list[str] | None:
    """The columns of a file; None where they cannot be told cheaply."""
    empty = f"{flag} {name} is empty. Give a file with at least one row."
    try:
        if path.suffix == ".parquet":
            return _parquet_columns(path, empty)
        if path.suffix in (".json", ".jsonl"):
            return _json_columns(flag, name, path, empty)
        if path.suffix == ".csv":
            with path.open(encoding="utf-8", newline="") as file:
                rows = csv.reader(file)
                header = next(rows, None)
                if not header or next(rows, None) is None:
                    raise ValueError(empty)
                return header
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {name}: cannot be read as {path.suffix[1:]} ({error}).") from None
    return None


def _parquet_columns(path: Path, empty: str) -> list[str]:
    from pyarrow import ArrowInvalid, parquet

    try:
        file = parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise OSError(str(error)) from None
    if file.metadata.num_rows == 0:
        raise ValueError(empty)
    return list(file.schema_arrow.names)


def _json_columns(flag: str, name: str, path: Path, empty: str) -> list[str] | None:
    with path.open(encoding="utf-8") as file:
        first = next((line for line in file if line.strip()), "")
    if not first:
        raise ValueError(empty)
    if path.suffix == ".json" and not first.rstrip().endswith("}"):
        return None  # One array over many lines: left to OpenRLHF.
    try:
        row = json.loads(first)
    except ValueError as error:
        raise ValueError(f"{flag} {name}: line 1 is not JSON ({error}). Write one JSON object per line.") from None
    if not isinstance(row, dict):
        raise ValueError(f"{flag} {name}: line 1 is not a JSON object. Write one JSON object per line.")
    return list(row)
