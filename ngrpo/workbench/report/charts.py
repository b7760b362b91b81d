# SPDX-License-Identifier: Apache-2.0
"""The charts: curves over steps and over k, and diversity against validity.

Each is paths and labels that templates/charts.html draws as SVG.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ngrpo.workbench.report.drawing import (
    SMALL,
    SQUARE,
    WIDE,
    Label,
    Scale,
    Series,
    Size,
    counted,
    doubling,
    place_label,
    spread,
)
from ngrpo.workbench.report.values import between, dig, ends, format_number, number, rows

_MOST_MARKERS = 12
_MOST_BINS = 60
# Key in a step, title, decimals.
_SMALL_CHARTS = (
    ("rate", "Perturbation rate", 3),
    ("shift", "Relative shift of the input", 4),
    ("gap_perturbed_mean", "Rollout–trainer gap, perturbed", 5),
    ("gap_plain_mean", "Rollout–trainer gap, plain", 5),
)
# Heading with the better direction, keys, decimals.
_MEASURES = (
    ("Reward ↑", ("reward",), 3),
    ("Learnable groups ↑", ("learnable_groups",), 3),
    ("Groups of one trajectory ↓", ("single_trajectory_groups",), 3),
    ("Groups fed the same inputs ↓", ("same_input_groups",), 3),
    ("Distinct answers ↑", ("diversity", "distinct_answers"), 3),
    ("Distinct intermediate results ↑", ("diversity", "distinct_intermediate"), 3),
    ("Self-BLEU ↓", ("diversity", "self_bleu"), 3),
    ("Distinct-2 ↑", ("diversity", "distinct_2"), 3),
    ("Edit distance ↑", ("diversity", "edit_distance"), 3),
    ("Parseable ↑", ("validity", "parseable"), 3),
    ("Repetition ↓", ("validity", "repetition"), 3),
    ("Perplexity ↓", ("validity", "perplexity"), 2),
    ("Anchor still nearest ↑", ("validity", "anchor_nearest"), 3),
    ("Text still nearest ↑", ("validity", "text_nearest"), 3),
    ("Cut off at the limit ↓", ("truncated",), 3),
    ("Relative shift of the input", ("relative_shift",), 3),
    ("Actual rate", ("rate",), 3),
    ("Tokens per second", ("tokens_per_second",), 1),
    ("Record (bytes per token)", ("record_bytes_per_token",), 2),
)

Point = tuple[float, float | None, float | None, float | None]
"""x; y, None in a gap; the ends of its band, None where there is none."""
Logged = Mapping[int, Mapping[str, Any]]
"""A run's rows by step."""


class Group(NamedTuple):
    """Paths with their CSS classes, markers over them, and labels, shown and hidden together."""

    classes: str
    paths: Sequence[tuple[str, str]]
    series: Series | None = None
    markers: Sequence[tuple[float, float]] = ()
    labels: Sequence[Label] = ()


class Chart(NamedTuple):
    """A drawing; ``name`` is unique in the page, ``desc`` says the values, and script.js reads ``data``."""

    name: str
    title: str
    desc: str
    size: Size
    xs: Scale
    ys: Scale
    x_title: str
    y_title: str
    groups: Sequence[Group]
    data: dict[str, Any]


class Score(NamedTuple):
    """A strategy's point: validity ``x``, diversity ``y``, their intervals, and further lines of its tooltip."""

    series: Series
    x: float
    y: float
    across: tuple[float, float] | None
    upward: tuple[float, float] | None
    notes: Sequence[str]


def line_chart(
    name: str,
    lines: Mapping[Series, Sequence[Point]],
    xs: Scale,
    labels: Sequence[str],
    *,
    title: str,
    y_title: str,
    x_title: str = "training step",
    size: Size = WIDE,
    digits: int = 3,
) -> Chart | None:
    """Curves with their bands.

    Args:
        name: unique in the page.
        lines: points by strategy, one (or a gap) for every position of ``labels``.
        xs: the scale across.
        labels: the tooltip's name of each position, ``step 12``.
        title: description for those who cannot see the chart.
        y_title: title of the axis upward, written above it.
        x_title: title of the axis across.
        size: its size.
        digits: decimals in the tooltip.

    Returns:
        The chart; None where no line has a point.
    """
    reach = [value for points in lines.values() for point in points for value in point[1:] if value is not None]
    if not reach:
        return None
    ys = spread(reach, *size.upward, count=4 if size is SMALL else 5, share=True)
    groups, readings, finals = [], [], []
    many = " many" if len(lines) > 5 else ""
    for series, points in lines.items():
        pixels = [(xs(x), None if y is None else ys(y)) for x, y, _, _ in points]
        band = [(xs(x), ys(low), ys(high)) for x, _, low, high in points if low is not None and high is not None]
        paths = []
        if len(band) > 1:
            edge = [f"{x:g} {low:g}" for x, low, _ in band] + [f"{x:g} {high:g}" for x, _, high in reversed(band)]
            paths.append((f"band{many}", f"M{'L'.join(edge)}Z"))
        elif band:
            x, low, high = band[0]
            paths.append(("whisker", f"M{x:g} {low:g}V{high:g}"))
        paths.append(("line", _path(pixels)))
        # Each strategy's markers start elsewhere, so that overlapping curves can still be told apart.
        stride = -(-len(pixels) // _MOST_MARKERS)
        markers = [(x, y) for x, y in pixels[series.index % stride :: stride] if y is not None]
        groups.append(Group(series.classes, paths, series, markers))
        texts = [
            format_number(y, digits) + (f" ({between(low, high, digits)})" if low is not None else "")
            for _, y, low, high in points
        ]
        readings.append([series.index, series.name, [y for _, y in pixels], texts])
        last = next((y for _, y, _, _ in reversed(points) if y is not None), None)
        finals.append(f"{series.name}: {format_number(last, digits)}")
    columns = [xs(point[0]) for point in next(iter(lines.values()))]
    data = {"kind": "lines", "x": columns, "labels": list(labels), "series": readings}
    return Chart(name, title, f"Last values: {'; '.join(finals)}.", size, xs, ys, x_title, y_title, groups, data)


def _path(pixels: Sequence[tuple[float, float | None]]) -> str:
    parts, pen = [], "M"
    for x, y in pixels:
        if y is None:
            pen = "M"
            continue
        parts.append(f"{pen}{x:g} {y:g}")
        pen = "L"
    return "".join(parts)


def learning(results: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any]:
    """Evaluation and reward over steps, and small charts of rate, shift and gap.

    Means are over the finished runs of a strategy. Only the evaluation compares strategies: each draws its rollouts,
    and so their rewards, in its own way.
    """
    runs, evaluated = _by_step(results, series, "steps"), _by_step(results, series, "evaluations")
    steps = sorted({step for group in runs.values() for run in group for step in run})
    if not steps:
        return {"order": []}
    width = -(-len(steps) // _MOST_BINS)
    bins = [steps[i : i + width] for i in range(0, len(steps), width)]
    labels = [f"step {part[0]}" if len(part) == 1 else f"steps {part[0]}–{part[-1]}" for part in bins]
    order = [one for one in series.values() if one.name in runs]
    at = sorted({step for group in evaluated.values() for run in group for step in run})
    held_out = line_chart(
        "learning-evaluation",
        {one: _points(evaluated[one.name], "mean_at_n", [[step] for step in at]) for one in order},
        counted(steps + at, *WIDE.across, count=7),
        [f"step {step}" for step in at],
        title="Evaluation while training, unperturbed, over training steps",
        y_title="Mean@n",
    )

    def chart(key: str, title: str, digits: int, size: Size) -> Chart | None:
        lines = {one: _points(runs[one.name], key, bins) for one in order}
        lines = {one: points for one, points in lines.items() if any(y is not None for _, y, _, _ in points)}
        xs = counted(steps, *size.across, count=4 if size is SMALL else 7)
        about = f"{title} over training steps"
        return line_chart(f"learning-{key}", lines, xs, labels, title=about, y_title=title, size=size, digits=digits)

    notes = ["Lines are means over the finished runs of a strategy."]
    if any(len(group) > 1 for group in runs.values()):
        notes.append("Bands run from the lowest to the highest seed.")
    if width > 1:
        notes.append(f"Each point is the mean of {width} steps.")
    ids = [row.get("id") for row in rows(results, "strategies")]
    absent = [one.name for one in series.values() if one.name in ids and one.name not in runs]
    if absent:
        notes.append(f"No finished run, so no curve: {', '.join(absent)}.")
    small = [made for key, title, digits in _SMALL_CHARTS if (made := chart(key, title, digits, SMALL))]
    reward = chart("reward", "Reward of the training rollouts", 3, WIDE)
    return {"order": order, "notes": notes, "evaluation": held_out, "reward": reward, "small": small}


def _by_step(results: Mapping[str, Any], series: Mapping[str, Series], key: str) -> dict[str, list[Logged]]:
    """The rows that each strategy's finished runs logged under a key."""
    runs: dict[str, list[Logged]] = {}
    for run in rows(results, "runs"):
        if run.get("status") == "done" and run.get("strategy") in series:
            logged = {int(step): row for row in rows(run, key) if (step := number(row.get("step"))) is not None}
            runs.setdefault(run["strategy"], []).append(logged)
    return runs


def _points(runs: Sequence[Logged], key: str, bins: Sequence[Sequence[int]]) -> list[Point]:
    """Mean over seeds in each bin of steps, with the lowest and the highest seed where there are several."""
    points: list[Point] = []
    for part in bins:
        seeds = []
        for run in runs:
            values = [value for step in part if (value := number(dig(run.get(step), key))) is not None]
            if values:
                seeds.append(sum(values) / len(values))
        mean = sum(seeds) / len(seeds) if seeds else None
        low, high = (min(seeds), max(seeds)) if len(seeds) > 1 else (None, None)
        points.append((sum(part) / len(part), mean, low, high))
    return points


def pass_at_k(source: Mapping[str, Any], series: Mapping[str, Series], *, trained: bool) -> dict[str, Any] | None:
    """Pass@k over k, of results (``trained``: their ``summary``) or of a diagnosis (its ``strategies``)."""
    curves: dict[str, dict[int, Any]] = {}
    for row in rows(source, "summary" if trained else "strategies"):
        name = str(row.get("strategy" if trained else "name"))
        for k, value in (row.get("pass_at_k") or {}).items():
            interval = value if trained else {"value": value}
            if number(dig(interval, "value")) is not None and name in series:
                curves.setdefault(name, {})[int(k)] = interval
    ks = sorted({k for curve in curves.values() for k in curve})
    if not ks:
        return None

    def point(k: int, interval: object) -> Point:
        value, low, high = (number(dig(interval, key)) for key in ("value", "low", "high"))
        return math.log2(k), value, low, high

    lines = {one: [point(k, curves[one.name].get(k)) for k in ks] for one in series.values() if one.name in curves}
    over = [dig(row, "mean_at_n", "over") for row in rows(source, "summary")]
    chart = line_chart(
        "pass-at-k",
        lines,
        doubling(ks, *WIDE.across),
        [f"Pass@{k}" for k in ks],
        title="Pass@k over the number of samples k",
        x_title="samples k",
        y_title="Pass@k",
    )
    banded = " or ".join(what for what in ("seeds", "problems") if what in over)
    return {"order": list(lines), "chart": chart, "banded": banded}


def diversity_validity(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """One point per strategy, with whiskers: more valid to the right, more diverse upward; and all numbers."""
    strategies = rows(diagnosis, "strategies")
    if not strategies:
        return None
    scores = []
    for row in strategies:
        x, y = (number(dig(row, axis, "score")) for axis in ("validity", "diversity"))
        if x is None or y is None:
            continue
        across, upward = (ends(dig(row, "intervals", axis)) for axis in ("validity", "diversity"))
        notes = [
            f"{axis} {format_number(value)}" + (f" ({between(*interval)})" if interval else "")
            for axis, value, interval in (("validity", x, across), ("diversity", y, upward))
        ]
        if number(row.get("reward")) is not None:
            notes.append(f"reward {format_number(row['reward'])}")
        scores.append(Score(series[str(row.get("name"))], x, y, across, upward, notes))
    columns = [column for column in _MEASURES if any(number(dig(row, *column[1])) is not None for row in strategies)]
    order = [one.series for one in scores]
    return {"chart": _scatter(scores), "order": order, "columns": columns, "listed": by_series(strategies, series)}


def _scatter(scores: Sequence[Score]) -> Chart | None:
    if not scores:
        return None
    xs = spread([value for one in scores for value in (one.x, *(one.across or ()))], *SQUARE.across)
    ys = spread([value for one in scores for value in (one.y, *(one.upward or ()))], *SQUARE.upward)
    drawn, readings, boxes = [], [], []
    for one in scores:  # Labels keep off markers and whiskers.
        x, y = xs(one.x), ys(one.y)
        boxes.append((x - 6, y - 6, x + 6, y + 6))
        whiskers = []
        if one.across:
            left, right = map(xs, one.across)
            boxes.append((left, y - 1, right, y + 1))
            whiskers.append(("whisker", f"M{left:g} {y:g}H{right:g}"))
        if one.upward:
            low, high = map(ys, one.upward)
            boxes.append((x - 1, high, x + 1, low))
            whiskers.append(("whisker", f"M{x:g} {low:g}V{high:g}"))
        drawn.append((one.series, x, y, whiskers))
        readings.append([x, y, one.series.index, [one.series.name, *one.notes]])
    groups = [
        Group(f"{series.classes} big", whiskers, series, [(x, y)], place_label(series.name, x, y, SQUARE, boxes))
        for series, x, y, whiskers in drawn
    ]
    x_title, y_title = "validity → more valid is better", "↑ diversity: more diverse is better"
    values = [
        f"{one.series.name}: {x_title} {format_number(one.x)}, {y_title} {format_number(one.y)}" for one in scores
    ]
    title = "Diversity against validity, one point per strategy"
    data = {"kind": "points", "points": readings}
    return Chart("diversity-validity", title, f"{'; '.join(values)}.", SQUARE, xs, ys, x_title, y_title, groups, data)


def by_series(
    strategies: Sequence[Mapping[str, Any]], series: Mapping[str, Series]
) -> list[tuple[Series, Mapping[str, Any]]]:
    """The rows of a diagnosis, each with its strategy's look."""
    return [(series[str(row.get("name"))], row) for row in strategies]
