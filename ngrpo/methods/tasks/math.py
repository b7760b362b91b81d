# SPDX-License-Identifier: Apache-2.0
"""The user's own math problems, rewarded by math-verify: ``--task math:FILE``.

FILE is anything that `ngrpo eval --data` reads: verl's parquet, `input`/`label` JSONL, question and answer columns.
"""

import sys
from functools import partial
from typing import Any

from ngrpo.methods.scoring.answers import check_math, last_statement
from ngrpo.methods.scoring.problems import load_problems
from ngrpo.methods.tasks import reward_function

ARGUMENT = ":FILE"
EXAMPLE = "such as --task math:problems.parquet"


def check(source: str) -> None:
    """Raises ``UsageError`` unless the source holds problems with answers."""
    load_problems(source, scorer="math", skip_unanswered=True)


def problems(source: str) -> tuple[list[dict[str, Any]], None]:
    """Training rows of a file or hub dataset; none are held out (give ``--eval.dataset``).

    Problems without an answer are left out, and their number is printed: MATH's training set has two.
    """
    report = partial(print, "ngrpo:", file=sys.stderr)
    loaded = load_problems(source, scorer="math", skip_unanswered=True, report=report)
    rows = []
    for problem in loaded:
        rows.append({"input": list(problem.messages), "label": problem.answer, **problem.template})
    return rows, None


def score(answer: str, label: str) -> float:
    """1 where math-verify finds the answer equal to the label, else 0."""
    reward, _ = _judge(answer, label)
    return reward


def _judge(answer: str, label: str) -> tuple[float, bool]:
    verdict = check_math(label, answer)
    return verdict.reward, verdict.parsed


final_answer = last_statement
reward_func = reward_function(_judge, "answers_found")
