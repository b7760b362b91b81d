# SPDX-License-Identifier: Apache-2.0
"""What publishing a study takes: reading its comparisons, joining them, and copying their results."""

import argparse
import gzip
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ngrpo.machine.storage.result_folder import read_json, write_text
from ngrpo.workbench.compare import results, summaries
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
    finished = {file.parent.name: read_json(file) for file in study.glob("*/results.json")}
    by_name = published(study) | finished
    if not by_name:
        parser.error(f"{study} holds no comparison: run {made_by} first")
    return dict(sorted(by_name.items()))


def published(out: Path) -> dict[str, Results]:
    """The results of each comparison that was published under ``out``, by its folder's name."""
    return {file.parent.name: json.loads(gzip.decompress(file.read_bytes())) for file in out.glob(f"*/{_PACKED}")}


def each_joined(
    parser: argparse.ArgumentParser, first: Mapping[str, Results], more: Mapping[str, Results]
) -> dict[str, Results]:
    """The comparisons of ``more`` by the names of their folders, each joined to that of ``first`` with its name.

    ``parser`` ends the program where two of a name cannot be joined.
    """
    together = {}
    for name, comparison in more.items():
        try:
            together[name] = joined(first[name], comparison) if name in first else comparison
        except ValueError as error:
            parser.error(f"{name}: {error}")
    return together


def joined(first: Results, more: Results) -> Results:
    """One comparison of the strategies and seeds of two, which were run one after the other or on two machines.

    Args:
        first: its baseline and threshold are taken; of what ``first`` and ``more`` have, its row stays, but that of a
            run which ``more`` alone has finished.
        more: trained and evaluated in the same way, and counted with the same threshold where there is one. Releases,
            code and processors may differ; the runs of one seed are compared with each other.

    Returns:
        With the ``warnings`` of all runs together; with ``repeated``: the runs of ``more`` that ``first`` has too, each
        with its processor; and with ``further_commands``: those that started the parts after the first one.

    Raises:
        ValueError: where the two were not trained or evaluated in the same way, or an arm has other options.
    """
    baseline = first["baseline"]
    names = [row["strategy"] for row in more["summary"]]
    if baseline not in names:
        raise ValueError(f"a part of {names} has no runs of {baseline}, against which the others are compared")
    conditions_more = _conditions(more)
    for name, value in _conditions(first).items():
        if value != conditions_more[name]:
            raise ValueError(f"parts with different {name} are not joined: {value} and {conditions_more[name]}")
    _check_evaluations([*_evaluations(first), *_evaluations(more)])
    _check_arms(first["strategies"], more["strategies"])
    strategies = _union(first["strategies"], more["strategies"], "id")
    finished_now = {run["id"] for run in more["runs"] if run["status"] == "done"}
    first_runs = [run for run in first["runs"] if run["status"] == "done" or run["id"] not in finished_now]
    runs = _union(first_runs, more["runs"], "id")
    run_ids = {run["id"] for run in first_runs}
    repeated = [{**run, "cpu": more["machine"].get("cpu")} for run in more["runs"] if run["id"] in run_ids]
    machine = dict(first["machine"])
    for component in ("cpu", "gpu"):
        names_before = (machine.get(component) or "").split("; ")
        names = dict.fromkeys([*names_before, more["machine"].get(component)])
        machine[component] = "; ".join(filter(None, names)) or None
    together = {
        **first,
        "machine": machine,
        "strategies": strategies,
        "runs": runs,
        "repeated": [*first.get("repeated", ()), *repeated],
        "further_commands": [*first.get("further_commands", ()), more["command"]],
        "diagnosis": _joined_diagnosis(first["diagnosis"], more["diagnosis"]) if first["diagnosis"] else None,
        "summary": summaries.summarise(
            runs,
            [strategy["id"] for strategy in strategies],
            baseline,
            first["summary"][0].get("above", {}).get("threshold"),
        ),
    }
    return {**together, "warnings": results.warnings_of(together)}


def _conditions(results: Results) -> dict[str, Any]:
    """What the runs of a comparison share in their training, by name."""
    return {
        "models": results["model"],
        "tasks": results["task"],
        "flags": shlex.join(results["openrlhf_args"]),
    }


def _evaluations(results: Results) -> list[Results]:
    """The evaluations of a comparison: of the untrained model, and of each run."""
    evaluations = [results["untrained"], *(run["evaluation"] for run in results["runs"])]
    return [evaluation for evaluation in evaluations if evaluation]


def _check_evaluations(evaluations: Sequence[Results]) -> None:
    """Raises ``ValueError`` where they differ in what decides a score. One that does not record it is passed over."""

    def check(what: str, values: Sequence[Any]) -> None:
        recorded = [value for value in values if value is not None]
        unlike = [value for value in recorded if value != recorded[0]]
        if unlike:
            raise ValueError(f"evaluations with different {what} are not joined: {recorded[0]} and {unlike[0]}")

    check("numbers of responses", [evaluation.get("n") for evaluation in evaluations])
    # Each seed of a comparison is evaluated with draws of its own.
    samplings = [evaluation.get("sampling") for evaluation in evaluations]
    check("sampling", [sampling and {**sampling, "seed": None} for sampling in samplings])
    check("scorers", [evaluation.get("scorer") for evaluation in evaluations])
    check("contents of the problem file", [evaluation.get("digest") for evaluation in evaluations])
    check("problems", [_ids(evaluation) for evaluation in evaluations])


def _ids(evaluation: Results) -> list[str] | None:
    """The ids of an evaluation's problems."""
    problems = evaluation.get("problems")
    return None if problems is None else [problem["id"] for problem in problems]


def _check_arms(first: Sequence[Results], more: Sequence[Results]) -> None:
    """Raises ``ValueError`` where an arm of both parts was run with other options."""
    first_options = {arm["id"]: arm["perturbation"] or {} for arm in first}
    for arm in more:
        options = arm["perturbation"] or {}
        for name, first_value in first_options.get(arm["id"], {}).items():
            # An option that only one of the parts has is of a later release, which adds it with a default.
            value = options.get(name, first_value)
            if value != first_value:
                raise ValueError(f"arms {arm['id']!r} with different {name} are not joined: {first_value} and {value}")


def _joined_diagnosis(first: Results, more: Results | None) -> Results:
    """The first diagnosis with the strategies and warnings of the other one."""
    further = more or {"strategies": []}
    warnings = [*first.get("warnings", ()), *further.get("warnings", ())]
    return {
        **first,
        "strategies": _union(first["strategies"], further["strategies"], "name"),
        "warnings": list(dict.fromkeys(warnings)),
    }


def _union(first: Sequence[Results], more: Sequence[Results], key: str) -> list[Results]:
    """The rows of ``first``, and then those of ``more`` with another key."""
    rows = {row[key]: row for row in first}
    for row in more:
        rows.setdefault(row[key], row)
    return list(rows.values())


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
    if with_results:
        for name, comparison in comparisons.items():
            folder = out / name
            folder.mkdir(parents=True, exist_ok=True)
            write_report(comparison, folder / "report.html")
            text = json.dumps(comparison, indent=1)
            (folder / _PACKED).write_bytes(gzip.compress(text.encode(), mtime=0))
    page = page or out / "tables.md"
    write_text(page, tables)
    print(page)
