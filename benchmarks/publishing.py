# SPDX-License-Identifier: Apache-2.0
"""What publishing a study takes: reading its comparisons, copying their results, and tables in Markdown."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ngrpo.storage.result_folder import read_json, write_text

Results = Mapping[str, Any]


def comparisons(parser: argparse.ArgumentParser, study: Path, made_by: str) -> dict[str, Results]:
    """The results of each folder that `ngrpo compare` wrote under the study's, by the folder's name.

    Args:
        parser: ends the program where there are none.
        study: the study's folder.
        made_by: the command that makes it, for the error.
    """
    results = {file.parent.name: read_json(file) for file in sorted(study.glob("*/results.json"))}
    if not results:
        parser.error(f"{study} holds no comparison: run {made_by} first")
    return results


def publish(study: Path, out: Path, names: Sequence[str], tables: str) -> None:
    """Copies results and reports of these comparisons to ``out``, writes tables.md there and prints its path."""
    for name in names:
        place = out / name
        place.mkdir(parents=True, exist_ok=True)
        for file in ("results.json", "report.html"):
            shutil.copyfile(study / name / file, place / file)
    write_text(out / "tables.md", tables)
    print(out / "tables.md")


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]
