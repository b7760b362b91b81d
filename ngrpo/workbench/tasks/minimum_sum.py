# SPDX-License-Identifier: Apache-2.0
"""The minimum non-negative sum of CoT2 (arXiv 2505.23648): ``--task minimum_sum``, made for ``--model sandbox``.

The problem is in `sandbox.signed_sums`. This file is also the value of OpenRLHF's ``--reward.remote_url``:
OpenRLHF loads it by path and calls :func:`reward_func`. Keep it free of relative imports and of work at import.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ngrpo.machine.upstream.openrlhf_flags import Default
from ngrpo.workbench.sandbox import signed_sums
from ngrpo.workbench.scoring.answers import last_number
from ngrpo.workbench.tasks import rewards, write

TRAIN_ROWS = 4096
EVAL_ROWS = 256


def prepare(folder: Path) -> dict[str, Default]:
    """Writes the training and the held-out problems, the same on every machine.

    Args:
        folder: where ``train.jsonl`` and ``eval.jsonl`` go; made if missing.

    Returns:
        OpenRLHF's flags for the task (None: a switch).
    """
    train, held_out = problems()
    return write(folder, Path(__file__), train, held_out)


def problems(rows: int = TRAIN_ROWS) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out rows with the columns ``input`` and ``label``; no question is in both."""
    chance = random.Random(0)
    by_text: dict[str, dict[str, str]] = {}
    while len(by_text) < rows + EVAL_ROWS:
        numbers = signed_sums.problem(chance)
        text = signed_sums.question(numbers)
        by_text.setdefault(text, {"input": text, "label": str(signed_sums.solution(numbers))})
    every = list(by_text.values())
    return every[EVAL_ROWS:], every[:EVAL_ROWS]


def score(answer: str, label: str) -> float:
    """1 where the last number of an answer is the label, else 0."""
    return float(last_number(answer) == label)


def final_answer(answer: str) -> str | None:
    """The last number of an answer, which is what :func:`score` reads; None where there is none."""
    return last_number(answer)


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: object) -> dict[str, Any]:
    """OpenRLHF's reward function (0.11.2, ``utils/agent.py``).

    Args:
        queries: prompt and answer, decoded with special tokens.
        prompts: the prompts alone, chat template applied.
        labels: the sums.

    Returns:
        ``rewards`` and ``scores``, (N,) float32 in {0, 1}, and in ``extra_logs`` whether a number was named.
    """
    return rewards(
        queries, prompts, labels, lambda a, b: (score(a, b), final_answer(a) is not None), "answers_with_number"
    )
