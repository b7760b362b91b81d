"""Rows of a dataset, from a local file or the hub."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from perturbations.options import nearest

ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.-]+))?")
# The split to take where none is named; one with a reference is meant, and a test set before the rest.
_SPLITS = ("test", "validation", "train")

Row = dict[str, Any]


@dataclass(frozen=True)
class HubSource:
    """A dataset on the hub.

    Attributes:
        name: ``owner/name``.
        config: its configuration, or None for the default.
        split: its split, or None: the only one, or the first of test, validation, train.
    """

    name: str
    config: str | None = None
    split: str | None = None


def is_file(source: str) -> bool:
    """Whether a source names a local file rather than a hub dataset."""
    return Path(source).suffix.lower() in ENDINGS or Path(source).expanduser().exists()


def parse_hub(source: str) -> HubSource:
    """``owner/name[:config][@split]``.

    Raises:
        ValueError: for anything else.
    """
    match = _HUB.fullmatch(source)
    if match is None:
        raise ValueError(
            f"--data {source!r}: neither a file ({', '.join(ENDINGS)}) nor a hub name like owner/name,"
            " owner/name@split or owner/name:config@split."
        )
    return HubSource(match["name"], match["config"], match["split"])


def read_file(source: str, limit: int | None = None) -> list[Row]:
    """The rows of a local file.

    Args:
        source: a JSONL, JSON (an array of objects, or one per line), CSV or parquet file.
        limit: at most so many rows.

    Raises:
        ValueError: for a file that is missing, empty or not what its ending says.
    """
    path = Path(source).expanduser()
    if not path.is_file():
        near = nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise ValueError(f"--data {source}: there is no such file.{near} Give an existing file.")
    readers = {".parquet": _parquet, ".csv": _csv, ".json": _json, ".jsonl": _json_lines}
    if path.suffix.lower() not in readers:
        raise ValueError(f"--data {source}: ends in {path.suffix!r}; files of {', '.join(ENDINGS)} can be read.")
    try:
        rows = readers[path.suffix.lower()](path, limit)
    except ValueError as error:  # UnicodeDecodeError and JSON's error among them
        raise ValueError(f"--data {source}: {error}") from None
    except OSError as error:
        raise ValueError(f"--data {source}: cannot be read ({error.strerror or error}).") from None
    if not rows:
        raise ValueError(f"--data {source}: the dataset is empty. Give a file with at least one problem.")
    return rows


def read_hub(source: HubSource, limit: int | None = None) -> list[Row]:
    """The rows of a hub dataset, through ``datasets``.

    Raises:
        ValueError: where it cannot be loaded, or has no such split or no rows.
    """
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"--data {source.name}: hub datasets are loaded by the package datasets. Run: pip install datasets"
        ) from None
    try:
        loaded = datasets.load_dataset(source.name, source.config, split=source.split)
    except Exception as error:
        message = " ".join(str(error).split())
        raise ValueError(
            f"--data {source.name}: cannot be loaded from the hub ({type(error).__name__}: {message[:300]})."
            " Without access to the hub give a local file instead: --data FILE.jsonl or FILE.parquet."
            " A gated dataset needs HF_TOKEN."
        ) from None
    if isinstance(loaded, dict):
        found = list(loaded)
        split = found[0] if len(found) == 1 else next((s for s in _SPLITS if s in found), None)
        if split is None:
            raise ValueError(
                f"--data {source.name}: has the splits {', '.join(found)}. Name one: {source.name}@{found[0]}."
            )
        loaded = loaded[split]
    rows = [dict(row) for row in islice(iter(loaded), limit)]
    if not rows:
        raise ValueError(f"--data {source.name}: the dataset is empty. Name another split: {source.name}@SPLIT.")
    return rows


def _parquet(path: Path, limit: int | None) -> list[Row]:
    from pyarrow import ArrowInvalid, parquet

    try:
        table = parquet.read_table(path)
    except ArrowInvalid as error:
        raise ValueError(f"is not a parquet file ({error}).") from None
    return (table if limit is None else table.slice(0, limit)).to_pylist()


def _csv(path: Path, limit: int | None) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return [dict(row) for row in islice(csv.DictReader(file), limit)]


def _json(path: Path, limit: int | None) -> list[Row]:
    text = path.read_text(encoding="utf-8")
    if not text.lstrip().startswith("["):
        return _json_lines(path, limit)
    rows = json.loads(text)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("must be an array of JSON objects.")
    return rows[:limit]


def _json_lines(path: Path, limit: int | None) -> list[Row]:
    rows: list[Row] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if limit is not None and len(rows) >= limit:
                break
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON ({error}). Write one JSON object per line.") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is not a JSON object. Write one JSON object per line.")
            rows.append(row)
    return rows
