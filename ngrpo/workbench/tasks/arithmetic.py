# SPDX-License-Identifier: Apache-2.0
"""Sums of small numbers: a task that a 135M model learns within minutes on a CPU.

This file is also the value of OpenRLHF's ``--reward.remote_url``: OpenRLHF loads it by path and calls
:func:`reward_func`. Keep it free of relative imports and of work at import.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ngrpo.machine.upstream.openrlhf_flags import Default
from ngrpo.workbench.scoring.answers import last_number
from ngrpo.workbench.tasks import rewards, write

# Of nine wordings the one with the most right answers at the start: 0.16 at temperature 1 and 12 new tokens
# (SmolLM2-135M-Instruct, 128 samples); the others lay between 0.00 and 0.12.
QUESTION = "What is {a} + {b}? Answer briefly."
SUMMANDS = range(2, 10)
TRAIN_ROWS = 4096
EVAL_ROWS = 16


def prepare(folder: Path) -> dict[str, Default]:
    """Writes the training and the held-out problems.

    Args:
        folder: where ``train.jsonl`` and ``eval.jsonl`` go; made if missing.

    Returns:
        OpenRLHF's flags for the task (None: a switch).
    """
    train, held_out = problems()
    return write(folder, Path(__file__), train, held_out)


def problems(rows: int = TRAIN_ROWS) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Sums of two numbers, the same on every machine.

    Args:
        rows: training rows; each pass over all pairs is shuffled anew, so any prefix is balanced.

    Returns:
        Training rows, and one evaluation row for each ordered pair that is held out (3 + 5 is not 5 + 3), with the
        columns ``input`` and ``label``.
    """
    pairs = list(itertools.product(SUMMANDS, SUMMANDS))
    chance = random.Random(0)
    chance.shuffle(pairs)
    held_out, train = pairs[:EVAL_ROWS], pairs[EVAL_ROWS:]
    order: list[tuple[int, int]] = []
    while len(order) < rows:
        chance.shuffle(train)
        order += train
    return [_row(*pair) for pair in order[:rows]], [_row(*pair) for pair in held_out]


def _row(a: int, b: int) -> dict[str, str]:
    return {"input": QUESTION.format(a=a, b=b), "label": str(a + b)}


def score(answer: str, label: str) -> float:
    """1 where the last number of an answer is the label, else 0; no credit for the form.

    The last, because an answer like ``7 + 5 = 12`` repeats the question first. A number that the length
    limit cut is wrong.
    """
    own = final_answer(answer)
    return float(own is not None and own == final_answer(label))


def final_answer(answer: str) -> str | None:
    """The last number of an answer, which is what :func:`score` reads; None where there is none."""
    return last_number(answer)


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: object) -> dict[str, Any]:
    """OpenRLHF's reward function (0.11.2, ``utils/agent.py``).

    Args:
        queries: prompt and answer, decoded with special tokens; OpenRLHF sends one at a time.
        prompts: the prompts alone, chat template applied.
        labels: the sums.

    Returns:
        ``rewards`` and ``scores``, (N,) float32 in {0, 1}, and in ``extra_logs`` whether a number was named.
    """
    return rewards(
        queries, prompts, labels, lambda a, b: (score(a, b), final_answer(a) is not None), "answers_with_number"
    )
