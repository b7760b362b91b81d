# SPDX-License-Identifier: Apache-2.0
"""What a row means, told by its columns: each layout turns a row into messages, reference and scorer."""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from ngrpo.machine.storage.datafiles import Row
from ngrpo.workbench.scoring import procedural
from ngrpo.workbench.scoring.answers import last_boxed
from ngrpo.workbench.scoring.problem import Problem
from perturbations.errors import UsageError

BOXED = "Reason step by step and put the final answer in \\boxed{}."
LETTER = "Reason step by step and put the letter of the right option in \\boxed{}."

_QUESTIONS = ("problem", "question", "Problem", "Question", "query", "prompt")
_ANSWERS = ("answer", "Answer", "expected_answer", "final_answer", "target", "ground_truth", "label", "solution")
_OPTIONS = ("choices", "options", "Choices", "Options")
_GPQA = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
# Options that stand in the question itself: "(A) ...", "A. ...", "A) ..." at the start of a line.
_LISTED = re.compile(r"^\s*\(?([A-J])[).:]\s", re.MULTILINE)


# A row as a problem without an id, its scorer being what ``auto`` stands for here and its answer "" where the row has
# none; and what a bare question needs to be told about the answer's form, "" where the row is a prompt.
Asked = tuple[Problem, str]
Messages = tuple[dict[str, str], ...]


def layout_of(row: Row, input_key: str = "input", label_key: str = "label") -> tuple[str, Callable[[Row], Asked]]:
    """The layout of a dataset, from its first row.

    Args:
        row: a row.
        input_key: OpenRLHF's column of prompts.
        label_key: OpenRLHF's column of references.

    Returns:
        The layout's name, for messages, and what turns a row into its meaning.

    Raises:
        UsageError: where the columns are not known, with those found and the fix.
    """
    if "prompt" in row and "reward_model" in row:
        return "verl", _verl
    if {"question", "answer", "metadata"} <= row.keys() and "source_dataset" in _mapping(row["metadata"]):
        return "reasoning-gym", _procedural
    if input_key in row:
        return "OpenRLHF", lambda r: _openrlhf(r, input_key, label_key)
    if set(_GPQA) <= row.keys():
        return "GPQA", _gpqa
    if _first(row, _QUESTIONS) is not None and _first(row, _ANSWERS) is not None:
        several = _first(row, _OPTIONS) is not None
        return ("multiple choice", _options) if several else ("question and answer", _question)
    raise UsageError(
        f"unknown layout: the columns are {', '.join(row)}. Known: verl's prompt and reward_model; {input_key!r} and"
        f" {label_key!r} (other columns with --input-key and --label-key); one of {', '.join(_QUESTIONS)} with one of"
        f" {', '.join(_ANSWERS)}; GPQA's Question, Correct Answer, Incorrect Answer 1 to 3."
    )


def _verl(row: Row) -> Asked:
    truth = _mapping(row["reward_model"]).get("ground_truth")
    if isinstance(truth, dict):
        # Some sets lost a target while their solution still has it in its box.
        truth = truth.get("target") or last_boxed(str(truth.get("solution") or ""))
    meta = {key: row[key] for key in ("data_source", "level", "type") if isinstance(row.get(key), str)}
    messages = _messages(row["prompt"])
    answer = _reference(truth)
    return Problem("", messages, answer, _guess(messages, answer), meta), ""


def _openrlhf(row: Row, input_key: str, label_key: str) -> Asked:
    if label_key not in row:
        raise UsageError(f"no column {label_key!r} beside {input_key!r}; name the reference's with --label-key.")
    messages, answer = _messages(row[input_key]), _reference(row[label_key])
    label = _mapping(answer) if answer.startswith("{") else {}
    if "entry" in label and "dataset" in label:  # written by the task reasoning_gym
        return Problem("", messages, str(label["entry"].get("answer") or ""), "reasoning_gym", {"label": answer}), ""
    return Problem("", messages, answer, _guess(messages, answer)), ""


def _procedural(row: Row) -> Asked:
    entry = {**row, "metadata": _mapping(row["metadata"])}
    name = entry["metadata"]["source_dataset"]
    meta = {"label": procedural.label_of(name, entry)}
    problem = Problem("", _messages(row["question"]), str(row["answer"] or ""), "reasoning_gym", meta)
    return problem, procedural.INSTRUCTION


def _gpqa(row: Row) -> Asked:
    question, right = str(row["Question"]), str(row["Correct Answer"] or "").strip()
    if not right:
        return Problem("", _messages(question), "", "choice"), ""
    options = [right, *(str(row[key]).strip() for key in _GPQA[2:])]
    # The right option comes first in the file: shuffled by the question alone, so alike in every run.
    random.Random(question).shuffle(options)
    return _choice(question, options, string.ascii_uppercase[options.index(right)])


def _options(row: Row) -> Asked:
    entries = row[_first(row, _OPTIONS) or ""]
    if isinstance(entries, str):
        entries = json.loads(entries) if entries.strip().startswith(("[", "{")) else entries.split("\n")
    labels: list[str] = list(string.ascii_uppercase)
    if isinstance(entries, dict) and "text" in entries:  # ARC: {"text": [...], "label": [...]}
        labels, entries = [str(label) for label in entries.get("label", labels)], entries["text"]
    elif isinstance(entries, dict):
        labels, entries = [str(label) for label in entries], list(entries.values())
    options = [str(option).strip() for option in entries]
    value = row.get(_first(row, _ANSWERS) or "")
    is_index = _is_integer(value) and not any(map(_is_integer, entries))
    answer = _letter(_reference(value), labels[: len(options)], options, is_index)
    return _choice(str(row[_first(row, _QUESTIONS) or ""]), options, answer)


def _letter(answer: str, labels: Sequence[str], options: Sequence[str], is_index: bool) -> str:
    """The letter of an answer that is a label, an index or an option in full; anything else stays as it is.

    An integer beside options that are texts (``is_index``) is an index, as in MMLU, even if an option reads the same.
    """
    if answer in labels:
        return string.ascii_uppercase[labels.index(answer)]
    if answer in options and not is_index:
        return string.ascii_uppercase[options.index(answer)]
    if answer.isdecimal() and int(answer) < len(options):
        return string.ascii_uppercase[int(answer)]
    return answer


def _is_integer(value: object) -> bool:
    """Whether a value is a whole number and not a text; a table with gaps has 1.0 for 1, and a list may hold one."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def _choice(question: str, options: Sequence[str], answer: str) -> Asked:
    """A question with its options, one per line: ``A) …``."""
    lines = [f"{letter}) {option}" for letter, option in zip(string.ascii_uppercase, options)]
    messages = _messages("\n".join([question.strip(), "", *lines]))
    return Problem("", messages, answer, "choice", {"options": list(options)}), LETTER


def _question(row: Row) -> Asked:
    messages = _messages(row[_first(row, _QUESTIONS) or ""])
    column = _first(row, _ANSWERS)
    answer = _reference(row[column]) if column else ""
    if "####" in answer:  # GSM8K: the solution, then the result
        answer = answer.rpartition("####")[2].strip()
    elif column == "solution":  # MATH: the solution, its result boxed
        answer = last_boxed(answer) or answer
    problem = Problem("", messages, answer, _guess(messages, answer))
    return problem, LETTER if problem.scorer == "choice" else BOXED


def _guess(messages: Messages, answer: str) -> str:
    """``choice`` where the answer is a letter and the question itself lists options A and B, else ``math``."""
    listed = {"A", "B"} <= set(_LISTED.findall(messages[-1]["content"]))
    return "choice" if listed and re.fullmatch(r"\(?[A-J]\)?", answer) else "math"


def _first(row: Row, names: Sequence[str]) -> str | None:
    return next((name for name in names if name in row), None)


def _messages(value: object) -> Messages:
    """A text as a user's message, or a list of messages as it is."""
    if isinstance(value, str) and value.strip():
        return ({"role": "user", "content": value},)
    if isinstance(value, (list, tuple)) and value and all(isinstance(m, dict) and "content" in m for m in value):
        return tuple({"role": str(m.get("role", "user")), "content": str(m["content"])} for m in value)
    raise UsageError("no question: the prompt must be a text or a list of messages with role and content.")


def _reference(value: object) -> str:
    """The reference as text; a list must hold one."""
    if isinstance(value, (list, tuple)):
        if len(value) > 1:
            raise UsageError(f"{len(value)} reference answers ({value!r:.80}); one is supported.")
        value = value[0] if value else ""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value).strip()


def _mapping(value: object) -> dict[str, Any]:
    """A dictionary, or JSON text of one; {} for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}
