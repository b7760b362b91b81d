# SPDX-License-Identifier: Apache-2.0
"""Per-sample results, of ``ngrpo eval`` or of lm-evaluation-harness: how often each problem was solved.

`ngrpo eval` writes ``samples.jsonl`` with a line for each answer. lm-evaluation-harness (0.4, ``--log_samples``) writes
``samples_TASK_DATE.jsonl`` with a line for each problem and filter, whose metrics stand beside ``doc_id`` and are named
in ``metrics`` (``lm_eval/evaluator.py``, ``lm_eval/loggers/evaluation_tracker.py``; releases before 0.4.7 name none).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturbations.errors import UsageError

_SAMPLES = "samples.jsonl"
_OF_HARNESS = "samples_*.jsonl"
# A number that is neither Python's nor one of two of numpy's is written as its text.
_WRITTEN = {"True": 1.0, "False": 0.0}


@dataclass(frozen=True)
class SampleFile:
    """How the answers of one file were scored.

    Attributes:
        name: of the file, for people.
        metric: what the scores are.
        scores: of each answer, by problem; each in [0, 1].
    """

    name: str
    metric: str
    scores: dict[str, tuple[float, ...]]


def read(path: Path, *, metric: str | None = None, chosen_filter: str | None = None) -> SampleFile:
    """Reads a file, or the folder of an evaluation.

    Args:
        path: ``samples.jsonl``, or a ``samples_*.jsonl`` of lm-evaluation-harness, or a folder with one of them.
        metric: of lm-evaluation-harness; None where there is one alone.
        chosen_filter: likewise, of its filters.

    Raises:
        UsageError: for a file that cannot be read or is something else, and a metric or filter that must be named.
    """
    file = _in_folder(path) if path.is_dir() else path
    name = path.name if path.is_dir() or file.name != _SAMPLES else file.parent.name
    rows = _rows(file)
    if all("problem" in row and "correct" in row for row in rows):
        of_problem: dict[str, dict[Any, float]] = defaultdict(dict)
        for row in rows:  # of two with the same number the first counts
            of_problem[str(row["problem"])].setdefault(row.get("sample"), float(bool(row["correct"])))
        scores = {problem: tuple(entries.values()) for problem, entries in of_problem.items()}
        return SampleFile(name, "correct", scores)
    if not all("doc_id" in row for row in rows):
        raise UsageError(
            f"{file} holds no per-sample results: its lines have neither 'problem' and 'correct', as of ngrpo eval, nor"
            " 'doc_id', as of lm-evaluation-harness with --log_samples."
        )
    rows = _of_filter(file, rows, chosen_filter)
    metric = _metric(file, rows, metric)
    answers: dict[str, list[float]] = defaultdict(list)
    for row, problem in zip(rows, _problems(rows)):
        answers[problem].append(_score(file, row, metric))
    return SampleFile(name, metric, {problem: tuple(entries) for problem, entries in answers.items()})


def _in_folder(folder: Path) -> Path:
    """The one file of samples in a folder; where there is none, the name that ``ngrpo eval`` gives it."""
    of_harness = sorted(folder.glob(_OF_HARNESS))
    if (folder / _SAMPLES).exists() or not of_harness:
        return folder / _SAMPLES
    if len(of_harness) > 1:
        names = ", ".join(file.name for file in of_harness)
        raise UsageError(f"{folder} has several files of samples: give one of {names}.")
    return of_harness[0]


def _problems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each row's problem is paired by: its content, and which of those with this content it is.

    A dataset may hold one problem twice, and two runs may have had different parts of it. Rows of one ``doc_id`` are
    several answers to one problem.
    """
    contents = [str(row.get("doc_hash") or row["doc_id"]) for row in rows]
    of_content: dict[str, set[Any]] = defaultdict(set)
    for row, content in zip(rows, contents):
        of_content[content].add(row["doc_id"])
    # Several processes write their rows one after the other, so that the order of rows says nothing.
    ranks = {content: {each: n for n, each in enumerate(sorted(same))} for content, same in of_content.items()}
    which = [ranks[content][row["doc_id"]] for row, content in zip(rows, contents)]
    return [f"{content}-{n}" if n else content for content, n in zip(contents, which)]


def _rows(file: Path) -> list[dict[str, Any]]:
    try:
        # Not splitlines(): JSON may hold U+2028 and its like as they are, and lm-evaluation-harness writes them so.
        lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        rows = [json.loads(line) for line in lines]
    except FileNotFoundError:
        raise UsageError(
            f"{file}: there is no such file. Give the folder of an ngrpo eval or a samples file."
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} is not a file of JSON lines: {error}.") from None
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{file} holds no per-sample results: a JSON object in each line was expected.")
    return rows


def _of_filter(file: Path, rows: Sequence[dict[str, Any]], name: str | None) -> list[dict[str, Any]]:
    filters = sorted({str(row.get("filter", "none")) for row in rows})
    if (name is None and len(filters) > 1) or (name is not None and name not in filters):
        raise UsageError(f"{file} has the filters {', '.join(filters)}: choose with --filter {filters[0]}.")
    return [row for row in rows if name is None or str(row.get("filter", "none")) == name]


def _metric(file: Path, rows: Sequence[Mapping[str, Any]], chosen: str | None) -> str:
    first = rows[0]
    fixed = {"doc_id", "filter", "metrics", "target", "arguments", "resps", "filtered_resps", "doc"}
    numbers = [key for key, value in first.items() if key not in fixed and not isinstance(value, str)]
    names = sorted(name for name in first.get("metrics") or numbers if _number(first.get(name)) is not None)
    if not names:
        raise UsageError(f"{file} has no metric that is a number in [0, 1] for each sample.")
    if (chosen is None and len(names) > 1) or (chosen is not None and chosen not in names):
        raise UsageError(f"{file} has the metrics {', '.join(names)}: choose with --metric {names[0]}.")
    return chosen or names[0]


def _number(value: object) -> float | None:
    """A score in [0, 1]; None for anything else."""
    if isinstance(value, str):
        try:
            value = _WRITTEN[value] if value in _WRITTEN else float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, (bool, int, float)) and 0.0 <= value <= 1.0 else None


def _score(file: Path, row: Mapping[str, Any], metric: str) -> float:
    value = _number(row.get(metric))
    if value is None:
        wrong = row.get(metric)
        raise UsageError(f"{file}: {metric} of doc_id {row['doc_id']} is {wrong!r}, must be a number in [0, 1].")
    return value
