# SPDX-License-Identifier: Apache-2.0
"""Sums of small numbers: a task that a 135M model learns within minutes on a CPU."""

import itertools
import random

from ngrpo.methods.scoring.answers import last_number
from ngrpo.methods.tasks import Split, number_reward, number_score

# Of nine wordings the one with the most right responses at the start: 0.16 at temperature 1 and 12 new tokens
# (SmolLM2-135M-Instruct, 128 samples); the others lay between 0.00 and 0.12.
QUESTION = "What is {a} + {b}? Answer briefly."
SUMMANDS = range(2, 10)
TRAIN_ROWS = 4096
EVAL_ROWS = 16


def problems(rows: int = TRAIN_ROWS) -> Split:
    """Training rows, and one row for each ordered pair that is held out; the same on every machine.

    Each pass over all pairs is shuffled again, so any prefix of the training rows is balanced.
    """
    pairs = list(itertools.product(SUMMANDS, SUMMANDS))
    chance = random.Random(0)
    chance.shuffle(pairs)
    held_out_pairs = pairs[:EVAL_ROWS]
    train_pairs = pairs[EVAL_ROWS:]
    order: list[tuple[int, int]] = []
    while len(order) < rows:
        chance.shuffle(train_pairs)
        order += train_pairs
    train = [_row(a, b) for a, b in order[:rows]]
    held_out = [_row(a, b) for a, b in held_out_pairs]
    return train, held_out


def _row(a: int, b: int) -> dict[str, str]:
    return {"input": QUESTION.format(a=a, b=b), "label": str(a + b)}


score = number_score
final_answer = last_number
reward_func = number_reward
