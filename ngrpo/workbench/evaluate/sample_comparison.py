# SPDX-License-Identifier: Apache-2.0
"""Compares per-sample results of ``ngrpo eval`` with the first file's, by a paired test over problems (Holm's p)."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ngrpo.machine.console import Report, text_table
from ngrpo.machine.storage.result_folder import ResultFolder
from ngrpo.workbench import statistics
from ngrpo.workbench.evaluate.evaluation import (
    DEFAULT_KS,
    PROBLEMS,
    SAMPLES,
    read_samples,
    readability,
    unscored,
    unscored_warnings,
)
from ngrpo.workbench.report.values import shares
from perturbations.errors import UsageError

_TAUS = (0.25, 0.5, 0.75)


class SampleFile(NamedTuple):
    """One evaluation; by problem its rows, the number of responses and of right ones, and its content.

    ``texts``: messages with the reference, the prompt with the reference, and the prompt alone, each with its number
    among equal ones; empty where a file has none.
    """

    name: str
    rows: dict[str, list[dict[str, Any]]]
    counts: dict[str, tuple[int, int]]
    texts: tuple[dict[str, tuple[str, int]], ...]

    def unscored(self, problems: Iterable[str]) -> dict[str, float | None]:
        """The shares of these problems' responses that a score says little of; None where the file does not tell."""
        rows = [row for problem in problems for row in self.rows[problem]]
        return unscored(readability(rows) if all(row.keys() >= {"parsed", "finish"} for row in rows) else {})


def lines(
    files: Sequence[str], *, k: str | None = None, tau: str | None = None, report: Report = lambda line: None
) -> list[str]:
    """The comparison as a table.

    Args:
        files: paths, or ``NAME=PATH``; the first is the baseline.
        k: of Pass@k, with commas between; None for those of ``ngrpo eval`` up to the smallest number of responses.
        tau: of Cover@τ, with commas between; None for 0.25, 0.5 and 0.75 where all problems have several responses.
        report: called with a line about a damaged end of a file.

    Raises:
        UsageError: for a bad file or number, two files with one name, and files that share no problem.
    """
    sample_files = [read(file, report) for file in files]
    if len({one.name for one in sample_files}) < len(files):  # folders of one name; their paths may differ
        sample_files = [f._replace(name=path) if Path(path).exists() else f for f, path in zip(sample_files, files)]
    if len({one.name for one in sample_files}) < len(files):
        raise UsageError(f"{' '.join(files)}: two have one name. Give each another: a=DIR b=DIR.")
    alone = [(problem,) for problem in sample_files[0].counts]
    how, shared = _paired(sample_files) if len(files) > 1 else ("", alone)
    if not shared:
        fix = "give evaluations of the same problems, with the same --instruction"
        if bare := [file for file, one in zip(files, sample_files) if not any(one.texts)]:
            fix = f"{' and '.join(bare)} has neither. Give an evaluation's folder, or each line a 'prompt'"
        raise UsageError(
            f"{' and '.join(files)} have no problem in common. Problems are paired by their text and reference, or by"
            f" the prompts in the files: {fix}."
        )
    counts = [[one.counts[ids[i]] for ids in shared] for i, one in enumerate(sample_files)]
    sizes = {n for of_file in counts for n, _ in of_file}
    fewest = min(sizes)
    head = [f"{len(shared)} problems, {fewest if len(sizes) == 1 else f'{fewest} to {max(sizes)}'} responses to each"]
    head += [f"paired by {how}"] if len(files) > 1 else []
    head += [
        f"{one.name}: {len(one.counts) - len(shared)} of its {len(one.counts)} problems are not in all files, left out"
        for one in sample_files
        if len(one.counts) > len(shared)
    ]
    heads = ["measure", "of", "value [95%]", "cut / unreadable / timed out"]
    rows = [[*heads, "difference [95%]", "corrected p", "could be seen"]]
    lost = [one.unscored(ids[i] for ids in shared) for i, one in enumerate(sample_files)]
    # Of each problem the responses that all files have.
    common = [min(n for n, _ in of_problem) for of_problem in zip(*counts)]
    for measure, of_problem in measures(k, tau, fewest).items():
        tables = [np.array([[of_problem(n, c, m)] for (n, c), m in zip(of_file, common)]) for of_file in counts]
        differences = [statistics.paired(table, tables[0], of_problems=True) for table in tables[1:]]
        statistics.correct(differences)
        for one, table, of_file, difference in zip(sample_files, tables, lost, [None, *differences]):
            row = [measure, one.name, statistics.in_words(statistics.interval(table, share=True)), shares(of_file)]
            if difference is None:
                rows.append([*row, "", "", ""])
                continue
            p, least = difference.get("p_corrected"), difference.get("detectable")
            p_text = "–" if p is None else f"{p:.3f}" if p >= 0.001 else "<0.001"
            mark = "" if difference["within_noise"] else " *"
            seen = "–" if least is None else f"{least:.3f}"
            rows.append([*row, statistics.in_words(difference, "+.3f"), p_text + mark, seen])
    warnings = [line for one, of_file in zip(sample_files, lost) for line in unscored_warnings(one.name, of_file)]
    notes = [
        *(f"warning: {line}" for line in warnings),
        "difference: to the first; * beyond noise, corrected p below 0.05 (over problems, Holm: the exact sign-flip"
        f" test where at most {statistics.MOST_FLIPPED} of them differ or all by the same, else a paired t test).",
        "could be seen: the smallest true difference that this many problems would show in four of five repetitions; –"
        " where even 1 might not be.",
    ]
    if len(sizes) > 1:
        notes.append("Cover@τ is of as many responses to a problem as all files have, expected over which ones.")
    return [*head, "", *text_table(rows, left=2), "", *notes]


def _paired(files: Sequence[SampleFile]) -> tuple[str, list[tuple[str, ...]]]:
    """How problems are paired, and for each that all files have its names in them.

    A question with two references is two problems, so prompts alone pair only where a file has no references.
    """
    ways = ["their text", "their prompt"]
    if not all(one.texts[0] for one in files):
        ways.append("their prompt")
    for how, texts in zip(ways, zip(*(one.texts for one in files))):
        named = [{text: problem for problem, text in of_file.items()} for of_file in texts]
        if shared := [tuple(each[text] for each in named) for text in named[0] if all(text in each for each in named)]:
            return how, shared
    return "", []


def read(named_path: str, report: Report = lambda line: None) -> SampleFile:
    """Reads ``samples.jsonl`` or the folder of an evaluation, ``PATH`` or ``NAME=PATH``.

    Raises:
        UsageError: for a file that cannot be read, is damaged or holds something else.
    """
    name, equals, text = named_path.partition("=")
    if not equals or Path(named_path).exists():
        name, text = "", named_path
    path = Path(text).expanduser()
    file = path / SAMPLES if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{file}: there is no such file. Give the folder of an ngrpo eval or a samples file.")
    folder = ResultFolder(file.parent, report)
    rows = read_samples(folder, file.name, mend=False)
    if not rows or not all("problem" in row and "correct" in row for row in rows):
        raise UsageError(
            f"{file} holds no per-sample results: its lines need 'problem' and 'correct', as ngrpo eval writes them."
        )
    by_problem: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["correct"] not in (0, 1):
            which = f"problem {row['problem']!r}, sample {row.get('sample')}"
            raise UsageError(f"{file}: {which}: 'correct' is {row['correct']!r}, and must be true or false.")
        by_problem[row["problem"]].append(row)
    listed = folder.lines(PROBLEMS, "id", "messages", mend=False) if file.name == SAMPLES else []
    messages = {row["id"]: json.dumps(row["messages"]) for row in listed if row["id"] in by_problem}
    references = {row["id"]: json.dumps(row.get("answer")) for row in listed}
    prompts = {row["problem"]: row["prompt"] for row in rows if "prompt" in row}

    def with_reference(texts: Mapping[str, str]) -> dict[str, str]:
        return {problem: f"{text}\n{references[problem]}" for problem, text in texts.items() if problem in references}

    return SampleFile(
        name=name or (file.parent.name if file.name == SAMPLES else file.name),
        rows=by_problem,
        counts={problem: (len(of), sum(int(row["correct"]) for row in of)) for problem, of in by_problem.items()},
        texts=(_numbered(with_reference(messages)), _numbered(with_reference(prompts)), _numbered(prompts)),
    )


def _numbered(texts: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Each problem's text with the number of equal ones before it."""
    seen: Counter[str] = Counter()
    numbered = {}
    for problem, text in texts.items():
        numbered[problem] = text, seen[text]
        seen[text] += 1
    return numbered


def measures(k: str | None, tau: str | None, fewest: int) -> dict[str, Callable[[int, int, int], float]]:
    """By name, functions of a problem's responses n, of the right ones c, and of the responses m that all files have.

    Cover@τ: whether at least the fraction τ is right (Dragoi et al. 2025, arXiv 2510.08325). It depends on n, so it is
    :func:`cover` of m responses.
    """

    def numbers(flag: str, text: str | None, kind: type, usual: Sequence[float]) -> Sequence[Any]:
        try:
            return usual if text is None else sorted({kind(part) for part in text.split(",")})
        except ValueError:
            example = "1,8" if kind is int else "0.25,0.5"
            raise UsageError(f"--{flag} {text}: must be numbers with commas between, such as {example}.") from None

    ks = numbers("k", k, int, [k for k in DEFAULT_KS if 1 < k <= fewest])
    taus = numbers("tau", tau, float, _TAUS if fewest > 1 else ())
    if bad := [k for k in ks if not 1 <= k <= fewest]:
        raise UsageError(f"--k {bad[0]}: must be in [1, {fewest}], the responses that each problem has.")
    if bad := [tau for tau in taus if not 0.0 < tau <= 1.0]:
        raise UsageError(f"--tau {bad[0]:g}: must be in (0, 1].")
    measures: dict[str, Callable[[int, int, int], float]] = {"mean": lambda n, c, m: c / n}
    measures |= {f"Pass@{k}": lambda n, c, m, k=k: statistics.pass_at_k(n, c, k) for k in ks}
    return measures | {f"Cover@{tau:g}": lambda n, c, m, tau=tau: cover(n, c, m, tau) for tau in taus}


def cover(n: int, c: int, m: int, tau: float) -> float:
    """The chance that of m of n responses, c of them right, at least the fraction τ is right; exact as Pass@k is."""
    ways = (math.comb(c, right) * math.comb(n - c, m - right) for right in range(m + 1) if right / m >= tau)
    return sum(ways) / math.comb(n, m)
