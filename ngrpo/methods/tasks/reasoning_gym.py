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
# Training and held-out rows come from different seeds of one generator; questions of both are removed from training.
_TRAIN_SEED = 1
_EVAL_SEED = 0
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
    # Some generators (of 0.1.25: word_ladder, ransom_note, ...) iterate over sets of strings. Their order changes from
    # process to process unless PYTHONHASHSEED is set before Python starts, hence a process of its own.
    result = subprocess.run(
        [sys.executable, "-m", "ngrpo.methods.tasks.reasoning_gym", name],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        reason = lines[-1] if lines else "no message"
        raise UsageError(f"reasoning-gym cannot generate {name!r} with its defaults: {reason}")
    return json.loads(result.stdout.splitlines()[-1])


def generate(name: str, rows: int = TRAIN_ROWS, held_out: int = EVAL_ROWS) -> Split:
    """Training and held-out rows, generated in this process; no question is in both, so there may be fewer."""
    import reasoning_gym

    def distinct_rows(seed: int, size: int) -> dict[str, dict[str, str]]:
        """Rows by their text; of two entries with one question, the first."""
        rows_by_text: dict[str, dict[str, str]] = {}
        for entry in reasoning_gym.create_dataset(name, seed=seed, size=size):
            text = f"{entry['question'].rstrip()}\n{INSTRUCTION}"
            rows_by_text.setdefault(text, {"input": text, "label": label_of(name, entry)})
        return rows_by_text

    train = distinct_rows(_TRAIN_SEED, rows)
    evaluation = distinct_rows(_EVAL_SEED, held_out)
    only_in_training = [row for text, row in train.items() if text not in evaluation]
    if not only_in_training:
        raise UsageError("every training question is also held out")
    return only_in_training, list(evaluation.values())


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
    final = tagged[-1] if tagged else last_boxed(answer) or answer
    return final.strip() or None


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
    if isinstance(value, list):
        return [_pack(item) for item in value]
    return value


def _unpacked(packed: dict[str, Any]) -> Any:
    """The value of a JSON object that :func:`_pack` made; `json` calls it from the innermost object outwards."""
    if "#tuple" in packed:
        return tuple(packed["#tuple"])
    if "#items" in packed:
        return dict(packed["#items"])
    return packed


def _judge(answer: str, label: str) -> tuple[float, bool]:
    has_tags = "</answer>" in answer
    return score(answer, label), has_tags


reward_func = reward_function(_judge, "answers_in_tags")

if __name__ == "__main__":
    print(json.dumps(generate(sys.argv[1])))
