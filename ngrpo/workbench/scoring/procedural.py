# SPDX-License-Identifier: Apache-2.0
"""Answers to problems of reasoning-gym, scored by its own verifiers."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from ngrpo.workbench.scoring.answers import last_boxed, visible
from perturbations.errors import UsageError

INSTRUCTION = "Put the final answer alone between <answer> and </answer>."

_TAGGED = re.compile(r"<answer>\s*(.*?)\s*(?:</answer>|$)", re.DOTALL)
_SPECIAL = re.compile(r"<\|[^|<>]*\|>|</s>")


def label_of(name: str, entry: dict[str, Any]) -> str:
    """What a scorer needs, as text: OpenRLHF hands a reward function the label alone."""
    return json.dumps({"dataset": name, "entry": _pack(entry)}, ensure_ascii=False, default=str)


def score(answer: str, label: str) -> float:
    """reasoning-gym's own score of an answer, in [0, 1]; 0 where its scorer fails on what the model wrote.

    Args:
        answer: the generated text; what stands in the last ``<answer>`` tags (else boxed, else all) is scored.
        label: from :func:`label_of`.
    """
    problem = json.loads(label)
    try:
        value = _scorer(problem["dataset"])(final_answer(answer) or "", _unpack(problem["entry"]))
    except Exception:  # scorers parse what a model wrote, and not all of them expect everything
        return 0.0
    return min(1.0, max(0.0, float(value)))


def final_answer(answer: str) -> str | None:
    """The text between the last answer tags; else the last ``\\boxed{}``; else all that was said."""
    answer = _SPECIAL.sub("", visible(answer))
    tagged = _TAGGED.findall(answer)
    return (tagged[-1] if tagged else last_boxed(answer) or answer).strip() or None


def datasets() -> dict[str, Any]:
    """reasoning-gym's datasets by name; a ``UsageError`` where it is not installed."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UsageError("the package reasoning-gym is not installed. Run: pip install reasoning-gym") from None
    return DATASETS


@lru_cache(maxsize=8)
def _scorer(name: str) -> Any:
    import reasoning_gym

    datasets()
    return reasoning_gym.get_score_answer_fn(name)


def _pack(value: object) -> Any:
    """A value as JSON that :func:`_unpack` gives back as it was: JSON has no tuples, and only text as keys."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not value.keys() & {"#tuple", "#items"}:
            return {key: _pack(item) for key, item in value.items()}
        return {"#items": [[_pack(key), _pack(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"#tuple": [_pack(item) for item in value]}
    return [_pack(item) for item in value] if isinstance(value, list) else value


def _unpack(value: object) -> Any:
    if isinstance(value, dict):
        if "#tuple" in value:
            return tuple(_unpack(item) for item in value["#tuple"])
        if "#items" in value:
            return {_unpack(key): _unpack(item) for key, item in value["#items"]}
        return {key: _unpack(item) for key, item in value.items()}
    return [_unpack(item) for item in value] if isinstance(value, list) else value
