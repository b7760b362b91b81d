# SPDX-License-Identifier: Apache-2.0
"""The headline: what was compared on what, what failed, and what was found."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.workbench.report.forest import forest, sentence
from ngrpo.workbench.report.marks import Series
from ngrpo.workbench.report.tables import by_strategy, evaluated
from ngrpo.workbench.report.values import dig, duration, figure, number, numbers, plural, rows, shown

_MOST_NAMES = 4


def comparison_title(results: Mapping[str, Any]) -> str:
    """``neighbor and gaussian against none``, not escaped."""
    baseline = results.get("baseline")
    others = [_together(row.get("id")) for row in rows(results, "strategies") if row.get("id") != baseline]
    if not others:
        return _together(baseline or "Comparison")
    if len(others) > _MOST_NAMES:
        return f"{len(others)} strategies against {_together(baseline or 'each other')}"
    return f"{_listed(others)} against {_together(baseline)}" if baseline else _listed(others)


def diagnosis_title(diagnosis: Mapping[str, Any]) -> str:
    """``What the exploration is worth: none, neighbor``, not escaped."""
    names = [_together(row.get("name")) for row in rows(diagnosis, "strategies")]
    what = _listed(names) if 0 < len(names) <= _MOST_NAMES else plural(len(names), "strategy")
    return f"Before any training: {what}"


def comparison_headline(results: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any]:
    """Facts, failures, what was found in one sentence, and each strategy's difference to the baseline."""
    runs = rows(results, "runs")
    seeds = list(dict.fromkeys(shown(run.get("seed")) for run in runs))
    states = {state: [run for run in runs if run.get("status") == state] for state in ("done", "failed", "pending")}
    return {
        "facts": {
            "Model": results.get("model"),
            "Task": results.get("task"),
            "Machine": _machine(results),
            "Seeds": f"{len(seeds)} ({', '.join(seeds)})" if seeds else None,
            "Runs": ", ".join(f"{len(of_state)} {state}" for state, of_state in states.items() if of_state) or "none",
            "Made": _moment(results.get("created")),
        },
        "runs": len(runs),
        "failed": [{**run, "error": _short(run.get("error"))} for run in states["failed"]],
        "pending": len(states["pending"]),
        "one_seed": len(seeds) == 1,
        **_differences(results, series),
    }


def _differences(results: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any]:
    """One sentence and one picture of the differences to the baseline."""
    summary, baseline = by_strategy(results), str(results.get("baseline"))
    metrics = evaluated(results, summary)
    measure = metrics[0] if metrics else ("Mean@n", ("mean_at_n",))
    return {
        "sentence": sentence(summary, baseline, metrics),
        "forest": forest(series, summary, baseline, measure) if baseline in summary else [],
        "measure": measure[0],
        "baseline": baseline,
    }


def training_headline(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of one run: machine, time, and each evaluated metric before and after."""
    evaluated = {}
    for tag, by_step in (summary.get("evaluation") or {}).items():
        points = sorted((int(step), number(value)) for step, value in by_step.items() if str(step).isdigit())
        if "_pass" in tag and points:
            ends = [points[0], points[-1]] if len(points) > 1 else points
            evaluated[tag.rpartition("/")[2]] = " → ".join(f"{figure(value)} (step {step})" for step, value in ends)
    facts = {"Machine": _machine(summary), "Seed": summary.get("seed"), "Took": duration(summary.get("seconds"))}
    return {"facts": {**facts, **evaluated}}


def diagnosis_headline(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any]:
    """Facts, warnings, and each strategy's diversity and validity against the unperturbed one's, in words."""
    strategies = rows(diagnosis, "strategies")
    prompts, group = number(diagnosis.get("prompts")), number(diagnosis.get("group"))
    plain = next(
        (row for row in strategies if row.get("name") == diagnosis.get("baseline")), strategies[0] if strategies else {}
    )
    warnings = diagnosis.get("warnings")
    return {
        "facts": {
            "Model": diagnosis.get("model"),
            "Dataset": diagnosis.get("dataset"),
            "Sampled": None if prompts is None or group is None else f"{prompts:,.0f} problems × {group:.0f} answers",
            "Machine": _machine(diagnosis),
            "Took": duration(diagnosis.get("seconds")),
        },
        "warnings": warnings if isinstance(warnings, list) else [],
        "beside": plain.get("name"),
        "verdicts": [
            (series[str(row.get("name"))], f"{_against(row, plain, 'diversity')}; {_against(row, plain, 'validity')}.")
            for row in strategies
            if row is not plain
        ],
    }


def _together(name: object) -> str:
    """A name that a title does not break in two where it can be avoided."""
    return str(name).replace(" ", "\u00a0")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _machine(source: Mapping[str, Any]) -> str | None:
    cores = number(dig(source, "machine", "cores"))
    facts = [source.get("hardware"), dig(source, "machine", "cpu"), dig(source, "machine", "gpu")]
    parts = [*facts, None if cores is None else f"{cores:.0f} cores"]
    return ", ".join(str(part) for part in parts if part) or None


def _moment(value: object) -> Any:
    """An ISO time without its fraction and its T; anything else as it is."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)(:\d\d)?(\.\d+)?(Z|\+00:00)?(.*)", str(value))
    return f"{match[1]} {match[2]}{' UTC' if match[5] else ''}{match[6]}" if match else value


def _short(error: object) -> str:
    """The line that names the cause: the first one of ours, the last one of a traceback."""
    lines = str(error or "").strip().splitlines() or ["no error was recorded"]
    line = lines[0] if lines[0].startswith(("error: ", "training failed: ")) else lines[-1]
    return line if len(line) <= 160 else line[:159] + "…"


def _against(row: Mapping[str, Any], first: Mapping[str, Any], axis: str) -> str:
    """``more diverse (0.61 against 0.35)``, or that the intervals overlap."""
    one, other = number(dig(row, axis, "score")), number(dig(first, axis, "score"))
    if one is None or other is None:
        return f"{axis} unknown"
    pair = f"{figure(one)} against {figure(other)}"
    ends, others = numbers(dig(row, "intervals", axis), 2), numbers(dig(first, "intervals", axis), 2)
    if ends and others and ends[0] <= others[1] and others[0] <= ends[1]:
        return f"{axis} {pair}, the intervals overlap"
    adjective = {"diversity": "diverse", "validity": "valid"}[axis]
    return (
        f"equally {adjective} ({pair})" if one == other else f"{'more' if one > other else 'less'} {adjective} ({pair})"
    )
