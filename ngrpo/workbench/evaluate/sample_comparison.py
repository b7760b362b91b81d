# SPDX-License-Identifier: Apache-2.0
"""Compares per-sample results of ``ngrpo eval`` with the first file's: a paired t test over problems (Holm's p)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ngrpo.machine.console.text import text_table
from ngrpo.workbench import statistics
from ngrpo.workbench.evaluate.evaluation import DEFAULT_KS
from ngrpo.workbench.statistics import cover_at, pass_at_k
from perturbations.errors import UsageError

_SAMPLES = "samples.jsonl"
_TAUS = (0.25, 0.5, 0.75)
_EXAMPLES = {"k": "1,8", "tau": "0.25,0.5"}


class SampleFile(NamedTuple):
    """One evaluation: its name, and by problem the number of answers and of right ones."""

    name: str
    counts: dict[str, tuple[int, int]]


def lines(files: Sequence[str], *, k: str | None = None, tau: str | None = None) -> list[str]:
    """The comparison as a table.

    Args:
        files: paths, or ``NAME=PATH``; the first is the baseline.
        k: of Pass@k, with commas between; None for those of ``ngrpo eval`` up to the smallest number of answers.
        tau: of Cover@τ, with commas between; None for 0.25, 0.5 and 0.75 where all problems have several answers.

    Raises:
        UsageError: for a bad file or number, and files that share no problem.
    """
    sample_files = [read(file) for file in files]
    shared = [problem for problem in sample_files[0].counts if all(problem in one.counts for one in sample_files)]
    if not shared:
        raise UsageError(f"{' and '.join(files)} have no problem in common: are they of the same task?")
    sizes = {one.counts[problem][0] for one in sample_files for problem in shared}
    fewest = min(sizes)
    head = [f"{len(shared)} problems, {fewest if len(sizes) == 1 else f'{fewest} to {max(sizes)}'} answers to each"]
    head += [
        f"{one.name}: {len(one.counts) - len(shared)} of its {len(one.counts)} problems are not in all files, left out"
        for one in sample_files
        if len(one.counts) > len(shared)
    ]
    rows = [["measure", "of", "value", "95%", "difference", "95%", "corrected p", "could be seen"]]
    for measure, of_problem in _measures(_numbers("k", k, int), _numbers("tau", tau, float), fewest):
        tables = [np.array([[of_problem(*one.counts[problem])] for problem in shared]) for one in sample_files]
        differences = [statistics.paired(table, tables[0]) for table in tables[1:]]
        statistics.correct(differences)
        for one, table, difference in zip(sample_files, tables, [None, *differences]):
            interval = statistics.interval(table)
            value = [f"{interval['value']:.3f}", _span(interval)]
            rows.append([measure, one.name, *value, *(_difference(difference) if difference else [""] * 4)])
    notes = [
        "difference: to the first; * beyond noise, corrected p below 0.05 (paired t test over problems, Holm).",
        "could be seen: the smallest true difference that so many problems would show in four of five repetitions.",
    ]
    return [*head, "", *text_table(rows, left=2), "", *notes]


def read(named_path: str) -> SampleFile:
    """Reads ``samples.jsonl`` or the folder of an evaluation, ``PATH`` or ``NAME=PATH``.

    Raises:
        UsageError: for a file that cannot be read or holds something else.
    """
    name, equals, text = named_path.partition("=")
    if not equals or Path(named_path).exists():
        name, text = "", named_path
    path = Path(text).expanduser()
    file = path / _SAMPLES if path.is_dir() else path
    try:
        # Not splitlines(): JSON may hold U+2028 unescaped.
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except FileNotFoundError:
        raise UsageError(
            f"{file}: there is no such file. Give the folder of an ngrpo eval or a samples file."
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} is not a file of JSON lines: {error}.") from None
    if not rows or not all(isinstance(row, dict) and "problem" in row and "correct" in row for row in rows):
        raise UsageError(
            f"{file} holds no per-sample results: its lines need 'problem' and 'correct', as ngrpo eval writes them."
        )
    answers: dict[str, dict[Any, bool]] = defaultdict(dict)
    for row in rows:  # of two with the same number the first counts
        answers[str(row["problem"])].setdefault(row.get("sample"), bool(row["correct"]))
    counts = {problem: (len(correct), sum(correct.values())) for problem, correct in answers.items()}
    return SampleFile(name or (file.parent.name if file.name == _SAMPLES else file.name), counts)


def _numbers(flag: str, text: str | None, kind: type) -> list[float] | None:
    if text is None:
        return None
    try:
        return sorted({kind(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"--{flag} {text}: must be numbers with commas between, such as {_EXAMPLES[flag]}.") from None


def _measures(ks: list | None, taus: list | None, fewest: int) -> list[tuple[str, Callable[[int, int], float]]]:
    """Names with functions of a problem's number of answers and of right ones."""
    if ks is None:
        ks = [k for k in DEFAULT_KS if 1 < k <= fewest]
    if taus is None:
        taus = list(_TAUS) if fewest > 1 else []
    if bad := [k for k in ks if not 1 <= k <= fewest]:
        raise UsageError(f"--k {bad[0]}: must be in [1, {fewest}], the answers that each problem has.")
    if bad := [t for t in taus if not 0.0 < t <= 1.0]:
        raise UsageError(f"--tau {bad[0]:g}: must be in (0, 1].")
    measures: list[tuple[str, Callable[[int, int], float]]] = [("mean", lambda n, c: c / n)]
    measures += [(f"Pass@{k}", lambda n, c, k=k: pass_at_k(n, c, k)) for k in ks]
    return measures + [(f"Cover@{t:g}", lambda n, c, t=t: float(cover_at(n, c, t))) for t in taus]


def _difference(difference: statistics.Interval) -> list[str]:
    p, least = difference.get("p_corrected"), difference.get("detectable")
    p_text = "–" if p is None else f"{p:.3f}" if p >= 0.001 else "<0.001"
    mark = "" if difference["within_noise"] else " *"
    detectable = "–" if least is None else f"{least:.3f}"
    return [f"{difference['value']:+.3f}", _span(difference, "+"), p_text + mark, detectable]


def _span(interval: statistics.Interval, sign: str = "") -> str:
    if interval["low"] is None:
        return "–"
    return f"[{interval['low']:{sign}.3f}, {interval['high']:{sign}.3f}]"
