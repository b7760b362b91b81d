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
        seeds, failed = (len(row[key]) if isinstance(row.get(key), list) else 0 for key in ("seeds", "failed"))
        under = "baseline, " if one.name == results.get("baseline") else ""
        under += plural(seeds, "seed") + (f", {failed} failed" if failed else "")
        body.append(name_cell(one, under) + "".join(_metric(row, keys) for _, keys in metrics))
    untrained = results.get("untrained")
    if number(dig(untrained, "mean_at_n")) is not None:
        cells = "".join(cell(figure(dig(untrained, *keys))) for _, keys in metrics)
        body.append(f'<th scope="row">before training</th>{cells}')
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
        cells = [name_cell(series[name])]
        for key, digits in (("tokens_per_second", 1), ("step_seconds", 2), ("memory_bytes", None)):
            value, ratio = dig(row, "cost", key, "value"), number(dig(row, "cost", key, "ratio"))
            under = "" if ratio is None else f"×{figure(ratio, 2)}"
            under = "baseline" if name == results.get("baseline") else under
            cells.append(cell(size(value) if digits is None else figure(value, digits), sub(under)))
        cells.append(cell(figure(dig(row, "cost", "record_bytes_per_token", "value"), 2)))
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


def name_cell(one: Series, under: str = "") -> str:
    """A row's heading: swatch and name, and a smaller line under it."""
    named = f'<span class="named">{one.swatch()}<bdi>{escape(one.name)}</bdi></span>'
    return f'<th scope="row">{named}{sub(escape(under)) if under else ""}</th>'


def cell(value: str, *under: str) -> str:
    """A cell of a table: a value, and what is under it."""
    return f'<td><span class="value">{value}</span>{"".join(under)}</td>'


def sub(text: str) -> str:
    """A smaller line under a value."""
    return f'<span class="sub">{text}</span>'


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


def _metric(row: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    found = dig(row, *keys)
    if number(dig(found, "value")) is None:
        return cell(MISSING)
    parts = [sub(between(dig(found, "low"), dig(found, "high")))]
    first = number(dig(row, "reward_first", "value")) if keys == ("reward_last",) else None
    if first is not None:
        parts.append(sub(f"from {figure(first)}"))
    change = dig(row, "difference", *keys)
    if number(dig(change, "value")) is not None:
        within = dig(change, "within_noise")
        words = f", {_WITHIN[within]}" if isinstance(within, bool) else ""
        shown = f'<span class="change {"noise" if within else "signal"}">{signed(dig(change, "value"))}{words}</span>'
        parts += [shown, sub(between(dig(change, "low"), dig(change, "high"), sign=True))]
    return cell(figure(dig(found, "value")), *parts)


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
        at, left, right = (100 + 92 * (v or 0.0) / reach for v in (value, low, high))
        known = low is not None and high is not None
        whisker = f'<path class="whisker" d="M{left:.1f} 10H{right:.1f}"/>' if known else ""
        told = f"{signed(value)} ({between(low, high, sign=True)}), {_WITHIN.get(dig(change, 'within_noise'), MISSING)}"
        lines.append(
            f'<li class="{series[name].classes}">{series[name].swatch()}<bdi>{escape(name)}</bdi>'
            f'<svg viewBox="0 0 200 20" role="img" aria-label="{escape(told)}" preserveAspectRatio="xMidYMid meet">'
            f'<path class="zero" d="M100 0V20"/>{whisker}{series[name].marker(round(at, 1), 10)}</svg>'
            f'<span class="told">{told}</span></li>'
        )
    return (
        f'<figure><ul class="forest">{"".join(lines)}</ul><figcaption>Difference to <bdi>{escape(baseline)}</bdi> in '
        f"{escape(label)}, with its 95% interval. The upright line is no difference; right of it is better."
        "</figcaption></figure>"
    )
