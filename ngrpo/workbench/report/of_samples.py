# SPDX-License-Identifier: Apache-2.0
"""Files of samples compared with the first one, problem by problem.

The problems are what chance has drawn here: a mean difference has Student's t interval over them and its paired t test,
corrected for as many files as are held against the first (Holm), and the smallest true difference that so many
problems find in four of five repetitions. Nothing is said of other training runs: that takes seeds (`ngrpo compare`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ngrpo.machine.console.text_table import aligned
from ngrpo.workbench import statistics
from ngrpo.workbench.evaluate.outcome import DEFAULT_KS
from ngrpo.workbench.evaluate.sample_files import SampleFile, read
from ngrpo.workbench.statistics import cover_at, pass_at_k
from perturbations.errors import UsageError

_TAUS = (0.25, 0.5, 0.75)


def lines(
    files: Sequence[str],
    *,
    metric: str | None = None,
    filter: str | None = None,
    k: str | None = None,
    tau: str | None = None,
) -> list[str]:
    """The comparison as a table.

    Args:
        files: paths, or ``NAME=PATH``; the first is the baseline.
        metric: of lm-evaluation-harness.
        filter: likewise.
        k: of Pass@k, with commas between; None for those of ``ngrpo eval`` up to the smallest number of answers.
        tau: of Cover@τ, likewise; None for 0.25, 0.5 and 0.75 where all have several answers to a problem.

    Raises:
        UsageError: for a bad file or number, and files that share no problem.
    """
    sample_files = [_named(file, metric, filter) for file in files]
    shared = [problem for problem in sample_files[0].scores if all(problem in one.scores for one in sample_files)]
    if not shared:
        raise UsageError(f"{' and '.join(files)} have no problem in common: are they of the same task?")
    counts = {len(one.scores[problem]) for one in sample_files for problem in shared}
    fewest = min(counts)
    lists = [f"{len(shared)} problems, {fewest if len(counts) == 1 else f'{fewest} to {max(counts)}'} answers to each"]
    lists += [
        f"{one.name}: {len(one.scores) - len(shared)} of its {len(one.scores)} problems are not in all files, left out"
        for one in sample_files
        if len(one.scores) > len(shared)
    ]
    rows = [["measure", "of", "value", "95%", "difference", "95%", "corrected p", "could be seen"]]
    for measure, of_problem in _measures(
        sample_files, shared, _numbers("k", k, int), _numbers("tau", tau, float), fewest
    ):
        tables = [np.array([of_problem(one.scores[problem]) for problem in shared])[:, None] for one in sample_files]
        differences = [statistics.paired(table, tables[0]) for table in tables[1:]]
        statistics.correct(differences)
        for one, table, difference in zip(sample_files, tables, [None, *differences]):
            rows.append([measure, one.name, *_value(table), *_difference(difference)])
    notes = [
        "difference: to the first; * beyond noise, corrected p below 0.05 (paired t test over problems, Holm).",
        "could be seen: the smallest true difference that so many problems would show in four of five repetitions.",
    ]
    return [*lists, "", *aligned(rows, left=2), "", *notes]


def _named(file: str, metric: str | None, chosen_filter: str | None) -> SampleFile:
    name, equals, path = file.partition("=")
    if not equals or Path(file).exists():
        name, path = "", file
    sample_file = read(Path(path).expanduser(), metric=metric, chosen_filter=chosen_filter)
    return SampleFile(name, sample_file.metric, sample_file.scores) if name else sample_file


def _numbers(what: str, text: str | None, kind: type) -> list[float] | None:
    if text is None:
        return None
    try:
        return sorted({kind(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"--{what} {text}: must be numbers with commas between, such as {_EXAMPLES[what]}.") from None


_EXAMPLES = {"k": "1,8", "tau": "0.25,0.5"}


def _measures(
    sample_files: Sequence[SampleFile], shared: Sequence[str], ks: list | None, taus: list | None, fewest: int
) -> list[tuple[str, Callable[[tuple[float, ...]], float]]]:
    """Names with what they are of one problem's scores."""
    whole = all(score in (0.0, 1.0) for one in sample_files for problem in shared for score in one.scores[problem])
    if not whole and (ks or taus):
        raise UsageError("Pass@k and Cover@τ are of answers that are right or wrong, and here are scores in between.")
    measures: list[tuple[str, Callable[[tuple[float, ...]], float]]] = [
        ("mean", lambda scores: sum(scores) / len(scores))
    ]
    if ks is None:
        ks = [k for k in DEFAULT_KS if 1 < k <= fewest] if whole else []
    if taus is None:
        taus = list(_TAUS) if whole and fewest > 1 else []
    if bad := [k for k in ks if not 1 <= k <= fewest]:
        raise UsageError(f"--k {bad[0]}: must be in [1, {fewest}], the answers that each problem has.")
    if bad := [t for t in taus if not 0.0 < t <= 1.0]:
        raise UsageError(f"--tau {bad[0]:g}: must be in (0, 1].")
    measures += [(f"Pass@{k}", lambda s, k=k: pass_at_k(len(s), int(sum(s)), k)) for k in ks]
    return measures + [(f"Cover@{t:g}", lambda s, t=t: float(cover_at(len(s), int(sum(s)), t))) for t in taus]


def _value(table: np.ndarray) -> list[str]:
    interval = statistics.interval(table)
    return [f"{interval['value']:.3f}", _span(interval)]


def _difference(difference: statistics.Interval | None) -> list[str]:
    if difference is None:
        return ["", "", "", ""]
    p, least = difference.get("p_corrected"), difference.get("detectable")
    p_text = "–" if p is None else f"{p:.3f}" if p >= 0.001 else "<0.001"
    mark = "" if difference["within_noise"] else " *"
    return [
        f"{difference['value']:+.3f}",
        _span(difference, "+"),
        p_text + mark,
        "–" if least is None else f"{least:.3f}",
    ]


def _span(interval: statistics.Interval, sign: str = "") -> str:
    if interval["low"] is None:
        return "–"
    return f"[{interval['low']:{sign}.3f}, {interval['high']:{sign}.3f}]"
