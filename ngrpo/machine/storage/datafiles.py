# SPDX-License-Identifier: Apache-2.0
"""Rows of local dataset files: JSONL, JSON, CSV, parquet.

Read here and not by the package `datasets`, which guesses types: it makes 7.0 of the reference 007 in a CSV file.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from perturbations.errors import UsageError
from perturbations.options import nearest

Row = dict[str, Any]


def contents(argv: Iterable[str]) -> dict[str, str]:
    """Digests of the local files that are named on a command line.

    Args:
        argv: of the command line; one may name several files (``a.jsonl,b.jsonl``), or have a prefix (``math:FILE``).

    Returns:
        Path, as it was given, to the SHA-256 of the file's content.
    """
    parts = {part for word in argv for each in word.split(",") for part in (each, each.partition(":")[2])}
    digests = {}
    for part in sorted(parts - {""}):
        with suppress(OSError, ValueError):  # a word may be too long for a path, or hold a zero byte
            path = Path(part).expanduser()
            if path.is_file():
                state = path.stat()
                digests[part] = _digest(path.absolute(), state.st_mtime_ns, state.st_size)
    return digests


@lru_cache
def _digest(path: Path, changed: int, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_rows(flag: str, source: str, limit: int | None = None) -> list[Row]:
    """The rows of a local file.

    Args:
        flag: the flag that names it, for messages.
        source: a JSONL, JSON (an array of objects, or one per line), CSV or parquet file.
        limit: at most so many rows.

    Raises:
        UsageError: for a file that is missing, empty or not what its ending says.
    """
    path = Path(source).expanduser()
    if not path.is_file():
        near = nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise UsageError(f"{flag} {source}: there is no such file.{near} Give an existing file.")
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise UsageError(f"{flag} {source}: ends in {path.suffix!r}; files of {', '.join(ENDINGS)} can be read.")
    try:
        rows = list(islice(read(path), limit))
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{flag} {source} cannot be read as {path.suffix[1:]}: {error}") from None
    if not rows:
        raise UsageError(f"{flag} {source} is empty. Give a file with at least one row.")
    return rows


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow import parquet

    for batch in parquet.ParquetFile(path).iter_batches(1024):
        yield from batch.to_pylist()


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _json(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        if not file.read(1024).lstrip().startswith("["):
            yield from _json_lines(path)
            return
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("it must be an array of JSON objects.")
    yield from rows


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON ({error}). Write one JSON object per line.") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is not a JSON object. Write one JSON object per line.")
            yield row


_READERS = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}
ENDINGS = tuple(_READERS)
