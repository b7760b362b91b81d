# SPDX-License-Identifier: Apache-2.0
"""What publishing a study takes: reading its comparisons, copying their results, and tables in Markdown."""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ngrpo.storage.result_folder import read_json, write_text

Results = Mapping[str, Any]
_PACKED = "results.json.gz"


def comparisons(parser: argparse.ArgumentParser, study: Path, made_by: str) -> dict[str, Results]:
    """The results of each comparison under the study's folder, by its folder's name; published ones are read too.

    Args:
        parser: ends the program where there are none.
        study: the study's folder.
        made_by: the command that makes it, for the error.
    """
    results = {file.parent.name: json.loads(gzip.decompress(file.read_bytes())) for file in study.glob(f"*/{_PACKED}")}
    results |= {file.parent.name: read_json(file) for file in study.glob("*/results.json")}
    if not results:
        parser.error(f"{study} holds no comparison: run {made_by} first")
    return dict(sorted(results.items()))


def publish(study: Path, out: Path, names: Sequence[str], tables: str) -> None:
    """Copies reports and results of these comparisons to ``out``, writes tables.md there and prints its path.

    A study of a hundred runs has results of ten megabytes, so they are compressed, to the same bytes each time. Where
    ``out`` is the study's own folder, as of a published one, its tables alone are written.
    """
    for name in names if study.resolve() != out.resolve() else ():
        place = out / name
        place.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(study / name / "report.html", place / "report.html")
        text = (study / name / "results.json").read_bytes()
        (place / _PACKED).write_bytes(gzip.compress(text, mtime=0))
    write_text(out / "tables.md", tables)
    print(out / "tables.md")


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]
