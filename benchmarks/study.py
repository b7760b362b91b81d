# SPDX-License-Identifier: Apache-2.0
"""Publishes a finished study: the comparisons' results and reports, and the questions that pool its tasks.

    python -m benchmarks.study runs/study [--contrasts FILE] [--out docs/results] [--tables FILE]

Reads each folder under runs/study that `ngrpo compare` wrote, or published results. Writes OUT/TASK/results.json.gz
and report.html, and the tables (OUT/tables.md): runs and their hours; the contrasts that docs/studies/study.md named
before any run, pooled over tasks by Welch's t and corrected by Holm; each task's strategies; the drift of neighbor
sets. Every number comes from the results. Contrasts compare unperturbed evaluations. Unfinished runs are counted.
"""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pooled
from benchmarks.publishing import Results, comparisons, markdown_table, publish
from ngrpo.machine.storage import datafiles
from ngrpo.workbench import statistics
from ngrpo.workbench.statistics import pass_at_k

_DRIFT = "neighbors_changed_since_start"


def scores(results: Results, strategy: str, k: int | None = None) -> dict[int, float]:
    """Mean@n of each finished run of a strategy, or its Pass@k, by seed."""
    means = {}
    for run in results["runs"]:
        if run["strategy"] == strategy and run["status"] == "done" and run["evaluation"]:
            problems = run["evaluation"]["problems"]
            each = [p["correct"] / p["n"] if k is None else pass_at_k(p["n"], p["correct"], k) for p in problems]
            means[run["seed"]] = float(np.mean(each))
    return means


def contrasts(tasks: Mapping[str, Results], pairs: Mapping[str, Sequence[str]], k: int | None) -> list[list[str]]:
    """A row for each contrast: its difference in each task, pooled, the corrected p, the smallest one detectable."""
    rows = []
    for name, (ours, theirs) in pairs.items():
        differences, sides, cells = [], [], []
        for results in tasks.values():
            one, other = (scores(results, strategy, k) for strategy in (ours, theirs))
            seeds = sorted(one.keys() & other.keys())
            if len(seeds) < 2:
                cells.append(f"– ({len(seeds)} seeds)")
                continue
            sides.append((np.array([one[s] for s in seeds]), np.array([other[s] for s in seeds])))
            differences.append(sides[-1][0] - sides[-1][1])
            paired = statistics.paired(differences[-1][:, None], np.zeros((len(seeds), 1)))
            least = statistics.detectable(paired["spread"], len(seeds), len(pairs))
            cells.append(f"{statistics.in_words(paired, '+.3f')}, {_detectable(least)} ({len(seeds)} seeds)")
        rows.append((name, cells, differences, sides))
    whole = [pooled.mean_difference(differences) if differences else None for _, _, differences, _ in rows]
    tested = [each["p"] for each in whole if each is not None and each["p"] is not None]
    corrected = iter(statistics.holm([p for p in tested if p is not None]))
    table = []
    for (name, cells, differences, sides), each in zip(rows, whole):
        if each is None:
            table.append([name, *cells, "–", "–", "–"])
            continue
        p = "–" if each["p"] is None else f"{each['p']:.3g} ({next(corrected):.3g})"
        chance = pooled.probability_of_improvement(sides)
        spread, seeds = float(np.sqrt(np.mean([d.var(ddof=1) for d in differences]))), min(map(len, differences))
        least = statistics.detectable(spread, seeds, len(pairs), len(differences))
        both = f"{statistics.in_words(each, '+.3f')}, {_detectable(least)}"
        table.append([name, *cells, both, p, statistics.in_words(chance)])
    return table


def strategies(results: Results) -> list[list[str]]:
    """A row for each strategy of a task: its scores, its verdict, and what its perturbation did."""
    diagnosed = {row["name"]: row for row in (results.get("diagnosis") or {}).get("strategies", [])}
    table = []
    for row in results["summary"]:
        ks = sorted(row["pass_at_k"], key=int)
        axes = diagnosed.get(row["strategy"]) or {}
        drift = [s[_DRIFT] for run in results["runs"] if run["strategy"] == row["strategy"] for s in _last(run, _DRIFT)]
        shift = [
            s["shift"]
            for run in results["runs"]
            if run["strategy"] == row["strategy"]
            for s in run["steps"][:1]
            if "shift" in s
        ]
        table.append(
            [
                row["strategy"],
                str(len(row["seeds"])),
                statistics.in_words(row["mean_at_n"]),
                statistics.in_words(row["pass_at_k"].get(ks[-1]) if ks else None),
                row["verdict"],
                _mean([axes["diversity"]["score"]] if axes else []),
                _mean(shift),
                _mean(drift),
            ]
        )
    return table


def report(tasks: Mapping[str, Results], pairs: Mapping[str, Sequence[str]]) -> str:
    """The text of the tables."""
    lines = [
        "# The study's tables",
        "",
        "Written by `python -m benchmarks.study`; the design is [study.md](../study.md).",
    ]
    for name, results in tasks.items():
        runs = results["runs"]
        done = [run for run in runs if run["status"] == "done"]
        hours = sum(run["seconds"] or 0 for run in runs) / 3600
        machine = results["machine"]
        lines += [
            "",
            f"## {name}",
            "",
            f"{len(done)} of {len(runs)} runs finished, {hours:.1f} hours of training and evaluation",
        ]
        lines[-1] += f" on {machine.get('cores')} cores of {machine.get('cpu') or 'a CPU'}; {results['created']}."
        lines += ["", "```text", shlex.join(results["command"]), "```", ""]
        ks = sorted({k for row in results["summary"] for k in row["pass_at_k"]}, key=int)
        n = next((row["n"] for row in results["summary"] if row["n"]), "n")
        head = [
            "strategy",
            "seeds",
            f"Mean@{n}",
            f"Pass@{ks[-1]}" if ks else "Pass@k",
            f"against {results['baseline']}",
        ]
        lines += markdown_table(
            [*head, "diversity before training", "shift at step 1", "neighbor sets changed at the end"],
            strategies(results),
        )
    for k in (None, *_shared_k(tasks)):
        what = "Mean@n" if k is None else f"Pass@{k}"
        lines += ["", f"## Contrasts in {what}", "", "Paired by seed; 95% intervals, each for itself; p of the pooled"]
        lines[-1] += (
            " difference with Holm's correction in brackets; the last column is the probability of improvement."
        )
        head = ["contrast", *tasks, "pooled", "p (corrected)", "improvement"]
        lines += ["", *markdown_table(head, contrasts(tasks, pairs, k))]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Reads the study's folder and publishes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--contrasts", default="examples/study/contrasts.yaml")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--tables", type=Path, help="the tables' page [OUT/tables.md]")
    options = parser.parse_args()
    tasks = comparisons(parser, options.study, "`make study`")
    pairs = datafiles.read_yaml(options.contrasts, flag="--contrasts", example="'name: [neighbor, none]'")
    known = {strategy["id"] for results in tasks.values() for strategy in results["strategies"]}
    for name, pair in pairs.items():
        missing = [strategy for strategy in pair if strategy not in known]
        if missing:
            parser.error(f"contrast {name!r}: no strategy is called {missing[0]!r}; there are {sorted(known)}")
    is_published = options.study.resolve() == options.out.resolve()
    publish(tasks, options.out, report(tasks, pairs), options.tables, with_results=not is_published)


def _last(run: Mapping[str, Any], key: str) -> list[Mapping[str, float]]:
    """The last step of a run that logged a key, in a list; an empty one where none did."""
    return [step for step in run["steps"] if key in step][-1:]


def _shared_k(tasks: Mapping[str, Results]) -> list[int]:
    """The largest k above 1 that every task has, in a list."""
    each = [{int(k) for row in results["summary"] for k in row["pass_at_k"]} for results in tasks.values()]
    return sorted(set.intersection(*each) - {1})[-1:]


def _detectable(least: float | None) -> str:
    return "detectable –" if least is None else f"detectable {least:.3f}"


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f}" if values else "–"


if __name__ == "__main__":
    main()
