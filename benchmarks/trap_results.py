# SPDX-License-Identifier: Apache-2.0
"""Publishes comparisons on the sandbox's tasks, the second study or its pilot (docs/studies/study2.md).

    python -m benchmarks.trap_results runs/study2 --out docs/results/study2 --tables docs/studies/tables/study2.md
    python -m benchmarks.trap_results runs/study2-more --out docs/results/study2 --join --tables ...
    python -m benchmarks.trap_results docs/results/study2 --out docs/results/study2 --tables ...    the tables alone

Takes each folder that `ngrpo compare` wrote under the first one, with its runs whole, or what was published of them.
Writes OUT/TASK/results.json.gz and report.html, and the tables (OUT/tables.md): where each run ended, how many ended
above the threshold, both tests, how often the better way was tried during training, how much rewards differed within
a group, and the strategy's rollouts before training. With --join further strategies and seeds of a task are
added to what OUT holds of it, and all are judged together. OUT's other tasks stay. Every number comes from the results.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command_line import parser_of
from benchmarks.markdown import table_lines
from benchmarks.publishing import Results, comparisons, each_joined, publish, published
from benchmarks.study import scores
from ngrpo.workbench.statistics import in_words

_SPANS = 6  # of a training's steps, for the tables by steps
# Title: how the name of what a training step logged begins. A task logs under its own name what is tried.
_BY_STEPS = {"Tried the better way": "task_", "Deviation of the rewards within a group": "group_reward_std"}
_BEFORE = ["learnable groups", "distinct answers", "diversity", "perplexity", "relative shift"]


def ends(results: Results) -> list[list[str]]:
    """A row for each strategy: its runs' ends by seed, how many are above the threshold, their mean, and the tests."""
    table = []
    for row in results["summary"]:
        by_seed = scores(results, row["strategy"])
        above = row["above"]
        difference = (row["difference"] or {}).get("mean_at_n")
        fisher = "–" if "p" not in above else f"{above['p']:.2g} ({above['p_corrected']:.2g})"
        table.append(
            [
                f"`{row['strategy']}`",
                " ".join(f"{by_seed[seed]:.3f}" for seed in sorted(by_seed)),
                f"{above['runs']} of {above['of']}",
                f"{np.mean(list(by_seed.values())):.3f}",
                _difference(difference),
                fisher,
            ]
        )
    return table


def repeated(results: Results) -> list[str]:
    """A line for each strategy that was run again on another machine: where those runs ended, by seed."""
    ends_by_strategy: dict[tuple[str, str], list[float]] = {}
    for run in results.get("repeated", ()):
        run_ends = ends_by_strategy.setdefault((run["cpu"], run["strategy"]), [])
        if run["evaluation"]:
            run_ends.append(run["evaluation"]["mean_at_n"])
    lines = []
    for (cpu, name), run_ends in ends_by_strategy.items():
        listed = " ".join(f"{end:.3f}" for end in run_ends)
        mean = np.mean(run_ends)
        lines.append(f"`{name}` run again on {cpu or 'a CPU'}, not counted above: {listed} (mean {mean:.3f}).")
    return lines


def by_steps(results: Results, prefix: str) -> tuple[list[str], list[list[str]]]:
    """A logged number by spans of the training, its mean over steps and runs.

    Args:
        results: of a comparison.
        prefix: how the number's name in a step begins.

    Returns:
        The headings, and a row for each strategy; both are empty where no step has the number.
    """
    logged = {strategy["id"]: _logged(results, strategy["id"], prefix) for strategy in results["strategies"]}
    if not any(logged.values()):
        return [], []
    last = int(max(step for values in logged.values() for step, _ in values))
    bounds = [round(last * span / _SPANS) for span in range(_SPANS + 1)]
    spans = list(itertools.pairwise(bounds))
    table = []
    for name, values in logged.items():
        cells = []
        for before, end in spans:
            in_span = [value for step, value in values if before < step <= end]
            cells.append(f"{np.mean(in_span):.3f}" if in_span else "–")
        table.append([f"`{name}`", *cells])
    return [f"{before + 1} to {end}" for before, end in spans], table


def before_training(diagnosis: Mapping[str, Any]) -> list[list[str]]:
    """A row for each strategy of what `ngrpo diagnose` measured on the untrained model; – where there is no number."""
    table = []
    for row in diagnosis["strategies"]:
        numbers = (
            row["reward"],
            row["pass_at_k"][str(diagnosis["group"])],
            row["learnable_groups"],
            row["diversity"]["distinct_answers"],
            row["diversity"]["score"],
            row["validity"]["perplexity"],
            row["relative_shift"],
        )
        cells = ["–" if number is None else f"{number:.3f}" for number in numbers]
        table.append([f"`{row['name']}`", *cells])
    return table


def report(tasks: Mapping[str, Results]) -> str:
    """The text of the tables."""
    lines = [
        "# Tables",
        "",
        "Written by `python -m benchmarks.trap_results`; the design: [study2.md](../study2.md).",
    ]
    for name, results in tasks.items():
        lines += ["", f"## {name}", "", *_task_lines(results)]
    lines += [
        "",
        "Differences: paired by seed, 95% intervals, p of the paired t test; Fisher's exact test is of the runs above;"
        " p with Holm's correction for the table's strategies in brackets.",
    ]
    return "\n".join(lines) + "\n"


def _task_lines(results: Results) -> list[str]:
    """A task's runs and their minutes, and its tables."""
    finished = [run for run in results["runs"] if run["status"] == "done"]
    machine = results["machine"]
    threshold = results["summary"][0]["above"]["threshold"]
    minutes = sum(run["seconds"] or 0 for run in finished) / 60
    lines = [
        f"{len(finished)} of {len(results['runs'])} runs, {minutes:.0f} minutes of training and evaluation on"
        f" {machine.get('cores')} cores of {machine.get('cpu') or 'a CPU'}; {results['created']}. Before training:"
        f" {results['untrained']['mean_at_n']:.3f}."
    ]
    head = ["strategy", "Mean@n by seed", f"above {threshold:g}", "mean", f"to `{results['baseline']}`", "Fisher"]
    lines += ["", *table_lines(head, ends(results))]
    for line in repeated(results):
        lines += ["", line]
    for title, prefix in _BY_STEPS.items():
        head, rows = by_steps(results, prefix)
        if rows:  # a task may log nothing of what is tried
            lines += ["", f"{title}, by steps:", "", *table_lines(["strategy", *head], rows)]
    diagnosis = results["diagnosis"]
    if diagnosis:
        head = ["strategy", "reward", f"Pass@{diagnosis['group']}", *_BEFORE]
        title = f"Rollouts of the untrained model, {diagnosis['prompts']} groups of {diagnosis['group']}:"
        lines += ["", title, "", *table_lines(head, before_training(diagnosis))]
    return lines


def main() -> None:
    """Reads the folder and publishes it."""
    parser = parser_of(__doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tables", type=Path, help="the tables' page [OUT/tables.md]")
    parser.add_argument("--join", action="store_true", help="add to what OUT holds of a task")
    options = parser.parse_args()
    tasks = comparisons(parser, options.study, "examples/study2/run.sh")
    for name, results in tasks.items():
        unfinished = [run["id"] for run in results["runs"] if run["status"] != "done"]
        if unfinished:
            parser.error(f"{name}: {len(unfinished)} runs are not finished: {', '.join(unfinished[:3])}")
        if any("above" not in row for row in results["summary"]):
            parser.error(f"{name}: runs were not counted; give the comparison --threshold")
    old_tasks = published(options.out)
    if options.join:
        tasks = each_joined(parser, old_tasks, tasks)
    tables = report(dict(sorted((old_tasks | tasks).items())))
    is_published = options.study.resolve() == options.out.resolve()
    publish(tasks, options.out, tables, options.tables, with_results=not is_published)


def _logged(results: Results, strategy: str, prefix: str) -> list[tuple[float, float]]:
    """(step, value) of all finished runs of a strategy, where a step has a number with such a name."""
    logged = []
    for run in results["runs"]:
        if run["strategy"] != strategy or run["status"] != "done":
            continue
        for step in run["steps"]:
            logged += [(step["step"], step[name]) for name in step if name.startswith(prefix)]
    return logged


def _difference(difference: Mapping[str, Any] | None) -> str:
    if difference is None:
        return "–"
    text = in_words(difference, "+.3f")
    p = difference["p"]
    if p is not None:
        text += f", p {p:.2g} ({difference.get('p_corrected', p):.2g})"
    return text


if __name__ == "__main__":
    main()
