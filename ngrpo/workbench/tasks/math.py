# SPDX-License-Identifier: Apache-2.0
"""The user's own math problems, rewarded by math-verify: ``--task math:FILE``.

FILE is anything that `ngrpo eval --data` reads: verl's parquet, `input`/`label` JSONL, question and answer columns.
This file is also the value of OpenRLHF's ``--reward.remote_url``: OpenRLHF loads it by path and calls
:func:`reward_func`. Keep it free of relative imports and of work at import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ngrpo.machine.upstream.openrlhf_flags import Default
from ngrpo.workbench.scoring import math_answers
from ngrpo.workbench.scoring.answers import last_statement
from ngrpo.workbench.scoring.problems import load_problems
from ngrpo.workbench.tasks import rewards, write

ARGUMENT = "FILE"
EXAMPLE = "such as --task math:problems.parquet"


def check(source: str) -> None:
    """Raises ``UsageError`` unless the source holds problems with answers."""
    _problems(source, report=lambda line: None)


def prepare(folder: Path, source: str) -> dict[str, Default]:
    """Writes the training problems. There are no held-out ones: give ``--eval.dataset`` for these.

    Problems without an answer are left out, and their number is printed: MATH's training set has two.

    Args:
        folder: where ``train.jsonl`` goes; made if missing.
        source: a file or hub dataset.

    Returns:
        OpenRLHF's flags for the task (None: a switch).

    Raises:
        UsageError: as :func:`ngrpo.workbench.evaluate.load_problems`.
    """
    rows = [{"input": list(p.messages), "label": p.answer} for p in _problems(source, report=_say)]
    return write(folder, Path(__file__), rows)


def score(answer: str, label: str) -> float:
    """1 where math-verify finds the answer equal to the label, else 0."""
    return _judge(answer, label)[0]


def final_answer(answer: str) -> str | None:
    """The answer's final statement, for counting distinct ones."""
    return last_statement(answer)


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: object) -> dict[str, Any]:
    """OpenRLHF's reward function (0.11.2, ``utils/agent.py``).

    Args:
        queries: prompt and answer, decoded with special tokens.
        prompts: the prompts alone, chat template applied.
        labels: the reference answers.

    Returns:
        ``rewards`` and ``scores``, (N,) float32 in {0, 1}, and in ``extra_logs`` whether an answer was found.
    """
    return rewards(queries, prompts, labels, _judge, "answers_found")


def _judge(answer: str, label: str) -> tuple[float, bool]:
    verdict = math_answers.check(label, answer)
    return verdict.reward, verdict.parsed


def _problems(source: str, report: Callable[[str], None]) -> list[Any]:
    return load_problems(source, scorer="math", skip_unanswered=True, report=report)


def _say(line: str) -> None:
    print(f"ngrpo: {line}", file=sys.stderr)
