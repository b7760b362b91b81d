# SPDX-License-Identifier: Apache-2.0
"""Paths in a star, never found by chance, so without rewards: ``--task star_graph``, for the sandbox."""

import random
import re

from ngrpo.machine.models import sandbox
from ngrpo.methods.scoring.answers import numbers
from ngrpo.methods.tasks import Split, reward_function

TRAIN_ROWS = 4096
EVAL_ROWS = 64
_SPECIAL = re.compile(r"<\|[^|<>]*\|>")


def problems(rows: int = TRAIN_ROWS) -> Split:
    """Training and held-out rows, the same on every machine; the label is the path after the center."""
    chance = random.Random(0)
    all_rows = []
    for _ in range(rows + EVAL_ROWS):
        edges, path = sandbox.path_problem(chance)
        path_after_center = " ".join(str(node) for node in path[1:])
        all_rows.append({"input": sandbox.path_question(edges, path), "label": path_after_center})
    return all_rows[EVAL_ROWS:], all_rows[:EVAL_ROWS]


def score(answer: str, label: str) -> float:
    """1 where a response's numbers are the whole path after the center, else 0, also for a part of the path."""
    return float(final_answer(answer) == label)


def final_answer(answer: str) -> str | None:
    """The numbers of a response, joined by spaces; None where there are none."""
    return " ".join(numbers(_SPECIAL.sub("", answer))) or None


def _judge(answer: str, label: str) -> tuple[float, bool]:
    has_number = final_answer(answer) is not None
    return score(answer, label), has_number


reward_func = reward_function(_judge, "answers_with_number")
