# SPDX-License-Identifier: Apache-2.0
"""What publishing a study takes: reading its comparisons, copying their results, and tables in Markdown."""

import argparse
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ngrpo.machine.storage.result_folder import read_json, write_text
from ngrpo.workbench.compare import results
from ngrpo.workbench.report import write_report

Results = Mapping[str, Any]
_PACKED = "results.json.gz"


def comparisons(parser: argparse.ArgumentParser, study: Path, made_by: str) -> dict[str, Results]:
    """The results of each comparison under the study's folder, by its folder's name; published ones are read too.

    Args:
        parser: ends the program where there are none.
        study: the study's folder.
        made_by: the command that makes it, for the error.
    """
    found = published(study) | {file.parent.name: read_json(file) for file in study.glob("*/results.json")}
    if not found:
        parser.error(f"{study} holds no comparison: run {made_by} first")
    return dict(sorted(found.items()))


def published(out: Path) -> dict[str, Results]:
    """The results of each comparison that was published there, by its folder's name."""
    return {file.parent.name: json.loads(gzip.decompress(file.read_bytes())) for file in out.glob(f"*/{_PACKED}")}


def joined(first: Results, more: Results) -> Results:
    """One comparison of the strategies and seeds of two, which were run one after the other or on two machines.

    Args:
        first: its baseline and threshold are taken; of what both have, its part stays.
        more: of the same task, and counted with the same threshold.

    Returns:
        With ``repeated``: the runs of ``more`` that ``first`` has too, each with its processor.
    """
    theirs = {row["strategy"]: row for row in more["summary"]}
    if first["task"] != more["task"] or first["baseline"] not in theirs:
        raise ValueError(f"{first['task']} against {first['baseline']} has no part in {more['task']} of {list(theirs)}")

    def union(ones: Sequence[Results], others: Sequence[Results], name: str) -> list[Results]:
        return list({row[name]: row for row in (*ones, *others, *ones)}.values())

    strategies, runs = (union(first[key], more[key], "id") for key in ("strategies", "runs"))
    diagnosis, measured = (dict(one["diagnosis"] or {"strategies": []}) for one in (first, more))
    diagnosis["strategies"] = union(diagnosis["strategies"], measured["strategies"], "name")
    diagnosis["warnings"] = list(dict.fromkeys([*diagnosis.get("warnings", ()), *measured.get("warnings", ())]))
    once = {run["id"] for run in first["runs"]}
    again = [{**run, "cpu": more["machine"].get("cpu")} for run in more["runs"] if run["id"] in once]
    processors = dict.fromkeys(one["machine"].get("cpu") for one in (first, more))
    return {
        **first,
        "machine": {**first["machine"], "cpu": "; ".join(filter(None, processors)) or None},
        "strategies": strategies,
        "runs": runs,
        "repeated": [*first.get("repeated", ()), *again],
        "diagnosis": diagnosis if first["diagnosis"] else None,
        "summary": results.summarise(
            runs, [one["id"] for one in strategies], first["baseline"], first["summary"][0]["above"]["threshold"]
        ),
    }


def publish(
    comparisons: Mapping[str, Results], out: Path, tables: str, page: Path | None, *, with_results: bool = True
) -> None:
    """Writes results and report of each comparison under ``out``, and the tables, and prints their path.

    A study of a hundred runs has results of ten megabytes, so they are compressed, to the same bytes each time.

    Args:
        comparisons: by the names of their folders.
        out: the folder.
        tables: the text of the tables.
        page: their file; None for tables.md under ``out``.
        with_results: False where the results are what ``out`` holds already.
    """
    for name, each in comparisons.items() if with_results else ():
        place = out / name
        place.mkdir(parents=True, exist_ok=True)
        write_report(each, place / "report.html")
        (place / _PACKED).write_bytes(gzip.compress(json.dumps(each, indent=1).encode(), mtime=0))
    page = page or out / "tables.md"
    write_text(page, tables)
    print(page)


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]
