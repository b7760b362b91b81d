# SPDX-License-Identifier: Apache-2.0
"""The minimum non-negative sum of CoT2 (Gozeten et al., arXiv 2505.23648): ``--task minimum_sum``, for the sandbox.

Each of four numbers gets a sign; their sum should be as small as possible without being negative.
"""

from __future__ import annotations

import itertools
import random

from ngrpo.workbench import sandbox
from ngrpo.workbench.scoring.answers import last_number
from ngrpo.workbench.tasks import Split, reward_function

TRAIN_ROWS = 4096
EVAL_ROWS = 256


def problems(rows: int = TRAIN_ROWS) -> Split:
    """Training and held-out rows, the same on every machine; no question is in both."""
    chance = random.Random(0)
    by_text: dict[str, dict[str, str]] = {}
    while len(by_text) < rows + EVAL_ROWS:
        numbers = sandbox.sign_problem(chance)
        text = sandbox.sign_question(numbers)
        by_text[text] = {"input": text, "label": str(solution(numbers))}
    every = list(by_text.values())
    return every[EVAL_ROWS:], every[:EVAL_ROWS]


def solution(numbers: list[int]) -> int:
    """The smallest sum of the numbers with signs that is not negative."""
    signed = itertools.product(*((number, -number) for number in numbers))
    return min(total for total in map(sum, signed) if total >= 0)


def score(answer: str, label: str) -> float:
    """1 where the last number of an answer is the label, else 0."""
    return float(last_number(answer) == label)


final_answer = last_number
reward_func = reward_function(lambda a, label: (score(a, label), last_number(a) is not None), "answers_with_number")
