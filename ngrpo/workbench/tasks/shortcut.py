# SPDX-License-Identifier: Apache-2.0
"""Digit sums with a shortcut on which plain GRPO settles: ``--task shortcut``, made for ``--model sandbox``.

The problem and its two ways are in :mod:`ngrpo.workbench.sandbox.digit_sums`. This file is also the value of OpenRLHF's
``--reward.remote_url``: OpenRLHF loads it by path and calls :func:`reward_func`. Keep it free of relative imports and
of work at import.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ngrpo.machine.upstream.openrlhf_flags import Default
from ngrpo.workbench.sandbox import digit_sums
from ngrpo.workbench.scoring.answers import last_number
from ngrpo.workbench.tasks import check_choice, rewards, write

ARGUMENT = "FORM"
OPTIONAL = True
EXAMPLE = "such as --task shortcut:late"
# Form: whether the way is chosen after words without a meaning, and the share of easy problems.
FORMS = {"first": (False, 0.5), "late": (True, 0.6), "first-plain": (False, 0.0), "late-plain": (True, 0.0)}
TRAIN_ROWS = 4096
EVAL_ROWS = 256
# Most distinct training and held-out problems come from different seeds of one generator; what is in both is dropped.
_TRAIN_SEED, _EVAL_SEED = 1, 0


def check(form: str) -> None:
    """Raises ``UsageError`` for an unknown form."""
    check_choice("shortcut", form, FORMS)


def prepare(folder: Path, form: str = "first") -> dict[str, Default]:
    """Writes the training and the held-out problems, the same on every machine.

    Args:
        folder: where ``train.jsonl`` and ``eval.jsonl`` go; made if missing.
        form: a key of :data:`FORMS`. ``first``: the first token of an answer is the choice of the way; ``late``: it
            comes after three words that bear no reward; ``-plain``: the same without easy problems, where GRPO learns.

    Returns:
        OpenRLHF's flags for the task (None: a switch).
    """
    return write(folder, Path(__file__), *problems(form))


def problems(form: str = "first", rows: int = TRAIN_ROWS) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out rows with the columns ``input`` and ``label``; no question is in both."""
    held_out = _rows(form, EVAL_ROWS, random.Random(_EVAL_SEED))
    held_out_texts = {row["input"] for row in held_out}
    candidates = _rows(form, rows + len(held_out), random.Random(_TRAIN_SEED))
    return [row for row in candidates if row["input"] not in held_out_texts][:rows], held_out


def _rows(form: str, count: int, chance: random.Random) -> list[dict[str, str]]:
    late, easy = FORMS[form]
    by_text: dict[str, dict[str, str]] = {}
    while len(by_text) < count:
        digits = digit_sums.problem(chance, easy=chance.random() < easy)
        text = digit_sums.question(digits, late)
        by_text.setdefault(text, {"input": text, "label": str(digit_sums.solution(digits))})
    return list(by_text.values())


def score(answer: str, label: str) -> float:
    """1 where the last number of an answer is the label, else 0."""
    return float(last_number(answer) == label)


def final_answer(answer: str) -> str | None:
    """The last number of an answer, which is what :func:`score` reads; None where there is none."""
    return last_number(answer)


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: object) -> dict[str, Any]:
    """OpenRLHF's reward function (0.11.2, ``utils/agent.py``).

    Args:
        queries: prompt and answer, decoded with special tokens; OpenRLHF sends one at a time.
        prompts: the prompts alone, chat template applied.
        labels: the sums modulo 10.

    Returns:
        ``rewards`` and ``scores``, (N,) float32 in {0, 1}, and in ``extra_logs`` whether the answer counted, which is
        the way that plain GRPO seldom tries.
    """
    return rewards(queries, prompts, labels, lambda a, b: (score(a, b), digit_sums.COUNT in a.split()), "task/counted")
