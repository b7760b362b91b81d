# SPDX-License-Identifier: Apache-2.0
"""Procedural problems of reasoning-gym, scored by its own verifiers: ``--task reasoning_gym:chain_sum``.

This file is also the value of OpenRLHF's ``--reward.remote_url``: OpenRLHF loads it by path and calls
:func:`reward_func`. Keep it free of relative imports and of work at import.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ngrpo.machine.upstream.openrlhf_flags import Default
from ngrpo.workbench.scoring.procedural import INSTRUCTION, datasets, label_of, score
from ngrpo.workbench.scoring.procedural import final_answer as final_answer  # a task's
from ngrpo.workbench.tasks import flags, rewards, write
from perturbations.errors import UsageError
from perturbations.options import nearest

ARGUMENT = "DATASET"
EXAMPLE = "such as --task reasoning_gym:chain_sum"
TRAIN_ROWS = 2048
EVAL_ROWS = 64
# The two halves come from different seeds of one generator; what is in both is taken out of the training half.
_TRAIN_SEED, _EVAL_SEED = 1, 0


def check(name: str) -> None:
    """Raises ``UsageError`` unless reasoning-gym is installed and has a dataset of this name."""
    names = sorted(datasets())
    if name not in names:
        raise UsageError(
            f"unknown reasoning-gym dataset {name!r}.{nearest(name, names)} Available: {', '.join(names)}."
        )


def prepare(folder: Path, name: str) -> dict[str, Default]:
    """Writes the training and the held-out problems, the same on every machine.

    Args:
        folder: where ``train.jsonl`` and ``eval.jsonl`` go; made if missing.
        name: a dataset of reasoning-gym.

    Returns:
        OpenRLHF's flags for the task (None: a switch).

    Raises:
        UsageError: for an unknown dataset, or one that cannot be generated with its defaults.
    """
    check(name)
    folder.mkdir(parents=True, exist_ok=True)
    # Some generators (of 0.1.25: word_ladder, ransom_note, ...) iterate over sets of strings, whose order changes
    # from process to process unless this variable is set before Python starts.
    done = subprocess.run(
        [sys.executable, "-m", "ngrpo.workbench.tasks.reasoning_gym", name, str(folder)],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"reasoning-gym cannot generate {name!r} with its defaults: {reason}")
    return flags(folder, Path(__file__))


def problems(
    name: str, rows: int = TRAIN_ROWS, held_out: int = EVAL_ROWS
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out rows with the columns ``input`` and ``label``; no question is in both.

    Args:
        name: a dataset of reasoning-gym.
        rows: training rows; fewer where the dataset repeats itself or meets held-out questions.
        held_out: rows for evaluation; fewer where the dataset repeats itself.
    """
    evaluation = _rows(name, _EVAL_SEED, held_out)
    evaluation_texts = {row["input"] for row in evaluation}
    train = [row for row in _rows(name, _TRAIN_SEED, rows) if row["input"] not in evaluation_texts]
    if not train:
        raise UsageError("every training question is also held out")
    return train, evaluation


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: object) -> dict[str, Any]:
    """OpenRLHF's reward function (0.11.2, ``utils/agent.py``).

    Args:
        queries: prompt and answer, decoded with special tokens.
        prompts: the prompts alone, chat template applied.
        labels: from :func:`label_of`.

    Returns:
        ``rewards`` and ``scores``, (N,) float32 in [0, 1], and in ``extra_logs`` whether the tags were there.
    """
    return rewards(queries, prompts, labels, lambda a, b: (score(a, b), "</answer>" in a), "answers_in_tags")


def _rows(name: str, seed: int, size: int) -> list[dict[str, str]]:
    import reasoning_gym

    by_text: dict[str, dict[str, str]] = {}
    for entry in reasoning_gym.create_dataset(name, seed=seed, size=size):
        text = f"{entry['question'].rstrip()}\n{INSTRUCTION}"
        by_text.setdefault(text, {"input": text, "label": label_of(name, entry)})
    return list(by_text.values())


def main(name: str, folder: str) -> None:
    """Writes both files; a process of its own, see :func:`prepare`."""
    write(Path(folder), Path(__file__), *problems(name))


if __name__ == "__main__":
    main(*sys.argv[1:])
