# SPDX-License-Identifier: Apache-2.0
"""Paths in a star, never found by chance: ``--task star_graph``, the negative control, made for ``--model sandbox``.

The problem is in `sandbox.star_graphs`. This file is also the value of OpenRLHF's ``--reward.remote_url``:
OpenRLHF loads it by path and calls :func:`reward_func`. Keep it free of relative imports and of work at import.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ngrpo.machine.upstream.openrlhf_flags import Default
from ngrpo.workbench.sandbox import star_graphs
from ngrpo.workbench.scoring.answers import numbers
from ngrpo.workbench.tasks import rewards, write

TRAIN_ROWS = 4096
EVAL_ROWS = 64
_SPECIAL = re.compile(r"<\|[^|<>]*\|>")


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
    """Training and held-out rows with the columns ``input`` and ``label``, the label the path after the center."""
    chance = random.Random(0)
    every = []
    for _ in range(rows + EVAL_ROWS):
        edges, path = star_graphs.problem(chance)
        every.append({"input": star_graphs.question(edges, path), "label": star_graphs.solution(path)})
    return every[EVAL_ROWS:], every[:EVAL_ROWS]


def score(answer: str, label: str) -> float:
    """1 where an answer's numbers are the whole path after the center, else 0: a part of it is nothing."""
    return float(final_answer(answer) == label)


def final_answer(answer: str) -> str | None:
    """The numbers of an answer, joined by spaces; None where there are none."""
    return " ".join(numbers(_SPECIAL.sub("", answer))) or None


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: object) -> dict[str, Any]:
    """OpenRLHF's reward function (0.11.2, ``utils/agent.py``).

    Args:
        queries: prompt and answer, decoded with special tokens.
        prompts: the prompts alone, chat template applied.
        labels: the paths.

    Returns:
        ``rewards`` and ``scores``, (N,) float32 in {0, 1}, and in ``extra_logs`` whether a number was named.
    """
    return rewards(
        queries, prompts, labels, lambda a, b: (score(a, b), final_answer(a) is not None), "answers_with_number"
    )
