# SPDX-License-Identifier: Apache-2.0
"""Digit sums with a shortcut on which plain GRPO settles: ``--task shortcut``, for the sandbox.

``ngrpo/workbench/sandbox.py`` has the problem and its two ways. The log has the fraction of responses that count, the
way that plain GRPO seldom tries.
"""

from __future__ import annotations

import random

from ngrpo.workbench import sandbox
from ngrpo.workbench.scoring.answers import last_number
from ngrpo.workbench.tasks import Rows, Split, reward_function
from perturbations.errors import UsageError
from perturbations.options import nearest

ARGUMENT = "FORM"
OPTIONAL = True
EXAMPLE = "such as --task shortcut:late"
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
            f"task shortcut:{form}: unknown {ARGUMENT} {form!r}.{nearest(form, FORMS)} Available: {', '.join(FORMS)}."
        )


def problems(form: str = "first", rows: int = TRAIN_ROWS) -> Split:
    """Training and held-out rows, the same on every machine; no question is in both.

    Args:
        form: a key of :data:`FORMS`.
        rows: training rows.
    """
    held_out = _rows(form, EVAL_ROWS, random.Random(_EVAL_SEED))
    held_out_texts = {row["input"] for row in held_out}
    candidates = _rows(form, rows + len(held_out), random.Random(_TRAIN_SEED))
    return [row for row in candidates if row["input"] not in held_out_texts][:rows], held_out


def _rows(form: str, count: int, chance: random.Random) -> Rows:
    late, easy = FORMS[form]
    by_text: dict[str, dict[str, str]] = {}
    while len(by_text) < count:
        digits = sandbox.digit_problem(chance, easy=chance.random() < easy)
        text = sandbox.digit_question(digits, late)
        by_text[text] = {"input": text, "label": str(sum(digits) % 10)}
    return list(by_text.values())


def score(answer: str, label: str) -> float:
    """1 where the last number of an answer is the label, else 0."""
    return float(last_number(answer) == label)


final_answer = last_number
reward_func = reward_function(lambda a, label: (score(a, label), sandbox.COUNT in a.split()), "task/counted")
