# SPDX-License-Identifier: Apache-2.0
"""Digit sums with a shortcut on which plain GRPO settles: ``--task shortcut``, for the sandbox.

There are two ways to respond: by the shortcut, or by counting, which plain GRPO seldom tries. The log has the share of
responses that count.
"""

import random
from typing import NamedTuple

from ngrpo.machine.models import sandbox
from ngrpo.methods.scoring.answers import last_number
from ngrpo.methods.tasks import Rows, Split, distinct_rows, number_score, reward_function
from perturbations.errors import UsageError, nearest

ARGUMENT = "[:FORM]"


class Form(NamedTuple):
    """A form of the task."""

    late: bool
    """Whether the way is chosen after words without meaning, and not at the response's first token."""
    easy: float
    """The share of easy problems; without these plain GRPO learns the task."""


FORMS = {
    "first": Form(late=False, easy=0.5),
    "late": Form(late=True, easy=0.6),
    "first-plain": Form(late=False, easy=0.0),
    "late-plain": Form(late=True, easy=0.0),
}
TRAIN_ROWS = 4096
EVAL_ROWS = 256
# Training and held-out problems come from different seeds of one generator; problems of both are dropped.
_TRAIN_SEED = 1
_EVAL_SEED = 0


def check(form: str) -> None:
    """Raises ``UsageError`` for an unknown form."""
    if form not in FORMS:
        raise UsageError(
            f"task shortcut:{form}: unknown FORM {form!r}.{nearest(form, FORMS)} Available: {', '.join(FORMS)}."
        )


def problems(form: str = "first", rows: int = TRAIN_ROWS) -> Split:
    """Training and held-out rows of a form, the same on every machine; no question is in both."""
    held_out = _rows(form, EVAL_ROWS, random.Random(_EVAL_SEED))
    held_out_texts = {row["input"] for row in held_out}
    candidates = _rows(form, rows + len(held_out), random.Random(_TRAIN_SEED))
    train = [row for row in candidates if row["input"] not in held_out_texts]
    return train[:rows], held_out


def _rows(name: str, count: int, chance: random.Random) -> Rows:
    """Rows of a form, by its name, with different questions."""
    form = FORMS[name]

    def draw() -> tuple[str, str]:
        digits = sandbox.digit_problem(chance, easy=chance.random() < form.easy)
        return sandbox.digit_question(digits, form.late), str(sum(digits) % 10)

    return distinct_rows(draw, count)


score = number_score
final_answer = last_number


def _judge(answer: str, label: str) -> tuple[float, bool]:
    counts = sandbox.COUNT in answer.split()
    return score(answer, label), counts


reward_func = reward_function(_judge, "task/counted")
