# SPDX-License-Identifier: Apache-2.0
"""Sums of small numbers: a task that a 135M model learns within minutes on a CPU."""

from __future__ import annotations

import itertools
import random

from ngrpo.workbench.scoring.answers import last_number
from ngrpo.workbench.tasks import Split, reward_function

# Of nine wordings the one with the most right answers at the start: 0.16 at temperature 1 and 12 new tokens
# (SmolLM2-135M-Instruct, 128 samples); the others lay between 0.00 and 0.12.
QUESTION = "What is {a} + {b}? Answer briefly."
SUMMANDS = range(2, 10)
TRAIN_ROWS = 4096
EVAL_ROWS = 16


def problems(rows: int = TRAIN_ROWS) -> Split:
    """Sums of two numbers, the same on every machine.

    Args:
        rows: training rows; each pass over all pairs is shuffled again, so any prefix is balanced.

    Returns:
        Training rows, and one evaluation row for each ordered pair that is held out (3 + 5 is not 5 + 3).
    """
    pairs = list(itertools.product(SUMMANDS, SUMMANDS))
    chance = random.Random(0)
    chance.shuffle(pairs)
    held_out, train = pairs[:EVAL_ROWS], pairs[EVAL_ROWS:]
    order: list[tuple[int, int]] = []
    while len(order) < rows:
        chance.shuffle(train)
        order += train
    every = [{"input": QUESTION.format(a=a, b=b), "label": str(a + b)} for a, b in held_out + order[:rows]]
    return every[EVAL_ROWS:], every[:EVAL_ROWS]


def score(answer: str, label: str) -> float:
    """1 where the last number of an answer is the label, else 0; no credit for the form.

    The last, because an answer like ``7 + 5 = 12`` repeats the question first. A number that the length
    limit cut is wrong.
    """
    return float(last_number(answer) == label)


final_answer = last_number
reward_func = reward_function(lambda a, label: (score(a, label), last_number(a) is not None), "answers_with_number")
