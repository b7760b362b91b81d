# SPDX-License-Identifier: Apache-2.0
"""The head of a report and its tables: what was compared, what failed, the finding, and the cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ngrpo.config import stretches
from ngrpo.config.arms import is_of_method
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.workbench.report import values
from ngrpo.workbench.report.drawing import Series, by_series
from ngrpo.workbench.report.values import dig, format_number, number, rows
from ngrpo.workbench.statistics import ENOUGH_SEEDS

_MOST_NAMES = 4
_MOST_K = 4
# The picture of a difference is 200 wide. No difference is in its middle, the largest one _HALF away from it.
_MIDDLE = 100.0
_HALF = 92.0
UNCORRECTED = (
    "Each difference is judged alone at 95%, whatever the number of arms: of twenty comparisons of equal arms, about"
    " one is called different by chance."
)
Summary = Mapping[str, Mapping[str, Any]]
"""The summary's rows by the id of their arm."""


class Metric(NamedTuple):
    """A column: its heading, and the keys of its value in a row of the summary."""

    heading: str
    keys: tuple[str, ...]


def _named(names: Sequence[object]) -> str:
    """A few names with commas and an "and", or their number; a name with blanks stays on one line."""
    if not 0 < len(names) <= _MOST_NAMES:
        return values.plural(len(names), "arm")
    *others, last = (str(name).replace(" ", "\u00a0") for name in names)
    return f"{', '.join(others)} and {last}" if others else last


def comparison(results: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any]:
    """Title, facts, failures, the finding in one sentence, each difference to the baseline, and the table."""
    runs = rows(results, "runs")
    seeds = list(dict.fromkeys(values.shown(run.get("seed")) for run in runs))
    states = Counter(run.get("status") for run in runs)
    counts = [f"{states[state]} {state}" for state in ("done", "failed", "pending") if states[state]]
    summary = by_arm(results)
    baseline = str(results.get("baseline"))
    metrics = evaluated(results, summary)
    deciding = metrics[0] if metrics else None
    metric = deciding or Metric("Mean@n", ("mean_at_n",))
    return {
        "title": _title(results),
        "facts": {
            "Model": results.get("model"),
            "Task": results.get("task"),
            "Machine": _machine(results),
            "Seeds": f"{len(seeds)} ({', '.join(seeds)})" if seeds else None,
            "Runs": ", ".join(counts) or "none",
            "Made": _created(results),
        },
        "runs": len(runs),
        "failed": [{**run, "error": _cause(run)} for run in runs if run.get("status") == "failed"],
        "pending": states["pending"],
        "warnings": results.get("warnings"),
        "few_seeds": len(seeds) if 0 < len(seeds) < ENOUGH_SEEDS else None,
        "sentence": sentence(summary, baseline, deciding),
        "trained_otherwise": trained_otherwise(results),
        "forest": forest(series, summary, baseline, metric) if baseline in summary else [],
        "measure": metric.heading,
        "baseline": baseline,
        "table": _table(results, series, summary, metrics),
    }


def _title(results: Mapping[str, Any]) -> str:
    baseline = results.get("baseline")
    others = [row.get("id") for row in rows(results, "strategies") if row.get("id") != baseline]
    if not others:
        return _named([baseline or "Comparison"])
    if baseline:
        return f"{_named(others)} against {_named([baseline])}"
    return f"{_named(others)} against each other" if len(others) > _MOST_NAMES else _named(others)


def _created(results: Mapping[str, Any]) -> str:
    """The time of the start for people, from ``2026-11-22T05:50:00+0000``; empty where it is not stated."""
    created = results.get("created") or ""
    if not created:
        return ""
    zone = created[19:]
    return f"{created[:10]} {created[11:16]} {'UTC' if zone in ('+0000', '+00:00') else zone}"


def _cause(run: Mapping[str, Any]) -> str:
    """The line of a failed run's error that names the cause: the first of ours, the last of a traceback."""
    lines = str(run.get("error") or "").strip().splitlines() or ["no error was recorded"]
    is_ours = lines[0].startswith(("error: ", "training failed: "))
    return values.shortened(lines[0] if is_ours else lines[-1], 160)


def _table(
    results: Mapping[str, Any], series: Mapping[str, Series], summary: Summary, metrics: Sequence[Metric]
) -> dict[str, Any]:
    """The summary's rows, with what the tables of results and of cost show in addition."""
    changes = [dig(row, "difference", "mean_at_n") for row in summary.values()]
    detectable = [value for change in changes if (value := number(change, "detectable"))]
    ends = [format_number(end) for end in (min(detectable), max(detectable))] if detectable else []
    arms = rows(results, "strategies")
    return {
        "listed": [(arm_series, summary[name]) for name, arm_series in series.items() if name in summary],
        "metrics": metrics,
        "baseline": results.get("baseline"),
        "perturbed": [row.get("id") for row in arms if row.get("perturbation") is not None],
        "over": [dig(row, "mean_at_n", "over") for row in summary.values()],
        "comparisons": max((number(change, "comparisons") or 0 for change in changes), default=0),
        "detectable": " to ".join(dict.fromkeys(ends)),
        "untrained": results.get("untrained"),
    }


def training(summary: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any]:
    """Title and facts of one run: machine, time, and each evaluated metric before and after."""
    facts = {"Machine": _machine(summary), "Seed": summary.get("seed"), "Took": values.duration(summary.get("seconds"))}
    for tag, by_step in (summary.get("evaluation") or {}).items():
        metric = tag.rpartition("/")[2]
        if by_step and "_pass" in metric:
            facts[metric] = values.first_and_last(by_step)
    settings = [f"from step {line}" for line in stretches.described(rows(summary, "stretches"))]
    facts["Settings"] = "; ".join(settings) or None
    return {"title": next(iter(series)), "facts": facts}


def diagnosis(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any]:
    """Title, facts, warnings, and each arm's diversity and validity: as a table, and against the unperturbed."""
    arms = rows(diagnosis, "strategies")
    prompts = number(diagnosis.get("prompts"))
    group = number(diagnosis.get("group"))
    sampled = None if prompts is None or group is None else f"{prompts:,.0f} problems × {group:.0f} responses"
    # Without an unperturbed arm, the others are compared with the first one.
    baseline = next((row for row in arms if row.get("name") == diagnosis.get("baseline")), arms[0] if arms else {})
    listed = by_series(diagnosis, series)
    verdicts = []
    for arm_series, row in listed:
        if row is not baseline:
            diverse = _against(row, baseline, "diversity", "diverse")
            valid = _against(row, baseline, "validity", "valid")
            verdicts.append((arm_series, f"{diverse}; {valid}."))
    return {
        "title": f"Before any training: {_named([row.get('name') for row in arms])}",
        "facts": {
            "Model": diagnosis.get("model"),
            "Dataset": diagnosis.get("dataset"),
            "Sampled": sampled,
            "Machine": _machine(diagnosis),
            "Took": values.duration(diagnosis.get("seconds")),
        },
        "warnings": diagnosis.get("warnings"),
        "beside": baseline.get("name"),
        "verdicts": verdicts,
        "uncorrected": UNCORRECTED,
        "table": {"listed": listed} if listed else None,
    }


def _against(row: Mapping[str, Any], baseline: Mapping[str, Any], axis: str, adjective: str) -> str:
    """``more diverse (0.61 against 0.35)``, or that the paired difference is within noise.

    A diagnosis without paired differences, which has no unperturbed arm, says instead whether the intervals overlap.
    """
    score = number(row, axis, "score")
    baseline_score = number(baseline, axis, "score")
    if score is None or baseline_score is None:
        return f"{axis} unknown"
    pair = f"{format_number(score)} against {format_number(baseline_score)}"
    within_noise = dig(row, "difference", axis, "within_noise")
    if within_noise:
        return f"{axis} {pair}, within noise"
    interval = values.ends(dig(row, "intervals", axis))
    baseline_interval = values.ends(dig(baseline, "intervals", axis))
    if within_noise is None and interval and baseline_interval and _overlap(interval, baseline_interval):
        return f"{axis} {pair}, the intervals overlap"
    if score == baseline_score:
        return f"equally {adjective} ({pair})"
    return f"{'more' if score > baseline_score else 'less'} {adjective} ({pair})"


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _machine(source: Mapping[str, Any]) -> str | None:
    facts = [source.get("hardware"), dig(source, "machine", "cpu"), dig(source, "machine", "gpu")]
    cores = number(source, "machine", "cores")
    if cores is not None:
        facts.append(f"{cores:.0f} cores")
    return ", ".join(str(fact) for fact in facts if fact) or None


class Row(NamedTuple):
    """One arm's line of the picture of differences, which is 200 wide; 100 is no difference.

    Attributes:
        series: the arm.
        text: its difference, or why there is none.
        hint: the tooltip's lines.
        at: the place of its difference; None where nothing was compared.
        ends: the places of its interval's ends.
        band: a difference between these places would often have been missed with as many seeds.
    """

    series: Series
    text: str
    hint: Sequence[str]
    at: float | None = None
    ends: tuple[float, float] | None = None
    band: tuple[float, float] | None = None


def forest(series: Mapping[str, Series], summary: Summary, baseline: str, metric: Metric) -> list[Row]:
    """A line for each arm but the baseline, the best first, those without a difference last."""
    changes = {arm: dig(row, "difference", *metric.keys) or {} for arm, row in summary.items() if arm != baseline}
    lengths = [number(change.get(key)) for change in changes.values() for key in ("value", "low", "high", "detectable")]
    longest = max((abs(length) for length in lengths if length), default=1.0)

    def place(difference: float) -> float:
        return round(_MIDDLE + _HALF * difference / longest, 1)

    def best_first(arm: str) -> tuple[bool, float]:
        value = number(changes[arm].get("value"))
        return value is None, -(value or 0.0)

    lines = []
    for arm in sorted(changes, key=best_first):
        change = changes[arm]
        value = number(change.get("value"))
        verdict = str(summary[arm].get("verdict") or values.MISSING)
        if value is None:
            lines.append(Row(series[arm], text=verdict, hint=(arm, verdict)))
            continue
        low = number(change.get("low"))
        high = number(change.get("high"))
        detectable = number(change.get("detectable"))
        text = f"{values.with_ends(value, low, high, sign=True)}, {values.noise(change) or values.MISSING}"
        hint = [arm, f"{metric.heading} {text}", verdict]
        if detectable is not None:
            hint.append(f"a difference below about {format_number(detectable)} would often have been missed")
        lines.append(
            Row(
                series[arm],
                text=text,
                hint=hint,
                at=place(value),
                ends=None if low is None or high is None else (place(low), place(high)),
                band=None if detectable is None else (place(-detectable), place(detectable)),
            )
        )
    return lines


def sentence(summary: Summary, baseline: str, metric: Metric | None) -> str | None:
    """The arms that are better or worse than the baseline beyond noise; None where nothing was compared.

    One measure decides. If others added their findings, each corrected for its own comparisons alone, the sentence
    would call an equal arm different more often than once in twenty comparisons.
    """
    arms = [arm for arm in summary if arm != baseline]
    if not arms or metric is None or baseline not in summary:
        return None
    against = f"“{baseline}” in {metric.heading}"
    changes = {arm: dig(summary[arm], "difference", *metric.keys) for arm in arms}
    tested = {arm: change for arm, change in changes.items() if values.noise(change)}
    if not tested:
        return f"Nothing could be compared with {against}: no evaluation has finished for both."
    with_few_seeds = [arm for arm, change in tested.items() if values.has_few_seeds(change)]
    if len(with_few_seeds) == len(tested):
        return f"Fewer than {ENOUGH_SEEDS} seeds each: no arm can be called better or worse than {against}."

    beyond_noise = {arm: change for arm, change in tested.items() if values.noise(change) == "beyond noise"}
    better = [arm for arm, change in beyond_noise.items() if (number(change, "value") or 0.0) > 0]
    worse = [arm for arm, change in beyond_noise.items() if (number(change, "value") or 0.0) < 0]
    if better:
        text = f"Better than {against} beyond noise: {', '.join(better)}"
    elif len(arms) == 1:
        text = f"{arms[0]} is not better than {against} beyond noise"
    else:
        text = f"None of {len(arms)} arms is better than {against} beyond noise"
    if worse:
        text += f"; worse: {', '.join(worse)}"
    missing = len(arms) - len(tested)
    text += f" ({values.plural(missing, 'arm')} could not be compared)." if missing else "."
    if with_few_seeds:
        text += f" Fewer than {ENOUGH_SEEDS} seeds, and so not judged: {', '.join(with_few_seeds)}."
    left_out = values.failed_runs({arm: summary[arm].get("failed") or () for arm in (*better, *worse, baseline)})
    if (better or worse) and left_out:
        text += f" Failed runs are left out: {left_out}."
    return text


def trained_otherwise(results: Mapping[str, Any]) -> list[str]:
    """The arms that differ from the baseline in more than their methods, a line for those that differ in the same.

    An arm may have any flag of the training, such as another model, dataset, reward or length. Dynamic filtering, too,
    leaves arms of one command with different numbers of steps.
    """
    baseline = str(results.get("baseline"))
    facts_by_arm = _facts_of_training(results)
    if baseline not in facts_by_arm:
        return []
    arms_by_difference: dict[str, list[str]] = {}
    for arm, facts in facts_by_arm.items():
        differences = []
        for name, value in facts.items():
            value_of_baseline = facts_by_arm[baseline].get(name, value)
            if value != value_of_baseline:
                differences.append(f"{name} {_flag_value(value)} ({baseline}: {_flag_value(value_of_baseline)})")
        if differences:
            arms_by_difference.setdefault(", ".join(differences), []).append(arm)
    return [f"{', '.join(arms)}: {difference}" for difference, arms in arms_by_difference.items()]


def _facts_of_training(results: Mapping[str, Any]) -> dict[str, dict[str, str | None]]:
    """By arm, the value of each flag that an arm sets and that chooses no method, and the numbers of its steps."""
    shared = Flags(results.get("openrlhf_args") or ())
    settings_by_arm = {str(row.get("id")): row.get("settings") or {} for row in rows(results, "strategies")}
    keys: dict[str, None] = {}  # in the order of the arms
    for settings in settings_by_arm.values():
        keys |= dict.fromkeys(key for key in settings if not is_of_method(key))
    step_counts: dict[str, set[int]] = {}
    for run in rows(results, "runs"):
        if run.get("steps"):
            step_counts.setdefault(run["strategy"], set()).add(len(run["steps"]))

    facts_by_arm = {}
    for arm, settings in settings_by_arm.items():
        facts = {f"--{key}": settings.get(key, shared.value(f"--{key}")) for key in keys}
        if arm in step_counts:
            facts["training steps"] = " or ".join(map(str, sorted(step_counts[arm])))
        facts_by_arm[arm] = facts
    return facts_by_arm


def _flag_value(value: str | None) -> str:
    """The value of a flag; a switch has none."""
    return "not given" if value is None else value or "on"


def by_arm(results: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The rows of the summary, by the id of an arm of the comparison."""
    ids = {str(row.get("id")) for row in rows(results, "strategies")}
    summary = {str(row.get("strategy")): row for row in rows(results, "summary")}
    return {arm: row for arm, row in summary.items() if arm in ids}


def evaluated(results: Mapping[str, Any], summary: Summary) -> list[Metric]:
    """The evaluation's columns. Pass@1 is Mean@n; of many k a few are enough for a table."""
    metrics: list[Metric] = []
    if any(number(row, "mean_at_n", "value") is not None for row in summary.values()):
        counts = {number(run, "evaluation", "n") for run in rows(results, "runs")} - {None}
        heading = f"Mean@{counts.pop():.0f}" if len(counts) == 1 else "Mean@n"
        metrics.append(Metric(heading, ("mean_at_n",)))
    ks = sorted({k for row in summary.values() for k in row.get("pass_at_k") or ()}, key=int)
    if metrics and "1" in ks:
        ks.remove("1")
    if len(ks) > _MOST_K:
        ks = [ks[index * (len(ks) - 1) // (_MOST_K - 1)] for index in range(_MOST_K)]
    return metrics + [Metric(f"Pass@{k}", ("pass_at_k", k)) for k in ks]
