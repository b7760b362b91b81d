# SPDX-License-Identifier: Apache-2.0
"""Publishes a finished study: the comparisons' results and reports, and the questions that pool its tasks.

    python -m benchmarks.study runs/study [--contrasts FILE] [--design study.md] [--out docs/results] [--tables FILE]
                           [--join]

Reads each folder under runs/study that `ngrpo compare` wrote, or published results. Writes OUT/TASK/results.json.gz
and report.html, and the tables (OUT/tables.md): runs and their hours; the contrasts that the design named before any
run, pooled over tasks by Welch's t and corrected by Holm; each task's strategies; the drift of neighbor sets. Every
number comes from the results. Contrasts compare unperturbed evaluations. Unfinished runs are counted. A study may be
run in parts, a few seeds at a time and on several machines: with --join, a part is added to what OUT holds.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pooled
from benchmarks.command_line import parser_of
from benchmarks.markdown import table_lines
from benchmarks.publishing import Results, comparisons, each_joined, publish, published
from ngrpo.machine.storage import datafiles
from ngrpo.workbench import statistics
from ngrpo.workbench.compare.summaries import mean_unscored
from ngrpo.workbench.report.values import shares
from ngrpo.workbench.statistics import pass_at_k

_DRIFT = "neighbors_changed_since_start"


def scores(results: Results, strategy: str, k: int | None = None) -> dict[int, float]:
    """Mean@n of each finished run of a strategy, or its Pass@k, by seed."""
    means = {}
    for run in results["runs"]:
        if run["strategy"] != strategy or run["status"] != "done" or not run["evaluation"]:
            continue
        problem_scores = []
        for problem in run["evaluation"]["problems"]:
            if k is None:
                problem_scores.append(problem["correct"] / problem["n"])
            else:
                problem_scores.append(pass_at_k(problem["n"], problem["correct"], k))
        means[run["seed"]] = float(np.mean(problem_scores))
    return means


@dataclass
class Contrast:
    """A contrast of two strategies over the tasks.

    Attributes:
        name: of the contrast.
        cells: its difference in each task, in words.
        sides: for each task with two seeds at least, the scores of ours and theirs by the seeds of both.
        pooled: the mean difference over these tasks; None without one.
    """

    name: str
    cells: list[str] = field(default_factory=list)
    sides: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    pooled: dict[str, float | None] | None = None

    @property
    def differences(self) -> list[np.ndarray]:
        """For each task in ``sides`` the paired differences of its seeds."""
        return [ours - theirs for ours, theirs in self.sides]


def contrasts(tasks: Mapping[str, Results], pairs: Mapping[str, Sequence[str]], k: int | None) -> list[list[str]]:
    """A row for each contrast: its difference in each task, pooled, the corrected p, the smallest one detectable."""
    measured = [_contrast(name, tasks, pair, k, len(pairs)) for name, pair in pairs.items()]
    pooled_p = [row.pooled["p"] for row in measured if row.pooled is not None and row.pooled["p"] is not None]
    corrected = iter(statistics.holm([p for p in pooled_p if p is not None]))
    table = []
    for contrast in measured:
        if contrast.pooled is None:
            table.append([contrast.name, *contrast.cells, "–", "–", "–"])
            continue
        p = contrast.pooled["p"]
        p_cell = "–" if p is None else f"{p:.3g} ({next(corrected):.3g})"
        table.append(
            [contrast.name, *contrast.cells, _pooled_cell(contrast, len(pairs)), p_cell, _improvement_cell(contrast)]
        )
    return table


def _contrast(
    name: str, tasks: Mapping[str, Results], pair: Sequence[str], k: int | None, comparisons: int
) -> Contrast:
    """Measures a contrast, whose p is one of as many as there are ``comparisons``."""
    ours, theirs = pair
    contrast = Contrast(name)
    for results in tasks.values():
        our_scores = scores(results, ours, k)
        their_scores = scores(results, theirs, k)
        seeds = sorted(our_scores.keys() & their_scores.keys())
        if len(seeds) < 2:
            contrast.cells.append(f"– ({_counted(seeds)})")
            continue
        our_side = np.array([our_scores[seed] for seed in seeds])
        their_side = np.array([their_scores[seed] for seed in seeds])
        contrast.sides.append((our_side, their_side))
        paired = statistics.paired((our_side - their_side)[:, None], np.zeros((len(seeds), 1)))
        least = statistics.detectable_share(paired["spread"], len(seeds), comparisons)
        difference = statistics.in_words(paired, "+.3f")
        contrast.cells.append(f"{difference}, {_detectable(least)} ({_counted(seeds)})")
    if contrast.sides:
        contrast.pooled = statistics.within_shares(pooled.mean_difference(contrast.differences))
    return contrast


def _counted(seeds: Sequence[int]) -> str:
    """``1 seed``, ``5 seeds``."""
    return "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"


def _pooled_cell(contrast: Contrast, comparisons: int) -> str:
    """The pooled difference, and the smallest one that would be found."""
    least = statistics.possible_share(pooled.detectable(contrast.differences, comparisons))
    return f"{statistics.in_words(contrast.pooled, '+.3f')}, {_detectable(least)}"


def _improvement_cell(contrast: Contrast) -> str:
    """The probability of improvement; its interval draws seeds again, and of two seeds there are only a few draws."""
    improvement = pooled.probability_of_improvement(contrast.sides)
    fewest_seeds = min(len(difference) for difference in contrast.differences)
    if fewest_seeds < statistics.ENOUGH_SEEDS:
        return f"{improvement['value']:.3f}"
    return statistics.in_words(improvement)


def strategies(results: Results) -> list[list[str]]:
    """A row for each strategy of a task: its scores, its verdict, and what its perturbation did."""
    diagnosis = results.get("diagnosis") or {}
    diagnosed = {row["name"]: row for row in diagnosis.get("strategies", [])}
    table = []
    for row in results["summary"]:
        name = row["strategy"]
        runs = [run for run in results["runs"] if run["strategy"] == name]
        diversity = [diagnosed[name]["diversity"]["score"]] if diagnosed.get(name) else []
        shifts = []
        drifts = []
        for run in runs:
            shifts += [step["shift"] for step in run["steps"][:1] if "shift" in step]
            drifts += [step[_DRIFT] for step in run["steps"] if _DRIFT in step][-1:]
        ks = sorted(row["pass_at_k"], key=int)
        largest_pass = row["pass_at_k"].get(ks[-1]) if ks else None
        table.append(
            [
                name,
                str(len(row["seeds"])),
                statistics.in_words(row["mean_at_n"]),
                statistics.in_words(largest_pass),
                shares(mean_unscored(runs)),
                row["verdict"],
                _mean(diversity),
                _mean(shifts),
                _mean(drifts),
            ]
        )
    return table


def report(tasks: Mapping[str, Results], pairs: Mapping[str, Sequence[str]], design: str) -> str:
    """The text of the tables; ``design`` is the page of the study's design, in the folder above."""
    lines = [
        "# The study's tables",
        "",
        f"Written by `python -m benchmarks.study`; the design is [{design}](../{design}).",
    ]
    for name, results in tasks.items():
        lines += ["", f"## {name}", "", *_task_lines(results)]
    for k in (None, *_shared_k(tasks)):
        measure = "Mean@n" if k is None else f"Pass@{k}"
        explanation = (
            "Paired by seed; 95% intervals, each for itself; p of the pooled difference with Holm's correction in"
            " brackets; the last column is the probability of improvement."
        )
        lines += ["", f"## Contrasts in {measure}", "", explanation]
        head = ["contrast", *tasks, "pooled", "p (corrected)", "improvement"]
        lines += ["", *table_lines(head, contrasts(tasks, pairs, k))]
    return "\n".join(lines) + "\n"


def _task_lines(results: Results) -> list[str]:
    """A task's runs and their hours, the command, and the table of strategies."""
    runs = results["runs"]
    finished = [run for run in runs if run["status"] == "done"]
    hours = sum(run["seconds"] or 0 for run in runs) / 3600
    machine = results["machine"]
    summary = (
        f"{len(finished)} of {len(runs)} runs finished, {hours:.1f} hours of training and evaluation"
        f" on {machine.get('cores')} cores of {machine.get('cpu') or 'a CPU'}; {results['created']}."
    )
    ks = sorted({k for row in results["summary"] for k in row["pass_at_k"]}, key=int)
    n = next((row["n"] for row in results["summary"] if row["n"]), "n")
    head = [
        "strategy",
        "seeds",
        f"Mean@{n}",
        f"Pass@{ks[-1]}" if ks else "Pass@k",
        "cut / unreadable / timed out",
        f"against {results['baseline']}",
        "diversity before training",
        "shift at step 1",
        "neighbor sets changed at the end",
    ]
    commands = [shlex.join(command) for command in (results["command"], *results.get("further_commands", ()))]
    return [summary, "", "```text", *commands, "```", "", *table_lines(head, strategies(results))]


def main() -> None:
    """Reads the study's folder and publishes it."""
    parser = parser_of(__doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("--contrasts", default="examples/study/contrasts.yaml")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--tables", type=Path, help="the tables' page [OUT/tables.md]")
    parser.add_argument("--design", default="study.md", help="the page of docs/studies/ with the study's design")
    parser.add_argument("--join", action="store_true", help="add to the strategies and seeds that OUT holds of a task")
    options = parser.parse_args()
    tasks = comparisons(parser, options.study, "`make study`")
    if options.join:
        earlier = published(options.out)
        tasks = dict(sorted((earlier | each_joined(parser, earlier, tasks)).items()))
    pairs: dict[str, Any] = datafiles.read_yaml(
        options.contrasts, flag="--contrasts", example="'name: [neighbor, none]'"
    )
    names = {strategy["id"] for results in tasks.values() for strategy in results["strategies"]}
    for contrast, pair in pairs.items():
        for strategy in pair:
            if strategy not in names:
                parser.error(f"contrast {contrast!r}: no strategy is called {strategy!r}; there are {sorted(names)}")
    is_published = options.study.resolve() == options.out.resolve()
    publish(tasks, options.out, report(tasks, pairs, options.design), options.tables, with_results=not is_published)


def _shared_k(tasks: Mapping[str, Results]) -> list[int]:
    """The largest k above 1 that every task has, in a list."""
    task_ks = []
    for results in tasks.values():
        task_ks.append({int(k) for row in results["summary"] for k in row["pass_at_k"]})
    return sorted(set.intersection(*task_ks) - {1})[-1:]


def _detectable(least: float | None) -> str:
    return "detectable –" if least is None else f"detectable {least:.3f}"


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f}" if values else "–"


if __name__ == "__main__":
    main()
