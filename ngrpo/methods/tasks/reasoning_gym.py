# SPDX-License-Identifier: Apache-2.0
"""Procedural problems of reasoning-gym with its own scores: ``--task reasoning_gym:chain_sum``."""

import json
import os
import re
import subprocess
import sys
from functools import lru_cache
from typing import Any

from ngrpo.methods.scoring.answers import last_boxed, visible
from ngrpo.methods.tasks import Split, reward_function
from perturbations.errors import UsageError, nearest

ARGUMENT = ":DATASET"
EXAMPLE = "such as --task reasoning_gym:chain_sum"
INSTRUCTION = "Put the final answer alone between <answer> and </answer>."
TRAIN_ROWS = 2048
EVAL_ROWS = 64
# The two halves come from different seeds of one generator; common questions are removed from the training half.
_TRAIN_SEED, _EVAL_SEED = 1, 0
_TAGGED = re.compile(r"<answer>\s*(.*?)\s*(?:</answer>|$)", re.DOTALL)
_SPECIAL = re.compile(r"<\|[^|<>]*\|>|</s>")


def check(name: str) -> None:
    """Raises ``UsageError`` unless reasoning-gym is installed and has a dataset of this name."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UsageError("the package reasoning-gym is not installed. Run: pip install reasoning-gym") from None
    if name not in DATASETS:
        names = sorted(DATASETS)
        raise UsageError(
            f"unknown reasoning-gym dataset {name!r}.{nearest(name, names)} Available: {', '.join(names)}."
        )


def problems(name: str) -> Split:
    """Training and held-out rows, the same on every machine; UsageError where the defaults generate none."""
    # Some generators (of 0.1.25: word_ladder, ransom_note, ...) iterate over sets of strings; their order changes
    # from process to process unless this variable is set before Python starts.
    done = subprocess.run(
        [sys.executable, "-m", "ngrpo.methods.tasks.reasoning_gym", name],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"reasoning-gym cannot generate {name!r} with its defaults: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def generate(name: str, rows: int = TRAIN_ROWS, held_out: int = EVAL_ROWS) -> Split:
    """Training and held-out rows, generated in this process; no question is in both, so there may be fewer."""
    import reasoning_gym

    train: dict[str, dict[str, str]] = {}
    evaluation: dict[str, dict[str, str]] = {}
    for half, seed, size in ((train, _TRAIN_SEED, rows), (evaluation, _EVAL_SEED, held_out)):
        for entry in reasoning_gym.create_dataset(name, seed=seed, size=size):
            text = f"{entry['question'].rstrip()}\n{INSTRUCTION}"
            half.setdefault(text, {"input": text, "label": label_of(name, entry)})
    kept = [row for text, row in train.items() if text not in evaluation]
    if not kept:
        raise UsageError("every training question is also held out")
    return kept, list(evaluation.values())


def label_of(name: str, entry: dict[str, Any]) -> str:
    """An entry as text for its scorer, since OpenRLHF hands a reward function the label alone."""
    return json.dumps({"dataset": name, "entry": _pack(entry)}, ensure_ascii=False, default=str)


def score(answer: str, label: str) -> float:
    """reasoning-gym's own score of a response's :func:`final_answer`, in [0, 1]; 0 where its scorer fails."""
    problem = json.loads(label, object_hook=_unpacked)
    scorer = _scorer(problem["dataset"])
    try:
        value = scorer(final_answer(answer) or "", problem["entry"])
    except Exception:  # scorers parse any text, and not all of them expect everything
        return 0.0
    return min(1.0, max(0.0, float(value)))


def final_answer(answer: str) -> str | None:
    """The text between the last answer tags; else the last ``\\boxed{}``; else the whole response."""
    answer = _SPECIAL.sub("", visible(answer))
    tagged = _TAGGED.findall(answer)
    return (tagged[-1] if tagged else last_boxed(answer) or answer).strip() or None


@lru_cache(maxsize=8)
def _scorer(name: str) -> Any:
    check(name)
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(name)


def _pack(value: object) -> Any:
    """A value as JSON that :func:`_unpacked` turns back: JSON has no tuples, and only text as keys."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _pack(item) for key, item in value.items()}
    if isinstance(value, dict):
        return {"#items": [[_pack(key), _pack(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"#tuple": [_pack(item) for item in value]}
    return [_pack(item) for item in value] if isinstance(value, list) else value


def _unpacked(found: dict[str, Any]) -> Any:
    """For each object in JSON, from the inside outwards."""
    if "#tuple" in found:
        return tuple(found["#tuple"])
    return dict(found["#items"]) if "#items" in found else found


reward_func = reward_function(lambda answer, label: (score(answer, label), "</answer>" in answer), "answers_in_tags")

if __name__ == "__main__":
    print(json.dumps(generate(sys.argv[1])))
