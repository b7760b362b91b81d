# SPDX-License-Identifier: Apache-2.0
"""Digit sums with a shortcut on which plain GRPO settles: ``--task shortcut``, for the sandbox.

The log has the fraction of responses that count, the way that plain GRPO seldom tries.
"""

import random

from ngrpo.machine.models import sandbox
from ngrpo.methods.scoring.answers import last_number
from ngrpo.methods.tasks import Rows, Split, distinct_rows, number_score, reward_function
from perturbations.errors import UsageError, nearest

ARGUMENT = "[:FORM]"
FORMS = {"first": (False, 0.5), "late": (True, 0.6), "first-plain": (False, 0.0), "late-plain": (True, 0.0)}
"""Whether the way is chosen after words without meaning, and the fraction of easy problems; without these GRPO learns
the task."""
TRAIN_ROWS = 4096
EVAL_ROWS = 256
# Most distinct training and held-out problems come from different seeds of one generator; common ones are dropped.
_TRAIN_SEED, _EVAL_SEED = 1, 0


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
    return [row for row in candidates if row["input"] not in held_out_texts][:rows], held_out


def _rows(form: str, count: int, chance: random.Random) -> Rows:
    late, easy = FORMS[form]

    def draw() -> tuple[str, str]:
        digits = sandbox.digit_problem(chance, easy=chance.random() < easy)
        return sandbox.digit_question(digits, late), str(sum(digits) % 10)

    return distinct_rows(draw, count)


score, final_answer = number_score, last_number
reward_func = reward_function(lambda a, label: (score(a, label), sandbox.COUNT in a.split()), "task/counted")
