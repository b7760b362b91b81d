# SPDX-License-Identifier: Apache-2.0
"""Publishes comparisons on the sandbox's tasks, the second study or its pilot (docs/study2.md).

    python -m benchmarks.trap_results runs/study2-pilot --out docs/results/study2_pilot

Takes each folder that `ngrpo compare` wrote under the first one, with its runs whole. Writes OUT/TASK/results.json and
report.html as they are, and OUT/tables.md: where each run ended, how many ended above the threshold, both tests, and
how often the better way was tried as the training went on. Every number comes from results.json.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.publishing import Results, comparisons, markdown_table, publish
from benchmarks.study import scores

_PARTS = 6  # of a training, for the table of what was tried
_TRIED = "task_"


def ends(results: Results) -> list[list[str]]:
    """A row for each strategy: its runs' ends by seed, how many are above the threshold, their mean, and the tests."""
    table = []
    for row in results["summary"]:
        by_seed = scores(results, row["strategy"])
        above, difference = row["above"], (row["difference"] or {}).get("mean_at_n")
        table.append(
            [
                f"`{row['strategy']}`",
                " ".join(f"{by_seed[seed]:.3f}" for seed in sorted(by_seed)),
                f"{above['runs']} of {above['of']}",
                f"{np.mean(list(by_seed.values())):.3f}",
                _difference(difference),
                "–" if "p" not in above else f"{above['p']:.2g} ({above['p_corrected']:.2g})",
            ]
        )
    return table


def tried(results: Results) -> tuple[list[str], list[list[str]]]:
    """How often rollouts tried the better way, by part of the training: the heading, and a row for each strategy."""
    logged = [[step for step in run["steps"] if _key(step)] for run in results["runs"] if run["status"] == "done"]
    last = int(max((step["step"] for steps in logged for step in steps), default=0))
    bounds = [round(last * part / _PARTS) for part in range(_PARTS + 1)]
    head = [f"{first + 1} to {end}" for first, end in itertools.pairwise(bounds)]
    table = []
    for strategy in results["strategies"]:
        steps = [
            step
            for run in results["runs"]
            if run["strategy"] == strategy["id"] and run["status"] == "done"
            for step in run["steps"]
            if _key(step)
        ]
        cells = []
        for first, end in itertools.pairwise(bounds):
            values = [step[_key(step)] for step in steps if first < step["step"] <= end]
            cells.append(f"{np.mean(values):.3f}" if values else "–")
        table.append([f"`{strategy['id']}`", *cells])
    return head, table


def report(tasks: Mapping[str, Results]) -> str:
    """The text of tables.md."""
    lines = [
        "# Tables",
        "",
        "Written by `python -m benchmarks.trap_results`; the design: [study2.md](../../study2.md).",
    ]
    for name, results in tasks.items():
        runs = [run for run in results["runs"] if run["status"] == "done"]
        machine, threshold = results["machine"], results["summary"][0]["above"]["threshold"]
        minutes = sum(run["seconds"] or 0 for run in runs) / 60
        lines += ["", f"## {name}", ""]
        lines.append(
            f"{len(runs)} of {len(results['runs'])} runs, {minutes:.0f} minutes of training and evaluation on"
            f" {machine.get('cores')} cores of {machine.get('cpu') or 'a CPU'}; {results['created']}. Before training:"
            f" {results['untrained']['mean_at_n']:.3f}."
        )
        head = ["strategy", "Mean@n by seed", f"above {threshold:g}", "mean", f"to `{results['baseline']}`", "Fisher"]
        lines += ["", *markdown_table(head, ends(results))]
        head, rows = tried(results)
        lines += ["", "Tried the better way, by steps:", "", *markdown_table(["strategy", *head], rows)]
    lines += [
        "",
        "Differences: paired by seed, 95% intervals, p of the paired t test; Fisher's exact test is of the runs",
    ]
    lines[-1] += " above; p with Holm's correction for the table's strategies in brackets."
    return "\n".join(lines) + "\n"


def main() -> None:
    """Reads the folder and publishes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    tasks = comparisons(parser, options.study, "examples/study2/run.sh")
    for name, results in tasks.items():
        missing = [run["id"] for run in results["runs"] if run["status"] != "done"]
        if missing:
            parser.error(f"{name}: {len(missing)} runs are not finished: {', '.join(missing[:3])}")
        if any("above" not in row for row in results["summary"]):
            parser.error(f"{name}: runs were not counted; give the comparison --threshold")
    publish(options.study, options.out, list(tasks), report(tasks))


def _key(step: Mapping[str, float]) -> str:
    """The task's own name of what is tried, in a step that logged it."""
    return next((key for key in step if key.startswith(_TRIED)), "")


def _difference(difference: Mapping[str, Any] | None) -> str:
    if difference is None:
        return "–"
    text = f"{difference['value']:+.3f}"
    if difference["low"] is not None:
        text += f" [{difference['low']:+.3f}, {difference['high']:+.3f}]"
    if difference["p"] is not None:
        text += f", p {difference['p']:.2g} ({difference.get('p_corrected', difference['p']):.2g})"
    return text


if __name__ == "__main__":
    main()
