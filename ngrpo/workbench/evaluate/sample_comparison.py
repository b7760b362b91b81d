# SPDX-License-Identifier: Apache-2.0
"""Compares per-sample results of ``ngrpo eval`` with the first file's, by a paired test over problems (Holm's p)."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ngrpo.machine.console import Report, text_table
from ngrpo.machine.storage.result_folder import SETTINGS, ResultFolder
from ngrpo.machine.upstream.versions import Conditions, differing_conditions
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
from ngrpo.workbench.evaluate.missing_samples import drawn_by
from ngrpo.workbench.report.values import shares
from perturbations.errors import UsageError

_TAUS = (0.25, 0.5, 0.75)
# The options of vLLM that change what a model computes, with the values that they have where they are not given.
_NUMERICS = {"dtype": "auto", "quantization": None, "kv_cache_dtype": "auto"}


class Texts(NamedTuple):
    """The texts by which a file's problems can be paired with another's: problem to text; empty where it has none.

    Each text comes with the number of equal ones before it in the file.
    """

    messages_and_reference: dict[str, tuple[str, int]]
    prompt_and_reference: dict[str, tuple[str, int]]
    prompt: dict[str, tuple[str, int]]


class SampleFile(NamedTuple):
    """One evaluation: by problem its rows, the number of responses and of right ones, and its texts.

    ``missing`` is how many samples an unfinished evaluation lacks. ``settings`` are those of the evaluation, and
    ``drawn_by`` the conditions of each run that sampled, as far as its folder has them.
    """

    name: str
    rows: dict[str, list[dict[str, Any]]]
    counts: dict[str, tuple[int, int]]
    texts: Texts
    missing: int = 0
    settings: Mapping[str, Any] = MappingProxyType({})
    drawn_by: Sequence[Conditions] = ()

    def unscored(self, problems: Iterable[str]) -> dict[str, float | None]:
        """The shares of these problems' responses that a score says little of; None where the file has no such key."""
        rows = [row for problem in problems for row in self.rows[problem]]
        has_all = all(row.keys() >= {"parsed", "finish"} for row in rows)
        return unscored(readability(rows) if has_all else {})


Measure = Callable[[int, int, int], float]
"""Of a problem with n responses, c of them right, where all files have m responses."""


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
    sample_files = _with_names(files, [read(path, report) for path in files])
    if len(files) > 1:
        how, problems = _paired(sample_files)
    else:
        how, problems = "", [(problem,) for problem in sample_files[0].counts]
    if not problems:
        raise _nothing_in_common(files, sample_files)

    counts_by_file = []  # (n, c) of each common problem
    unscored_by_file = []
    for number, file in enumerate(sample_files):
        own_names = [names[number] for names in problems]
        counts_by_file.append([file.counts[name] for name in own_names])
        unscored_by_file.append(file.unscored(own_names))
    sizes = {n for counts in counts_by_file for n, _ in counts}

    head = [f"{len(problems)} problems, {_range(sizes)} responses to each"]
    if how:
        head.append(f"paired by {how}")
    for file in sample_files:
        missing = len(file.counts) - len(problems)
        if missing:
            head.append(f"{file.name}: {missing} of its {len(file.counts)} problems are not in all files, left out")
    rows = _rows(sample_files, counts_by_file, unscored_by_file, measures(k, tau, min(sizes)))
    warnings = [
        *_sample_warnings(sample_files, unscored_by_file),
        *_setting_warnings(sample_files),
        *_prompt_warnings(sample_files, problems),
        *_condition_warnings(sample_files),
    ]
    notes = [f"warning: {warning}" for warning in warnings]
    notes += [
        "difference: to the first; * beyond noise, corrected p below 0.05 (over problems, Holm: the exact sign-flip"
        f" test where at most {statistics.MOST_FLIPPED} of them differ or all by the same, else a paired t test).",
        "could be seen: the smallest true difference that this many problems would show in four of five repetitions; –"
        " where even 1 might not be.",
    ]
    if len(sizes) > 1:
        notes.append(
            "Cover@τ: files differ in their number of responses, so for each problem it is the mean over all choices of"
            " as many responses as every file has."
        )
    return [*head, "", *text_table(rows, left=2), "", *notes]


def _range(sizes: Collection[int]) -> str:
    """``8`` for one size, ``4 to 8`` for several."""
    return str(min(sizes)) if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"


def _rows(
    files: Sequence[SampleFile],
    counts_by_file: Sequence[Sequence[tuple[int, int]]],
    unscored_by_file: Sequence[Mapping[str, float | None]],
    measures_by_name: Mapping[str, Measure],
) -> list[list[str]]:
    """The table: a heading, then a row for each measure of each file.

    ``counts_by_file``: the number of responses to each common problem, and of right ones.
    """
    # For each problem the number of responses that every file has at least.
    common = [min(n for n, _ in of_problem) for of_problem in zip(*counts_by_file)]
    heads = ["measure", "of", "value [95%]", "cut / unreadable / timed out"]
    rows = [[*heads, "difference [95%]", "corrected p", "could be seen"]]
    for name, measure in measures_by_name.items():
        tables = []  # of each file, problems × 1
        for counts in counts_by_file:
            values = [measure(n, c, m) for (n, c), m in zip(counts, common)]
            tables.append(np.array([[value] for value in values]))
        differences = [statistics.paired(table, tables[0], of_problems=True) for table in tables[1:]]
        statistics.correct(differences)
        for file, table, unscored_shares, difference in zip(files, tables, unscored_by_file, [None, *differences]):
            value = statistics.in_words(statistics.interval(table, share=True))
            rows.append([name, file.name, value, shares(unscored_shares), *_difference_cells(difference)])
    return rows


def _sample_warnings(files: Sequence[SampleFile], unscored_by_file: Sequence[Mapping[str, float | None]]) -> list[str]:
    """A warning for each evaluation that is unfinished, or has many responses that a score says little of."""
    warnings = []
    for file, unscored_shares in zip(files, unscored_by_file):
        if file.missing:
            warnings.append(
                f"{file.name} is unfinished: {file.missing} samples are missing. Long responses finish last,"
                " so that short ones count too much. Run its ngrpo eval again, which goes on."
            )
        warnings += unscored_warnings(file.name, unscored_shares)
    return warnings


def _setting_warnings(files: Sequence[SampleFile]) -> list[str]:
    """A warning for each setting of sampling or scoring in which an evaluation differs from the first."""
    warnings = []
    first, *others = files
    first_settings = _compared(first)
    for file in others:
        for name, value in _compared(file).items():
            first_value = first_settings.get(name, value)
            if value != first_value:
                warnings.append(f"{file.name} has {name} {value}, and {first.name} has {first_value}.")
    return warnings


def _prompt_warnings(files: Sequence[SampleFile], problems: Sequence[tuple[str, ...]]) -> list[str]:
    """A warning for each evaluation whose prompts, as its model read them, are others than the first one's."""
    first, *others = files
    warnings = []
    for number, file in enumerate(others, start=1):
        unlike = 0
        for names in problems:
            prompt = file.texts.prompt.get(names[number])
            first_prompt = first.texts.prompt.get(names[0])
            unlike += prompt is not None and first_prompt is not None and prompt[0] != first_prompt[0]
        if unlike:
            warnings.append(
                f"{file.name} rendered {unlike} of {len(problems)} prompts otherwise than {first.name}, as another chat"
                " template does."
            )
    return warnings


def _condition_warnings(files: Sequence[SampleFile]) -> list[str]:
    """A warning where the evaluations were drawn with other releases, other code or on other hardware."""
    if len(files) == 1:
        return []
    differences = differing_conditions(recorded for file in files for recorded in file.drawn_by)
    return [f"the responses were drawn with different {', '.join(differences)}."] if differences else []


def _compared(file: SampleFile) -> dict[str, Any]:
    """The settings in which two evaluations should agree, by name: how responses are drawn and judged."""
    sampling = {name: value for name, value in file.settings.get("sampling", {}).items() if name != "seed"}
    engine = {}
    if "engine" in file.settings:
        for option, default in _NUMERICS.items():
            engine[f"the engine's {option}"] = file.settings["engine"].get(option, default)
    scorers = {"the scorer": file.settings["scorer"]} if "scorer" in file.settings else {}
    digest_by_path = file.settings.get("scorer_files", {})
    digests = {f"the content of {path}": digest[:12] for path, digest in digest_by_path.items()}
    return {**sampling, **engine, **scorers, **digests}


def _with_names(paths: Sequence[str], files: Sequence[SampleFile]) -> list[SampleFile]:
    """The files under names that differ: those of folders with one name are called by their paths."""

    def some_are_equal(files: Sequence[SampleFile]) -> bool:
        return len({file.name for file in files}) < len(files)

    if some_are_equal(files):
        # A path of the form NAME=PATH has a name of the user's, which stays.
        files = [file._replace(name=path) if Path(path).exists() else file for file, path in zip(files, paths)]
    if some_are_equal(files):
        raise UsageError(f"{' '.join(paths)}: two have one name. Give each another: a=DIR b=DIR.")
    return list(files)


def _nothing_in_common(paths: Sequence[str], files: Sequence[SampleFile]) -> UsageError:
    fix = "give evaluations of the same problems, with the same --instruction"
    without_texts = [path for path, file in zip(paths, files) if not any(file.texts)]
    if without_texts:
        fix = f"{' and '.join(without_texts)} has neither. Give an evaluation's folder, or each line a 'prompt'"
    return UsageError(
        f"{' and '.join(paths)} have no problem in common. Problems are paired by their text and reference, or by"
        f" the prompts in the files: {fix}."
    )


def _difference_cells(difference: statistics.Interval | None) -> list[str]:
    """The difference, its corrected p-value with a star beyond noise, and what could be seen."""
    if difference is None:
        return ["", "", ""]
    p = difference.get("p_corrected")
    p_text = "–"
    if p is not None:
        p_text = f"{p:.3f}" if p >= 0.001 else "<0.001"
    star = "" if difference["within_noise"] else " *"
    detectable = difference.get("detectable")
    seen = "–" if detectable is None else f"{detectable:.3f}"
    return [statistics.in_words(difference, "+.3f"), p_text + star, seen]


def _paired(files: Sequence[SampleFile]) -> tuple[str, list[tuple[str, ...]]]:
    """How problems are paired, and for each common problem its id in each file.

    A question with two references is two problems, so prompts alone pair only where a file has no references.
    """
    all_have_references = all(file.texts.messages_and_reference for file in files)
    ways = [
        ("their text", [file.texts.messages_and_reference for file in files]),
        ("their prompt", [file.texts.prompt_and_reference for file in files]),
    ]
    if not all_have_references:
        ways.append(("their prompt", [file.texts.prompt for file in files]))
    for how, texts in ways:
        # By file, its problems by their texts.
        problem_of_text = [{text: problem for problem, text in of_file.items()} for of_file in texts]
        first, *others = problem_of_text
        common = [text for text in first if all(text in of_file for of_file in others)]
        if common:
            return how, [tuple(of_file[text] for of_file in problem_of_text) for text in common]
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
            raise UsageError(
                f"{file}: problem {row['problem']!r}, sample {row.get('sample')}: 'correct' is {row['correct']!r}, and"
                " must be true or false."
            )
        by_problem[row["problem"]].append(row)
    listed = folder.lines(PROBLEMS, "id", "messages", mend=False) if file.name == SAMPLES else []
    messages = {row["id"]: json.dumps(row["messages"]) for row in listed if row["id"] in by_problem}
    references = {row["id"]: json.dumps(row.get("answer")) for row in listed}
    prompts = {row["problem"]: row["prompt"] for row in rows if "prompt" in row}

    def with_reference(texts: Mapping[str, str]) -> dict[str, str]:
        return {problem: f"{text}\n{references[problem]}" for problem, text in texts.items() if problem in references}

    settings = (folder.read(SETTINGS) if file.name == SAMPLES else None) or {}
    counts = {}
    for problem, of_problem in by_problem.items():
        counts[problem] = (len(of_problem), sum(int(row["correct"]) for row in of_problem))
    return SampleFile(
        name=name or (file.parent.name if file.name == SAMPLES else file.name),
        rows=by_problem,
        counts=counts,
        texts=Texts(
            messages_and_reference=_numbered(with_reference(messages)),
            prompt_and_reference=_numbered(with_reference(prompts)),
            prompt=_numbered(prompts),
        ),
        missing=settings["problems"] * settings["n"] - len(rows) if "n" in settings else 0,
        settings=settings,
        drawn_by=drawn_by(folder) if file.name == SAMPLES else (),
    )


def _numbered(texts: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Each problem's text with the number of equal ones before it."""
    count_before: Counter[str] = Counter()
    numbered = {}
    for problem, text in texts.items():
        numbered[problem] = (text, count_before[text])
        count_before[text] += 1
    return numbered


def measures(k: str | None, tau: str | None, fewest: int) -> dict[str, Measure]:
    """Mean@n, each Pass@k and each Cover@τ by name; the arguments are as in :func:`lines`.

    Cover@τ: whether at least the fraction τ is right (Dragoi et al. 2025, arXiv 2510.08325). It depends on n, so it is
    :func:`cover` of the m responses that all files have.
    """
    ks: Sequence[int] = [k for k in DEFAULT_KS if 1 < k <= fewest]
    if k is not None:
        ks = _numbers("--k", k, int, example="1,8")
    taus: Sequence[float] = _TAUS if fewest > 1 else ()
    if tau is not None:
        taus = _numbers("--tau", tau, float, example="0.25,0.5")
    for number in ks:
        if not 1 <= number <= fewest:
            raise UsageError(f"--k {number}: must be in [1, {fewest}], the responses that each problem has.")
    for fraction in taus:
        if not 0.0 < fraction <= 1.0:
            raise UsageError(f"--tau {fraction:g}: must be in (0, 1].")
    measures: dict[str, Measure] = {"mean": lambda n, c, m: c / n}
    for number in ks:
        measures[f"Pass@{number}"] = partial(_pass_at, number)
    for fraction in taus:
        measures[f"Cover@{fraction:g}"] = partial(cover, tau=fraction)
    return measures


def _numbers(flag: str, text: str, kind: type, *, example: str) -> list[Any]:
    """The numbers of a flag, sorted, each once."""
    try:
        return sorted({kind(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"{flag} {text}: must be numbers with commas between, such as {example}.") from None


def _pass_at(k: int, n: int, c: int, m: int) -> float:
    return statistics.pass_at_k(n, c, k)


def cover(n: int, c: int, m: int, tau: float) -> float:
    """The chance that of m of n responses, c of them right, at least the fraction τ is right; exact as Pass@k is."""
    ways = 0
    for right in range(m + 1):
        if right / m >= tau:
            ways += math.comb(c, right) * math.comb(n - c, m - right)
    return ways / math.comb(n, m)
