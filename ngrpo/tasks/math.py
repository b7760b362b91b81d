"""The user's own math problems, rewarded by math-verify: ``--task math:FILE``.

FILE is anything that `ngrpo eval --data` reads: verl's parquet, `input`/`label` JSONL, question and answer columns.
This file is also the value of OpenRLHF's ``--reward.remote_url``: OpenRLHF loads it by path and calls
:func:`reward_func`. Keep it free of relative imports and of work at import.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ARGUMENT = "FILE"
EXAMPLE = "such as --task math:problems.parquet"


def check(source: str) -> None:
    """Raises ``ValueError`` unless the source holds problems with answers."""
    _problems(source, report=lambda line: None)


def prepare(folder: Path, source: str) -> dict[str, str | None]:
    """Writes the training problems. There are no held-out ones: give ``--eval.dataset`` for these.

    Problems without an answer are left out, and their number is printed: MATH's training set has two.

    Args:
        folder: where ``train.jsonl`` goes; made if missing.
        source: a file or hub dataset.

    Returns:
        OpenRLHF's flags for the task (None: a switch).

    Raises:
        ValueError: as :func:`ngrpo.evaluate.load_problems`.
    """
    rows = [{"input": list(p.messages), "label": p.answer} for p in _problems(source, report=_say)]
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(lines, encoding="utf-8")
    return {
        "--data.prompt_dataset": str(folder / "train.jsonl"),
        "--data.input_key": "input",
        "--data.label_key": "label",
        "--data.apply_chat_template": None,
        "--reward.remote_url": str(Path(__file__).resolve()),
    }


def score(answer: str, label: str) -> float:
    """1 where math-verify finds the answer equal to the label, else 0."""
    from ngrpo.evaluate.math_answers import check as compare

    return compare(label, answer).reward


def final_answer(answer: str) -> str | None:
    """The answer's final statement, for counting distinct ones."""
    from ngrpo.evaluate.final_answer import last_statement

    return last_statement(answer)


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: Any) -> dict[str, Any]:
    """OpenRLHF's reward function (0.11.2, ``utils/agent.py``).

    Args:
        queries: prompt and answer, decoded with special tokens.
        prompts: the prompts alone, chat template applied.
        labels: the reference answers.

    Returns:
        ``rewards`` and ``scores``, (N,) float32 in {0, 1}, and in ``extra_logs`` whether an answer was found.
    """
    import torch

    from ngrpo.evaluate.math_answers import check as compare
    from ngrpo.tasks.arithmetic import answer_of

    answers = [answer_of(query, prompt) for query, prompt in zip(queries, prompts)]
    verdicts = [compare(label, answer) for answer, label in zip(answers, labels)]
    rewards = torch.tensor([verdict.reward for verdict in verdicts])
    parsed = torch.tensor([float(verdict.parsed) for verdict in verdicts])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"answers_found": parsed}}


def _problems(source: str, report: Callable[[str], None]) -> list[Any]:
    from ngrpo.evaluate import load_problems

    return load_problems(source, scorer="math", skip_unanswered=True, report=report)


def _say(line: str) -> None:
    print(f"ngrpo: {line}", file=sys.stderr)
