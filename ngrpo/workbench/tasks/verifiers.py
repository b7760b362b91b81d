# SPDX-License-Identifier: Apache-2.0
"""An installed environment of the package verifiers, its rubric as reward: ``--task verifiers:MODULE[:NAME]``.

This file is also the value of OpenRLHF's ``--reward.remote_url``: OpenRLHF loads it by path and calls
:func:`reward_func`. Keep it free of relative imports and of work at import.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ngrpo.machine.upstream.openrlhf_flags import Default
from ngrpo.workbench.environments import Row, Scored, process
from ngrpo.workbench.scoring.answers import generated, last_statement
from ngrpo.workbench.tasks import write
from perturbations.errors import UsageError

ARGUMENT = "MODULE[:NAME]"
EXAMPLE = "such as --task verifiers:my_environment, a package with load_environment() or a Taskset"
LOGGED = "rubric/"
"""Before the name of each of the rubric's functions in the log; ``rubric/failed`` is the share of answers on which one
raised an error, which verifiers counts as 0."""

# What ends a turn is the chat template's and not the answer's.
_ENDS = re.compile(r"(?:\s*(?:<\|[^|<>]*\|>|</s>|<eos>|<end_of_turn>))+\s*\Z")


def check(environment: str) -> None:
    """Raises ``UsageError`` unless verifiers and the environment's module are installed; neither is imported."""
    process.check(environment)


def prepare(folder: Path, environment: str) -> dict[str, Default]:
    """Writes the environment's problems.

    Args:
        folder: where ``train.jsonl`` and ``eval.jsonl`` go; made if missing. What the environment has for evaluation
            is held out, else its last problems, at most 64 and at most one in eight.
        environment: ``MODULE[:NAME]``.

    Returns:
        OpenRLHF's flags for the task (None: a switch).

    Raises:
        UsageError: where it is not installed, cannot be loaded, has no problems for training, or is not served: one
            that takes more than one turn, calls tools, has a sandbox, or compares the answers of a group.
    """
    worker = process.EnvironmentProcess(environment)
    try:
        train, held_out = worker.rows()
    finally:
        worker.close()
    held_out_texts = {json.dumps(row.messages) for row in held_out}
    train = [row for row in train if json.dumps(row.messages) not in held_out_texts]
    if not train:
        raise UsageError(f"--task verifiers:{environment} has no problems for training.")
    return write(
        folder,
        Path(__file__),
        [_written(environment, row) for row in train],
        [_written(environment, row) for row in held_out] or None,
    )


def label_of(environment: str, row: Row) -> str:
    """What scoring needs, as text: OpenRLHF hands a reward function the label alone."""
    return json.dumps({"environment": environment, "row": row.data}, ensure_ascii=False)


def score(answer: str, label: str) -> float:
    """The rubric's reward of an answer.

    Args:
        answer: the generated text; special tokens at its end are taken off.
        label: from :func:`label_of`.

    Raises:
        RuntimeError: where the environment ends in an error.
    """
    return _scored(answer, label).reward


def final_answer(answer: str) -> str | None:
    """What an answer comes to, for counting different ones; the rubric itself reads all of it."""
    return last_statement(_ENDS.sub("", answer))


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: object) -> dict[str, Any]:
    """OpenRLHF's reward function (0.11.2, ``utils/agent.py``).

    Args:
        queries: prompt and answer, decoded with special tokens.
        prompts: the prompts alone, chat template applied.
        labels: from :func:`label_of`.

    Returns:
        ``rewards`` and ``scores``, (N,) float32, and in ``extra_logs`` the rubric's functions, (N,) each.
    """
    import torch

    scores = [_scored(generated(*texts), label) for *texts, label in zip(queries, prompts, labels)]
    rewards = torch.tensor([each.reward for each in scores])
    names = sorted({name for each in scores for name in each.metrics})
    logs = {f"{LOGGED}{name}": torch.tensor([each.metrics.get(name, 0.0) for each in scores]) for name in names}
    failed = torch.tensor([float(each.failed is not None) for each in scores])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {**logs, f"{LOGGED}failed": failed}}


def _scored(answer: str, label: str) -> Scored:
    problem = json.loads(label)
    return process.process_of(problem["environment"]).score(problem["row"], _ENDS.sub("", answer))


def _written(environment: str, row: Row) -> dict[str, Any]:
    return {"input": row.messages, "label": label_of(environment, row)}
