# SPDX-License-Identifier: Apache-2.0
"""Procedural problems of reasoning-gym, scored by its own verifiers: ``--task reasoning_gym:chain_sum``.

This file is also the value of OpenRLHF's ``--reward.remote_url``: OpenRLHF loads it by path and calls
:func:`reward_func`. Keep it free of relative imports and of work at import.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ngrpo.answers import last_boxed, visible
from ngrpo.openrlhf_flags import Default
from ngrpo.tasks import flags, rewards, write
from perturbations.errors import UsageError
from perturbations.options import nearest

ARGUMENT = "DATASET"
EXAMPLE = "such as --task reasoning_gym:chain_sum"
INSTRUCTION = "Put the final answer alone between <answer> and </answer>."
TRAIN_ROWS = 2048
EVAL_ROWS = 64
# The two halves come from different seeds of one generator; what is in both is taken out of the training half.
_TRAIN_SEED, _EVAL_SEED = 1, 0

_TAGGED = re.compile(r"<answer>\s*(.*?)\s*(?:</answer>|$)", re.DOTALL)
_SPECIAL = re.compile(r"<\|[^|<>]*\|>|</s>")


def check(name: str) -> None:
    """Raises ``UsageError`` unless reasoning-gym is installed and has a dataset of this name."""
    known = sorted(_datasets())
    if name not in known:
        raise UsageError(
            f"unknown reasoning-gym dataset {name!r}.{nearest(name, known)} Available: {', '.join(known)}."
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
        [sys.executable, "-m", "ngrpo.tasks.reasoning_gym", name, str(folder)],
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
    kept = {row["input"] for row in evaluation}
    train = [row for row in _rows(name, _TRAIN_SEED, rows) if row["input"] not in kept]
    if not train:
        raise UsageError("every training question is also held out")
    return train, evaluation


def label_of(name: str, entry: dict[str, Any]) -> str:
    """What a scorer needs, as text: OpenRLHF hands a reward function the label alone."""
    return json.dumps({"dataset": name, "entry": _pack(entry)}, ensure_ascii=False, default=str)


def score(answer: str, label: str) -> float:
    """reasoning-gym's own score of an answer, in [0, 1]; 0 where its scorer fails on what the model wrote.

    Args:
        answer: the generated text; what stands in the last ``<answer>`` tags (else boxed, else all) is scored.
        label: from :func:`label_of`.
    """
    wanted = json.loads(label)
    try:
        value = _scorer(wanted["dataset"])(final_answer(answer) or "", _unpack(wanted["entry"]))
    except Exception:  # scorers parse what a model wrote, and not all of them expect everything
        return 0.0
    return min(1.0, max(0.0, float(value)))


def final_answer(answer: str) -> str | None:
    """The text between the last answer tags; else the last ``\\boxed{}``; else all that was said."""
    answer = _SPECIAL.sub("", visible(answer))
    tagged = _TAGGED.findall(answer)
    return (tagged[-1] if tagged else last_boxed(answer) or answer).strip() or None


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: Any) -> dict[str, Any]:
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

    seen: dict[str, dict[str, str]] = {}
    for entry in reasoning_gym.create_dataset(name, seed=seed, size=size):
        text = f"{entry['question'].rstrip()}\n{INSTRUCTION}"
        seen.setdefault(text, {"input": text, "label": label_of(name, entry)})
    return list(seen.values())


def _datasets() -> dict[str, Any]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UsageError("the package reasoning-gym is not installed. Run: pip install reasoning-gym") from None
    return DATASETS


@lru_cache(maxsize=8)
def _scorer(name: str) -> Any:
    import reasoning_gym

    check(name)
    return reasoning_gym.get_score_answer_fn(name)


def _pack(value: Any) -> Any:
    """A value as JSON that :func:`_unpack` gives back as it was: JSON has no tuples, and only text as keys."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not value.keys() & {"#tuple", "#items"}:
            return {key: _pack(item) for key, item in value.items()}
        return {"#items": [[_pack(key), _pack(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"#tuple": [_pack(item) for item in value]}
    return [_pack(item) for item in value] if isinstance(value, list) else value


def _unpack(value: Any) -> Any:
    if isinstance(value, dict):
        if "#tuple" in value:
            return tuple(_unpack(item) for item in value["#tuple"])
        if "#items" in value:
            return {_unpack(key): _unpack(item) for key, item in value["#items"]}
        return {key: _unpack(item) for key, item in value.items()}
    return [_unpack(item) for item in value] if isinstance(value, list) else value


def main(name: str, folder: str) -> None:
    """Writes both files; a process of its own, see :func:`prepare`."""
    write(Path(folder), Path(__file__), *problems(name))


if __name__ == "__main__":
    main(*sys.argv[1:])
