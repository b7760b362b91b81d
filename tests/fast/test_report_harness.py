# SPDX-License-Identifier: Apache-2.0
"""`ngrpo report` on files in the form of lm-evaluation-harness (0.4.13.dev0, commit 4e7e0d4), key by key.

A sample is put together in its ``lm_eval/evaluator.py`` and written by ``EvaluationTracker.save_results_samples``:
responses and the target as text, arguments as dictionaries, what JSON does not know as its text, no escapes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngrpo.workbench.evaluate.sample_files import read
from ngrpo.workbench.report.of_samples import lines
from perturbations.errors import UsageError

QUESTIONS = ("What is 1 + 1?", "Two\u2028lines\u0085and a third", "Encore\xa0: 2 + 2 ?", "What is 1 + 1?")


def _as_text(value: Any) -> Any:
    return list(map(_as_text, value)) if isinstance(value, (list, tuple)) else str(value)


def _unknown_to_json(value: Any) -> Any:
    return int(value) if isinstance(value, (np.int64, np.int32)) else str(value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _line(doc_id: int, filter: str, arguments: list[tuple[Any, ...]], resps: Any, metrics: Mapping[str, Any]) -> str:
    doc = {"question": QUESTIONS[doc_id], "answer": "#### 2"}
    sample = {
        "doc_id": doc_id,
        "doc": doc,
        "target": str(2),
        "arguments": {
            f"gen_args_{i}": {f"arg_{j}": part for j, part in enumerate(request)} for i, request in enumerate(arguments)
        },
        "resps": _as_text([[resp] for resp in resps]),
        "filtered_resps": _as_text(resps),
        "filter": filter,
        "metrics": list(metrics),
        "doc_hash": _digest(json.dumps(doc, indent=2, ensure_ascii=False)),
        "prompt_hash": _digest(arguments[0][0]),
        "target_hash": _digest("2"),
        **metrics,
    }
    return json.dumps(sample, default=_unknown_to_json, ensure_ascii=False) + "\n"


def generation(path: Path, right: Mapping[int, Any]) -> Path:
    """As of gsm8k: two filters, all documents of the one before those of the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(
        _line(
            doc_id,
            filter,
            [(f"Question: {QUESTIONS[doc_id]}\nAnswer:", {"until": ["Question:"], "do_sample": False})],
            ["2"],
            {"exact_match": score if filter == "flexible-extract" else np.float64(0.0)},
        )
        for filter in ("strict-match", "flexible-extract")
        for doc_id, score in right.items()
    )
    path.write_bytes(text.encode())
    return path


def choices(path: Path, right: Mapping[int, Any], convert: Callable[[Any], Any] = float) -> Path:
    """As of a multiple-choice task: a request for each choice, each answered by a log-probability and a flag."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(
        _line(
            doc_id,
            "none",
            [(QUESTIONS[doc_id], " 2"), (QUESTIONS[doc_id], " 3")],
            [(-1.25, False), (-0.5, True)],
            {"acc": convert(score), "acc_norm": 1.0, "logprob": (-0.5, 1), "bypass": 999},
        )
        for doc_id, score in right.items()
    )
    path.write_bytes(text.encode())
    return path


def test_generation_by_filter(tmp_path: Path) -> None:
    base = generation(tmp_path / "base" / "samples_gsm8k_2026-08-21T10-56-54.123456.jsonl", {0: 0.0, 1: 1.0, 2: 0.0})
    ours = generation(tmp_path / "ours" / "samples_gsm8k_2026-08-21T11-56-54.123456.jsonl", {2: 1.0, 1: 1.0, 0: 0.0})
    told = lines([f"base={base}", f"ours={ours}"], filter="flexible-extract")
    assert told[0] == "3 problems, 1 answers to each"
    rows = [row.split() for row in told if row.startswith("mean")]
    assert [row[2] for row in rows] == ["0.333", "0.667"] and rows[1][5] == "+0.333"
    assert read(base, chosen_filter="strict-match").metric == "exact_match"
    with pytest.raises(UsageError, match="filters flexible-extract, strict-match: choose with --filter"):
        read(base)


@pytest.mark.parametrize("convert", [float, bool, int, np.bool_, np.int64, np.float64, np.float32])
def test_choices_of_every_kind_of_number(tmp_path: Path, convert: Callable[[Any], Any]) -> None:
    """The harness writes numpy's truth values and short floats as text; a pair or 999 is no score."""
    file = choices(tmp_path / "samples_arc_easy_2026-08-21T10-56-54.123456.jsonl", {0: 1, 1: 0, 2: 1}, convert)
    assert sorted(read(file, metric="acc").scores.values()) == [(0.0,), (1.0,), (1.0,)]
    with pytest.raises(UsageError, match="metrics acc, acc_norm: choose with --metric acc"):
        read(file)


def test_a_problem_that_stands_twice_in_the_dataset_is_two(tmp_path: Path) -> None:
    """Rows of several processes stand one process after the other, so in another order than a single one's."""
    one = read(generation(tmp_path / "a.jsonl", {0: 1.0, 1: 0.0, 3: 0.0}), chosen_filter="flexible-extract")
    two = read(generation(tmp_path / "b.jsonl", {3: 0.0, 0: 1.0, 1: 0.0}), chosen_filter="flexible-extract")
    assert one.scores == two.scores and sorted(one.scores.values()) == [(0.0,), (0.0,), (1.0,)]


def test_a_folder_of_the_harness(tmp_path: Path) -> None:
    """It writes into a folder for each model."""
    file = choices(tmp_path / "model" / "samples_arc_easy_2026-08-21T10-56-54.123456.jsonl", {0: 1, 1: 0})
    assert read(file.parent, metric="acc").scores == read(file, metric="acc").scores
    choices(tmp_path / "model" / "samples_arc_easy_2026-08-22T10-56-54.123456.jsonl", {0: 1, 1: 0})
    with pytest.raises(UsageError, match="several files of samples: give one of samples_arc_easy_2026-08-21"):
        read(file.parent)
