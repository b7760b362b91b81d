"""The headline: what was compared on what, what failed, and one plain sentence per strategy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.report.marks import Series
from ngrpo.report.tables import facts
from ngrpo.report.values import dig, duration, escape, figure, number, numbers, plural, rows

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


def comparison_headline(results: Mapping[str, Any], series: Mapping[str, Series]) -> str:
    """Facts, failures, and one plain sentence per strategy."""
    runs = rows(results, "runs")
    seeds = list(dict.fromkeys(escape(run.get("seed")) for run in runs))
    states = {state: [run for run in runs if run.get("status") == state] for state in ("done", "failed", "pending")}
    counted = ", ".join(f"{len(found)} {state}" for state, found in states.items() if found) or "none"
    known = {
        "Model": results.get("model"),
        "Task": results.get("task"),
        "Machine": _machine(results),
        "Seeds": f"{len(seeds)} ({', '.join(seeds)})" if seeds else None,
        "Runs": counted,
        "Made": _moment(results.get("created")),
    }
    parts = [facts(known)]
    if count := len(states["failed"]):
        listed = "".join(
            f"<li><bdi>{escape(run.get('strategy'))}</bdi>, seed {escape(run.get('seed'))}: "
            f"<bdi>{escape(_short(run.get('error')))}</bdi></li>"
            for run in states["failed"]
        )
        parts.append(
            f'<div class="warning"><p><b>{count} of {plural(len(runs), "run")} failed</b> and '
            f"{'is' if count == 1 else 'are'} not in the figures. "
            f'<a href="#runs">Errors and logs</a></p><ul>{listed}</ul></div>'
        )
    if count := len(states["pending"]):
        verb = "has" if count == 1 else "have"
        parts.append(f'<p class="warning">{plural(count, "run")} {verb} not finished: this is an interim report.</p>')
    verdicts = "".join(
        _said(series[name], f": <bdi>{escape(row.get('verdict'))}</bdi>")
        for row in rows(results, "summary")
        if (name := str(row.get("strategy"))) in series
    )
    if verdicts:
        parts.append(f'<ul class="verdicts">{verdicts}</ul>')
    if len(seeds) == 1:
        parts.append(
            '<p class="warning">One seed only: the intervals show noise over problems, not over training runs. '
            "Another seed of the same strategy may differ by more than these strategies do.</p>"
        )
    return "".join(parts)


def diagnosis_headline(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> str:
    """Facts, warnings, and each strategy's diversity and validity against the unperturbed one's, in words."""
    found = rows(diagnosis, "strategies")
    prompts, group = number(diagnosis.get("prompts")), number(diagnosis.get("group"))
    known = {
        "Model": diagnosis.get("model"),
        "Dataset": diagnosis.get("dataset"),
        "Sampled": None if prompts is None or group is None else f"{prompts:,.0f} problems × {group:.0f} answers",
        "Machine": _machine(diagnosis),
        "Took": duration(diagnosis.get("seconds")),
    }
    plain = next((row for row in found if row.get("name") == diagnosis.get("baseline")), found[0] if found else {})
    lines = []
    for row in found:
        if row is not plain:
            said = "; ".join(_against(row, plain, axis) for axis in ("diversity", "validity"))
            lines.append(
                _said(series[str(row.get("name"))], f" beside <bdi>{escape(plain.get('name'))}</bdi>: {said}.")
            )
    warnings = diagnosis.get("warnings")
    listed = "".join(f"<li><bdi>{escape(line)}</bdi></li>" for line in (warnings if isinstance(warnings, list) else []))
    warned = f'<div class="warning"><p><b>Before you train</b></p><ul>{listed}</ul></div>' if listed else ""
    return facts(known) + warned + (f'<ul class="verdicts">{"".join(lines)}</ul>' if lines else "")


def _said(one: Series, words: str) -> str:
    return f"<li>{one.swatch()}<span><b><bdi>{escape(one.name)}</bdi></b>{words}</span></li>"


def _together(name: Any) -> str:
    """A name that a title does not break in two where it can be avoided."""
    return str(name).replace(" ", "\u00a0")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _machine(source: Mapping[str, Any]) -> str | None:
    cores = number(dig(source, "machine", "cores"))
    known = [source.get("hardware"), dig(source, "machine", "cpu"), dig(source, "machine", "gpu")]
    parts = [*known, None if cores is None else f"{cores:.0f} cores"]
    return ", ".join(str(part) for part in parts if part) or None


def _moment(value: Any) -> Any:
    """An ISO time without its fraction and its T; anything else as it is."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)(:\d\d)?(\.\d+)?(Z|\+00:00)?(.*)", str(value))
    return f"{found[1]} {found[2]}{' UTC' if found[5] else ''}{found[6]}" if found else value


def _short(error: Any) -> str:
    lines = str(error or "").strip().splitlines()
    return (lines[-1] if len(lines[-1]) <= 160 else lines[-1][:159] + "…") if lines else "no error was recorded"


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
