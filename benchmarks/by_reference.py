# SPDX-License-Identifier: Apache-2.0
"""Splits the scores of a comparison by the problems' references: does a run solve the task, or repeat one answer?

    python examples/study/problems.py gcd runs/problems 32
    python -m benchmarks.by_reference docs/results/study3 gcd runs/problems/gcd-eval.jsonl

Where one reference is common, a model that gives it to every question has its share as a score. The problem file is
the one that the comparison evaluated: its rows are in the order of the results' problems.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command_line import parser_of
from benchmarks.markdown import table_lines
from benchmarks.publishing import comparisons
from ngrpo.machine.storage.datafiles import read_rows
from ngrpo.workbench.statistics import mean_at_n


def report(results: Mapping[str, Any], references: Sequence[str], most: int) -> str:
    """The tables for a results.json: of the commonest references, and of each run's Mean@n on them and on the rest.

    Raises:
        ValueError: where the results have another number of problems than there are ``references``.
    """
    counts = Counter(references).most_common(most)
    common = [reference for reference, _ in counts]
    evaluated = [("untrained", results["untrained"])]
    evaluated += [(run["id"], run["evaluation"]) for run in results["runs"] if run["evaluation"]]
    lines = []
    for name, evaluation in evaluated:
        problems = evaluation["problems"]
        if len(problems) != len(references):
            raise ValueError(f"{name} was evaluated on {len(problems)} problems; the file has {len(references)}.")
        scores = np.array([mean_at_n(problem["n"], problem["correct"]) for problem in problems])
        cells = []
        for reference in common:
            cells.append(scores[[reference == other for other in references]].mean())
        cells.append(scores[[reference not in common for reference in references]].mean())
        lines.append([name, *(f"{cell:.3f}" for cell in (*cells, scores.mean()))])
    constant = [[reference, str(count), f"{count / len(references):.3f}"] for reference, count in counts]
    head = ["run", *(f"reference {reference}" for reference in common), "the rest", "all"]
    always = table_lines(["reference", "problems", "score of this answer to every question"], constant)
    return "\n".join([*always, "", *table_lines(head, lines)])


def main() -> None:
    """Reads both files and prints the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("study", type=Path, help="a folder of comparisons, or of published ones")
    parser.add_argument("task", help="the comparison's folder in it")
    parser.add_argument("problems", help="the evaluated problems, a file with a column `label`")
    parser.add_argument("--most", type=int, default=3, help="columns for so many of the commonest references [3]")
    options = parser.parse_args()
    by_task = comparisons(parser, options.study, "`ngrpo compare`")
    if options.task not in by_task:
        parser.error(f"{options.study} has no comparison {options.task!r}; there are {sorted(by_task)}")
    references = [str(row["label"]) for row in read_rows("problems", options.problems)]
    try:
        print(report(by_task[options.task], references, options.most))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
