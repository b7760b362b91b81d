"""The results table, the differences to the baseline as a picture, and the cost table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ngrpo.report.marks import Series
from ngrpo.report.values import MISSING, between, dig, escape, figure, number, plural, rows, signed, size

_MOST_K = 4
_WITHIN = {True: "within noise", False: "beyond noise"}


def results_table(results: Mapping[str, Any], series: Mapping[str, Series]) -> str:
    """Per strategy: final reward, Mean@n and Pass@k, each with its interval and its difference to the baseline."""
    summary = _by_strategy(results)
    if not summary:
        return "<p>There is no summary yet: no strategy has a finished run.</p>"
    metrics = [("Final reward", ("reward_last",)), *_evaluated(results, summary)]
    body = []
    for one in series.values():
        row = summary.get(one.name)
        if row is None:
            continue
        seeds = row.get("seeds") if isinstance(row.get("seeds"), list) else []
        failed = row.get("failed") if isinstance(row.get("failed"), list) else []
        under = "baseline, " if one.name == results.get("baseline") else ""
        under += plural(len(seeds), "seed") + (f", {len(failed)} failed" if failed else "")
        cells = [f'{name_cell(one)}<span class="sub">{escape(under)}</span></th>']
        cells += [f"<td>{_cell(row, keys)}</td>" for _, keys in metrics]
        body.append("".join(cells))
    untrained = results.get("untrained")
    if number(dig(untrained, "mean_at_n")) is not None:
        cells = ['<th scope="row">before training</th>']
        for _, keys in metrics:
            cells.append(f'<td><span class="value">{figure(dig(untrained, *keys))}</span></td>')
        body.append("".join(cells))
    note = (
        "Under each value its 95% interval over problems and seeds (rewards: over seeds), then the paired difference "
        "to the baseline with its interval; “within noise” means that this interval holds zero, or that there are too "
        "few seeds for one. Final reward: the last quarter of the steps, “from” the first quarter. Higher is better."
    )
    return table("Results per strategy", ["Strategy", *(heading for heading, _ in metrics)], body) + (
        f'<p class="note">{note}</p>{_differences(results, series, summary, metrics)}'
    )


def cost_table(results: Mapping[str, Any], series: Mapping[str, Series]) -> str:
    """What each strategy costs, and as a ratio to the baseline of the same comparison."""
    body = []
    for name, row in _by_strategy(results).items():
        cells = [name_cell(series[name]) + "</th>"]
        for key, digits in (("tokens_per_second", 1), ("step_seconds", 2), ("memory_bytes", None)):
            value = dig(row, "cost", key, "value")
            ratio = number(dig(row, "cost", key, "ratio"))
            shown = size(value) if digits is None else figure(value, digits)
            under = (
                "baseline" if name == results.get("baseline") else f"×{figure(ratio, 2)}" if ratio is not None else ""
            )
            cells.append(f'<td><span class="value">{shown}</span><span class="sub">{under}</span></td>')
        cells.append(
            f'<td><span class="value">{figure(dig(row, "cost", "record_bytes_per_token", "value"), 2)}</span></td>'
        )
        body.append("".join(cells))
    if not body:
        return ""
    headings = ["Strategy", "Tokens per second", "Step time (s)", "Peak memory", "Record (bytes per token)"]
    note = "× is relative to the baseline: above ×1 is better for tokens per second, worse for time and memory."
    return table("Cost per strategy", headings, body) + f'<p class="note">{note}</p>'


def table(caption: str, headings: Sequence[str], body: Iterable[str], *, classes: str = "") -> str:
    """A table that scrolls within its own frame; ``body`` has the cells of each row, the headings are escaped."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    lines = "".join(f"<tr>{row}</tr>" for row in body)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="{classes}">'
        f'<caption class="unseen">{escape(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def facts(known: Mapping[str, Any]) -> str:
    """Names with their values; None is left out."""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd><bdi>{escape(value)}</bdi></dd></div>"
        for name, value in known.items()
        if value is not None
    )
    return f'<dl class="facts">{items}</dl>'


def name_cell(one: Series) -> str:
    """The opening of a row's heading: swatch and name; the caller closes it."""
    return f'<th scope="row"><span class="named">{one.swatch()}<bdi>{escape(one.name)}</bdi></span>'


def _by_strategy(results: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    known = {str(row.get("id")) for row in rows(results, "strategies")}
    return {name: row for row in rows(results, "summary") if (name := str(row.get("strategy"))) in known}


def _evaluated(
    results: Mapping[str, Any], summary: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, tuple[str, ...]]]:
    """Headings and keys of the evaluation's columns. Pass@1 is Mean@n; of many k a few are enough for a table."""
    columns: list[tuple[str, tuple[str, ...]]] = []
    if any(number(dig(row, "mean_at_n", "value")) is not None for row in summary.values()):
        counts = {number(dig(run, "evaluation", "n")) for run in rows(results, "runs")} - {None}
        n = f"{counts.pop():.0f}" if len(counts) == 1 else "n"
        columns.append((f"Mean@{n}", ("mean_at_n",)))
    found = {k for row in summary.values() for k in (row.get("pass_at_k") or {}) if str(k).isdigit()}
    ks = sorted(found, key=int)
    if columns and "1" in ks:
        ks.remove("1")
    if len(ks) > _MOST_K:
        ks = [ks[i * (len(ks) - 1) // (_MOST_K - 1)] for i in range(_MOST_K)]
    return columns + [(f"Pass@{k}", ("pass_at_k", k)) for k in ks]


def _cell(row: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    found = dig(row, *keys)
    parts = [f'<span class="value">{figure(dig(found, "value"))}</span>']
    if number(dig(found, "value")) is None:
        return parts[0]
    parts.append(f'<span class="sub">{between(dig(found, "low"), dig(found, "high"))}</span>')
    first = number(dig(row, "reward_first", "value")) if keys == ("reward_last",) else None
    if first is not None:
        parts.append(f'<span class="sub">from {figure(first)}</span>')
    change = dig(row, "difference", *keys)
    if number(dig(change, "value")) is not None:
        within = dig(change, "within_noise")
        words = f", {_WITHIN[within]}" if isinstance(within, bool) else ""
        parts.append(
            f'<span class="change {"noise" if within else "signal"}">{signed(dig(change, "value"))}{words}</span>'
            f'<span class="sub">{between(dig(change, "low"), dig(change, "high"), sign=True)}</span>'
        )
    return "".join(parts)


def _differences(
    results: Mapping[str, Any],
    series: Mapping[str, Series],
    summary: Mapping[str, Mapping[str, Any]],
    metrics: Sequence[tuple[str, tuple[str, ...]]],
) -> str:
    """One whisker per strategy against a line at zero: Mean@n where it was evaluated, else the final reward."""
    baseline = results.get("baseline")
    label, keys = metrics[1] if metrics[1:] and metrics[1][1] == ("mean_at_n",) else metrics[0]
    changes = {name: dig(row, "difference", *keys) for name, row in summary.items() if name != baseline}
    changes = {name: change for name, change in changes.items() if number(dig(change, "value")) is not None}
    if not changes:
        return ""
    ends = [abs(v) for c in changes.values() for k in ("value", "low", "high") if (v := number(dig(c, k))) is not None]
    reach = max(ends) or 1.0
    lines = []
    for name, change in changes.items():
        value, low, high = (number(dig(change, k)) for k in ("value", "low", "high"))
        place = 100 + 92 * (value or 0.0) / reach
        whisker = (
            f'<path class="whisker" d="M{100 + 92 * low / reach:.1f} 10H{100 + 92 * high / reach:.1f}"/>'
            if low is not None and high is not None
            else ""
        )
        words = _WITHIN.get(dig(change, "within_noise"), MISSING)
        told = f"{signed(value)} ({between(low, high, sign=True)}), {words}"
        lines.append(
            f'<li class="{series[name].classes}">{series[name].swatch()}<bdi>{escape(name)}</bdi>'
            f'<svg viewBox="0 0 200 20" role="img" aria-label="{escape(told)}" preserveAspectRatio="xMidYMid meet">'
            f'<path class="zero" d="M100 0V20"/>{whisker}{series[name].marker(round(place, 1), 10)}</svg>'
            f'<span class="told">{told}</span></li>'
        )
    return (
        f'<figure><ul class="forest">{"".join(lines)}</ul><figcaption>Difference to <bdi>{escape(baseline)}</bdi> in '
        f"{escape(label)}, with its 95% interval. The upright line is no difference; right of it is better."
        "</figcaption></figure>"
    )
