# SPDX-License-Identifier: Apache-2.0
"""The head of a report and its tables: what was compared, what failed, what was found, and what it cost."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ngrpo.config import stretches
from ngrpo.workbench.report import values
from ngrpo.workbench.report.drawing import Series, by_series
from ngrpo.workbench.report.values import dig, format_number, number, rows
from ngrpo.workbench.statistics import ENOUGH_SEEDS

_MOST_NAMES = 4
_MOST_K = 4
_MIDDLE, _HALF = 100.0, 92.0  # of a drawing 200 wide
# A column: its heading, and the keys of its value in a row of the summary.
Metric = tuple[str, tuple[str, ...]]
Summary = Mapping[str, Mapping[str, Any]]


def _named(names: Sequence[object]) -> str:
    """A few names with commas and an "and", none in two lines where it can be avoided; of more the number."""
    if not 0 < len(names) <= _MOST_NAMES:
        return values.plural(len(names), "strategy")
    *others, last = (str(name).replace(" ", "\u00a0") for name in names)
    return f"{', '.join(others)} and {last}" if others else last


def comparison(results: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any]:
    """Title, facts, failures, what was found in one sentence, each difference to the baseline, and the table."""
    runs, first = rows(results, "runs"), results.get("baseline")
    others = [row.get("id") for row in rows(results, "strategies") if row.get("id") != first]
    against = first or (len(others) > _MOST_NAMES and "each other")
    title = _named(others) + (f" against {_named([against])}" if against else "")
    seeds = list(dict.fromkeys(values.shown(run.get("seed")) for run in runs))
    states = Counter(run.get("status") for run in runs)
    failed = []
    for run in runs:
        if run.get("status") == "failed":
            lines = str(run.get("error") or "").strip().splitlines() or ["no error was recorded"]
            # The line that names the cause: the first one of ours, the last one of a traceback.
            ours = lines[0].startswith(("error: ", "training failed: "))
            failed.append({**run, "error": values.shortened(lines[0 if ours else -1], 160)})
    created = results.get("created") or ""  # 2026-11-22T05:50:00+0000
    zone = "UTC" if created[19:] in ("+0000", "+00:00") else created[19:]
    summary, baseline = by_strategy(results), str(results.get("baseline"))
    metrics = evaluated(results, summary)
    measure = (metrics or [("Mean@n", ("mean_at_n",))])[0]
    changes = [dig(row, "difference", "mean_at_n") for row in summary.values()]
    least = [value for change in changes if (value := number(change, "detectable"))]
    reach = dict.fromkeys(format_number(end) for end in (min(least), max(least))) if least else ()
    return {
        "title": title if others else _named([first or "Comparison"]),
        "facts": {
            "Model": results.get("model"),
            "Task": results.get("task"),
            "Machine": _machine(results),
            "Seeds": f"{len(seeds)} ({', '.join(seeds)})" if seeds else None,
            "Runs": ", ".join(f"{states[key]} {key}" for key in ("done", "failed", "pending") if states[key]) or "none",
            "Made": created and f"{created[:10]} {created[11:16]} {zone}",
        },
        "runs": len(runs),
        "failed": failed,
        "pending": states["pending"],
        "warnings": results.get("warnings"),
        "one_seed": len(seeds) == 1,
        "sentence": sentence(summary, baseline, metrics),
        "forest": forest(series, summary, baseline, measure) if baseline in summary else [],
        "measure": measure[0],
        "baseline": baseline,
        # The summary's rows with what their tables show in addition.
        "table": {
            "listed": [(one, summary[name]) for name, one in series.items() if name in summary],
            "metrics": metrics,
            "baseline": first,
            "perturbed": [row.get("id") for row in rows(results, "strategies") if row.get("perturbation") is not None],
            "over": [dig(row, "mean_at_n", "over") for row in summary.values()],
            "comparisons": max((number(change, "comparisons") or 0 for change in changes), default=0),
            "detectable": " to ".join(reach),
            "untrained": results.get("untrained"),
        },
    }


def training(summary: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any]:
    """Title and facts of one run: machine, time, and each evaluated metric before and after."""
    facts = {"Machine": _machine(summary), "Seed": summary.get("seed"), "Took": values.duration(summary.get("seconds"))}
    curves = {tag.rpartition("/")[2]: by_step for tag, by_step in (summary.get("evaluation") or {}).items() if by_step}
    facts |= {name: values.first_and_last(of) for name, of in curves.items() if "_pass" in name}
    facts["Settings"] = (
        "; ".join(f"from step {line}" for line in stretches.described(rows(summary, "stretches"))) or None
    )
    return {"title": next(iter(series)), "facts": facts}


def diagnosis(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any]:
    """Title, facts, warnings, and each strategy's diversity and validity: as a table, and against the unperturbed."""
    strategies = rows(diagnosis, "strategies")
    prompts, group = number(diagnosis.get("prompts")), number(diagnosis.get("group"))
    named = [row for row in strategies if row.get("name") == diagnosis.get("baseline")]
    baseline = [*named, *strategies, {}][0]
    listed = by_series(diagnosis, series)
    return {
        "title": f"Before any training: {_named([row.get('name') for row in strategies])}",
        "facts": {
            "Model": diagnosis.get("model"),
            "Dataset": diagnosis.get("dataset"),
            "Sampled": None if prompts is None or group is None else f"{prompts:,.0f} problems × {group:.0f} responses",
            "Machine": _machine(diagnosis),
            "Took": values.duration(diagnosis.get("seconds")),
        },
        "warnings": diagnosis.get("warnings"),
        "beside": baseline.get("name"),
        "verdicts": [
            (one, f"{_against(row, baseline, 'diversity', 'diverse')}; {_against(row, baseline, 'validity', 'valid')}.")
            for one, row in listed
            if row is not baseline
        ],
        "table": {"listed": listed} if listed else None,
    }


def _against(row: Mapping[str, Any], baseline: Mapping[str, Any], axis: str, adjective: str) -> str:
    """``more diverse (0.61 against 0.35)``, or that the intervals overlap."""
    one, other = number(row, axis, "score"), number(baseline, axis, "score")
    if one is None or other is None:
        return f"{axis} unknown"
    pair = f"{format_number(one)} against {format_number(other)}"
    own, others = values.ends(dig(row, "intervals", axis)), values.ends(dig(baseline, "intervals", axis))
    if own and others and own[0] <= others[1] and others[0] <= own[1]:
        return f"{axis} {pair}, the intervals overlap"
    how = "equally" if one == other else "more" if one > other else "less"
    return f"{how} {adjective} ({pair})"


def _machine(source: Mapping[str, Any]) -> str | None:
    cores = number(source, "machine", "cores")
    facts = [source.get("hardware"), dig(source, "machine", "cpu"), dig(source, "machine", "gpu")]
    facts += [None if cores is None else f"{cores:.0f} cores"]
    return ", ".join(str(fact) for fact in facts if fact) or None


class Row(NamedTuple):
    """One strategy's line of the picture of differences, which is 200 wide; 100 is no difference.

    ``hint``: the tooltip's lines; ``at``: the place of its difference, None where nothing was compared; ``ends``: its
    interval's; between the places of ``band`` these seeds would often have missed a difference.
    """

    series: Series
    text: str
    hint: Sequence[str]
    at: float | None = None
    ends: tuple[float, float] | None = None
    band: tuple[float, float] | None = None


def forest(series: Mapping[str, Series], summary: Summary, baseline: str, metric: Metric) -> list[Row]:
    """A line for each strategy but the baseline, the best first, those without a difference last."""
    measure, keys = metric
    changes = {name: dig(row, "difference", *keys) or {} for name, row in summary.items() if name != baseline}
    found = {name: number(change.get("value")) for name, change in changes.items()}
    lengths = [number(change.get(key)) for change in changes.values() for key in ("value", "low", "high", "detectable")]
    reach = max((abs(length) for length in lengths if length), default=1.0)

    def beside(value: float) -> float:
        return round(_MIDDLE + _HALF * value / reach, 1)

    lines = []
    for name in sorted(changes, key=lambda name: (found[name] is None, -(found[name] or 0.0))):
        change, value, verdict = changes[name], found[name], str(summary[name].get("verdict") or values.MISSING)
        if value is None:
            lines.append(Row(series[name], verdict, (name, verdict)))
            continue
        low, high, least = (number(change.get(key)) for key in ("low", "high", "detectable"))
        text = f"{values.with_ends(value, low, high, sign=True)}, {values.noise(change) or values.MISSING}"
        missed = f"a difference below about {format_number(least)} would often have been missed"
        hint = [name, f"{measure} {text}", verdict, *([] if least is None else [missed])]
        interval = None if low is None or high is None else (beside(low), beside(high))
        band = None if least is None else (beside(-least), beside(least))
        lines.append(Row(series[name], text, hint, beside(value), interval, band))
    return lines


def sentence(summary: Summary, baseline: str, metrics: Sequence[Metric]) -> str | None:
    """The strategies that are better or worse than the baseline beyond noise; None where nothing was compared.

    The first of ``metrics`` decides; a later one adds strategies that are not named yet.
    """
    names = [name for name in summary if name != baseline]
    if not names or not metrics or baseline not in summary:
        return None
    measure, keys = metrics[0]
    against = f"“{baseline}” in {measure}"
    tested = [change for name in names if values.noise(change := dig(summary[name], "difference", *keys))]
    if not tested:
        return f"Nothing could be compared with {against}: no evaluation has finished for both."
    if all(change.get("over") == "problems" for change in tested):
        return f"One seed each: no strategy can be called better or worse than {against}."
    found = []
    for _, keys in metrics:
        changes = {name: dig(summary[name], "difference", *keys) for name in names}
        clear = {name: number(c, "value") or 0.0 for name, c in changes.items() if values.noise(c) == "beyond noise"}
        found.append(([name for name in clear if clear[name] > 0], [name for name in clear if clear[name] < 0]))
    better, worse = found[0]
    if better:
        text = f"Better than {against} beyond noise: {', '.join(better)}"
    elif len(names) == 1:
        text = f"{names[0]} is not better than {against} beyond noise"
    else:
        text = f"None of {len(names)} strategies is better than {against} beyond noise"
    if worse:
        text += f"; worse: {', '.join(worse)}"
    for (other, _), sides in zip(metrics[1:], found[1:]):
        for word, known, named in zip(("better", "worse"), found[0], sides):
            new = [name for name in named if name not in known]
            text += f"; {word} in {other}: {', '.join(new)}" if new else ""
    missing = len(names) - len(tested)
    text += f" ({values.plural(missing, 'strategy')} could not be compared)." if missing else "."
    seeds = [change.get("seeds") or ENOUGH_SEEDS for change in tested if values.noise(change) == "beyond noise"]
    fewest = min(seeds, default=ENOUGH_SEEDS)
    if fewest < ENOUGH_SEEDS:
        text += f" Of {values.plural(fewest, 'seed')}: too few to tell a method from luck."
    return text


def by_strategy(results: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The rows of the summary, by the name of a strategy of the comparison."""
    ids = {str(row.get("id")) for row in rows(results, "strategies")}
    return {name: row for row in rows(results, "summary") if (name := str(row.get("strategy"))) in ids}


def evaluated(results: Mapping[str, Any], summary: Summary) -> list[Metric]:
    """The evaluation's columns. Pass@1 is Mean@n; of many k a few are enough for a table."""
    columns: list[Metric] = []
    if any(number(row, "mean_at_n", "value") is not None for row in summary.values()):
        counts = {number(run, "evaluation", "n") for run in rows(results, "runs")} - {None}
        columns.append((f"Mean@{counts.pop():.0f}" if len(counts) == 1 else "Mean@n", ("mean_at_n",)))
    ks = sorted({k for row in summary.values() for k in row.get("pass_at_k") or ()}, key=int)
    if columns and "1" in ks:
        ks.remove("1")
    if len(ks) > _MOST_K:
        ks = [ks[i * (len(ks) - 1) // (_MOST_K - 1)] for i in range(_MOST_K)]
    return columns + [(f"Pass@{k}", ("pass_at_k", k)) for k in ks]
