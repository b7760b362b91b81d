# SPDX-License-Identifier: Apache-2.0
"""A number from 0 to 99 with a graded reward of two peaks: ``--task two_peaks``, made for ``--model sandbox``.

A bandit of 100 arms: the model starts near the lower peak (`sandbox.peaks`). This file is also the value
of OpenRLHF's ``--reward.remote_url``: OpenRLHF loads it by path and calls :func:`reward_func`. Keep it free of relative
imports and of work at import.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ngrpo.machine.upstream.openrlhf_flags import Default
from ngrpo.workbench.sandbox import peaks
from ngrpo.workbench.scoring.answers import last_number
from ngrpo.workbench.tasks import rewards, write

TRAIN_ROWS = 4096
EVAL_ROWS = 16
# The least reward of an answer that an evaluation counts as right: the lower peak has 0.6, and its slopes less.
RIGHT_FROM = 0.8


def prepare(folder: Path) -> dict[str, Default]:
    """Writes one question many times: there is only one, in training and in evaluation.

    Args:
        folder: where ``train.jsonl`` and ``eval.jsonl`` go; made if missing.

    Returns:
        OpenRLHF's flags for the task (None: a switch).
    """
    train, held_out = problems()
    return write(folder, Path(__file__), train, held_out)


def problems(rows: int = TRAIN_ROWS) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and evaluation rows with the columns ``input`` and ``label``; the label is the best number."""
    row = {"input": peaks.QUESTION, "label": str(peaks.HIGH)}
    return [dict(row) for _ in range(rows)], [dict(row) for _ in range(EVAL_ROWS)]


def score(answer: str, label: str) -> float:
    """The reward of the last number in an answer, in [0, 1]; 0 where there is none from 0 to 99."""
    number = final_answer(answer)
    return 0.0 if number is None else peaks.reward(int(number))


def final_answer(answer: str) -> str | None:
    """The last number of an answer where it is a whole one from 0 to 99."""
    number = last_number(answer)
    return number if number is not None and number.isdecimal() and int(number) in peaks.NUMBERS else None


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: object) -> dict[str, Any]:
    """OpenRLHF's reward function (0.11.2, ``utils/agent.py``).

    Args:
        queries: prompt and answer, decoded with special tokens.
        prompts: the prompts alone, chat template applied.
        labels: not read.

    Returns:
        ``rewards`` and ``scores``, (N,) float32 in [0, 1], and in ``extra_logs`` whether the number lies nearer to the
        higher peak than to the lower one.
    """

    def high(answer: str) -> bool:
        number = final_answer(answer)
        return number is not None and int(number) < (peaks.HIGH + peaks.LOW) / 2

    return rewards(queries, prompts, labels, lambda a, b: (score(a, b), high(a)), "task/near_high_peak")
