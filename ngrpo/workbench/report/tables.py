# SPDX-License-Identifier: Apache-2.0
"""The results table and the cost table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ngrpo.workbench.report.forest import Metric
from ngrpo.workbench.report.marks import Series
from ngrpo.workbench.report.values import dig, figure, number, plural, rows, size

_MOST_K = 4
_COSTS = (("tokens_per_second", 1), ("step_seconds", 2), ("memory_bytes", None))


def results_table(results: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any]:
    """Per strategy: Mean@n and Pass@k with interval and difference to the baseline, and how its own reward changed."""
    summary = by_strategy(results)
    if not summary:
        return {"listed": []}
    metrics = evaluated(results, summary)
    perturbed = {str(row.get("id")) for row in rows(results, "strategies") if row.get("perturbation") is not None}
    listed = []
    for one in series.values():
        row = summary.get(one.name)
        if row is None:
            continue
        seeds, failed = (len(row[key]) if isinstance(row.get(key), list) else 0 for key in ("seeds", "failed"))
        under = "baseline, " if one.name == results.get("baseline") else ""
        named = under + plural(seeds, "seed") + (f", {failed} failed" if failed else "")
        listed.append((one, named, row, "of perturbed rollouts" if one.name in perturbed else "of its rollouts"))
    content: dict[str, Any] = {"metrics": metrics, "listed": listed, "notes": _notes(summary)}
    content["verdicts"] = [(series[name], row.get("verdict")) for name, row in summary.items() if name in series]
    if number(dig(results, "untrained", "mean_at_n")) is not None:
        content["untrained"] = results["untrained"]
    return content


def cost_table(results: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """What each strategy costs, and as a ratio to the baseline of the same comparison."""
    listed = []
    for name, row in by_strategy(results).items():
        costs = []
        for key, digits in _COSTS:
            value, ratio = dig(row, "cost", key, "value"), number(dig(row, "cost", key, "ratio"))
            under = None if ratio is None else f"×{figure(ratio, 2)}"
            if name == results.get("baseline"):
                under = "baseline"
            costs.append((size(value) if digits is None else figure(value, digits), under))
        listed.append((series[name], costs, figure(dig(row, "cost", "record_bytes_per_token", "value"), 2)))
    return {"listed": listed} if listed else None


def by_strategy(results: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The rows of the summary, by the name of a strategy that was asked for."""
    ids = {str(row.get("id")) for row in rows(results, "strategies")}
    return {name: row for row in rows(results, "summary") if (name := str(row.get("strategy"))) in ids}


def evaluated(results: Mapping[str, Any], summary: Mapping[str, Mapping[str, Any]]) -> list[Metric]:
    """The evaluation's columns. Pass@1 is Mean@n; of many k a few are enough for a table."""
    columns: list[Metric] = []
    if any(number(dig(row, "mean_at_n", "value")) is not None for row in summary.values()):
        counts = {number(dig(run, "evaluation", "n")) for run in rows(results, "runs")} - {None}
        n = f"{counts.pop():.0f}" if len(counts) == 1 else "n"
        columns.append((f"Mean@{n}", ("mean_at_n",)))
    keys = {k for row in summary.values() for k in (row.get("pass_at_k") or {}) if str(k).isdigit()}
    ks = sorted(keys, key=int)
    if columns and "1" in ks:
        ks.remove("1")
    if len(ks) > _MOST_K:
        ks = [ks[i * (len(ks) - 1) // (_MOST_K - 1)] for i in range(_MOST_K)]
    return columns + [(f"Pass@{k}", ("pass_at_k", k)) for k in ks]


def _notes(summary: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the intervals are of, how several comparisons were corrected for, and what could have been seen."""
    changes = [c for row in summary.values() if isinstance(c := dig(row, "difference", "mean_at_n"), Mapping)]
    over = [dig(row, "mean_at_n", "over") for row in summary.values()]
    notes = []
    if "seeds" in over:
        notes.append("Intervals over seeds are of 95%, by Student's t, each for itself; they hold for these problems.")
    if "problems" in over:
        notes.append("With one seed the interval is over problems alone: none over seeds can be given.")
    if (count := max((number(c.get("comparisons")) or 0 for c in changes), default=0)) > 1:
        notes.append(
            "“Beyond noise” is a paired t test over seeds at 5%, by Holm's correction for"
            f" {count:.0f} comparisons within each column."
        )
    least = [value for c in changes if (value := number(c.get("detectable")))]
    if least:
        reach = " to ".join(dict.fromkeys((figure(min(least)), figure(max(least)))))
        notes.append(
            f"Smallest difference in Mean@n that so many seeds find with a chance of 80%: {reach}, by the spread seen."
        )
    return notes
