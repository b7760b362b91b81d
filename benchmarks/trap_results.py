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

import argparse
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.publishing import Results, comparisons, joined, markdown_table, publish, published
from benchmarks.study import scores
from ngrpo.workbench.statistics import in_words

_PARTS = 6  # of a training, for the table of what was tried
# Title: how the name of what a training step logged begins. A task logs under its own name what is tried.
_BY_PART = {"Tried the better way": "task_", "Deviation of the rewards within a group": "group_reward_std"}
_BEFORE = ["learnable groups", "distinct answers", "diversity", "perplexity", "relative shift"]


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


def repeated(results: Results) -> list[str]:
    """A line for each strategy that was run again on another machine: where those runs ended, by seed."""
    lines = []
    for cpu, name in dict.fromkeys((run["cpu"], run["strategy"]) for run in results.get("repeated", ())):
        runs = [run for run in results["repeated"] if (run["cpu"], run["strategy"]) == (cpu, name)]
        ends = [run["evaluation"]["mean_at_n"] for run in runs if run["evaluation"]]
        each, mean = " ".join(f"{end:.3f}" for end in ends), np.mean(ends)
        lines.append(f"`{name}` run again on {cpu or 'a CPU'}, not counted above: {each} (mean {mean:.3f}).")
    return lines


def by_part(results: Results, prefix: str) -> tuple[list[str], list[list[str]]]:
    """A logged number by part of the training, its mean over steps and runs.

    Args:
        results: of a comparison.
        prefix: how the number's name in a step begins.

    Returns:
        The heading, and a row for each strategy; both are empty where no step has the number.
    """
    steps = {strategy["id"]: _logged(results, strategy["id"], prefix) for strategy in results["strategies"]}
    if not any(steps.values()):
        return [], []
    last = int(max((step for values in steps.values() for step, _ in values)))
    bounds = [round(last * part / _PARTS) for part in range(_PARTS + 1)]
    table = []
    for name, values in steps.items():
        parts = [[value for step, value in values if first < step <= end] for first, end in itertools.pairwise(bounds)]
        table.append([f"`{name}`", *(f"{np.mean(part):.3f}" if part else "–" for part in parts)])
    return [f"{first + 1} to {end}" for first, end in itertools.pairwise(bounds)], table


def before(diagnosis: Mapping[str, Any]) -> list[list[str]]:
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
        table.append([f"`{row['name']}`", *("–" if number is None else f"{number:.3f}" for number in numbers)])
    return table


def report(tasks: Mapping[str, Results]) -> str:
    """The text of the tables."""
    lines = [
        "# Tables",
        "",
        "Written by `python -m benchmarks.trap_results`; the design: [study2.md](../study2.md).",
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
        lines += [line for told in repeated(results) for line in ("", told)]
        for title, prefix in _BY_PART.items():
            head, rows = by_part(results, prefix)
            if not rows:  # as where a task logs nothing of what is tried
                continue
            lines += ["", f"{title}, by steps:", "", *markdown_table(["strategy", *head], rows)]
        diagnosis = results["diagnosis"]
        if diagnosis:
            head = ["strategy", "reward", f"Pass@{diagnosis['group']}", *_BEFORE]
            title = f"Rollouts of the untrained model, {diagnosis['prompts']} groups of {diagnosis['group']}:"
            lines += ["", title, "", *markdown_table(head, before(diagnosis))]
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
    parser.add_argument("--tables", type=Path, help="the tables' page [OUT/tables.md]")
    parser.add_argument("--join", action="store_true", help="add to what OUT holds of a task")
    options = parser.parse_args()
    tasks = comparisons(parser, options.study, "examples/study2/run.sh")
    for name, results in tasks.items():
        missing = [run["id"] for run in results["runs"] if run["status"] != "done"]
        if missing:
            parser.error(f"{name}: {len(missing)} runs are not finished: {', '.join(missing[:3])}")
        if any("above" not in row for row in results["summary"]):
            parser.error(f"{name}: runs were not counted; give the comparison --threshold")
    before = published(options.out)
    if options.join:
        tasks = {name: joined(before[name], new) if name in before else new for name, new in tasks.items()}
    is_published = options.study.resolve() == options.out.resolve()
    tables = report(dict(sorted((before | tasks).items())))
    publish(tasks, options.out, tables, options.tables, with_results=not is_published)


def _logged(results: Results, strategy: str, prefix: str) -> list[tuple[float, float]]:
    """(step, value) of all finished runs of a strategy, where a step has a number with such a name."""
    return [
        (step["step"], step[name])
        for run in results["runs"]
        if run["strategy"] == strategy and run["status"] == "done"
        for step in run["steps"]
        for name in step
        if name.startswith(prefix)
    ]


def _difference(difference: Mapping[str, Any] | None) -> str:
    if difference is None:
        return "–"
    text = in_words(difference, "+.3f")
    if difference["p"] is not None:
        text += f", p {difference['p']:.2g} ({difference.get('p_corrected', difference['p']):.2g})"
    return text


if __name__ == "__main__":
    main()
