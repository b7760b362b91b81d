# SPDX-License-Identifier: Apache-2.0
"""The charts: curves over steps and over k, diversity against validity, and the embedding map.

Each is paths and labels that templates/charts.html draws as SVG.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ngrpo.workbench.report import drawing
from ngrpo.workbench.report.drawing import SQUARE, WIDE, Scale, Series, Size, spread
from ngrpo.workbench.report.values import dig, ends, format_number, number, rows, token, with_ends

_MOST_MARKERS, _MOST_BINS = 12, 60
# Key in a step, title, decimals.
_SMALL_CHARTS = (
    ("rate", "Perturbation rate", 3),
    ("shift", "Relative shift of the input", 4),
    ("gap_perturbed_mean", "Rollout–trainer gap, perturbed", 5),
    ("gap_plain_mean", "Rollout–trainer gap, plain", 5),
)
# Of a diagnosis: on the page the heading with the better direction and decimals, both on the screen, and keys.
MEASURES = (
    ("Reward ↑", 3, "reward", 3, ("reward",)),
    (None, 3, "pass@{group}", 3, ("pass_at_k", "{group}")),
    ("Learnable groups ↑", 3, "learnable", 2, ("learnable_groups",)),
    ("Groups of one trajectory ↓", 3, None, 2, ("single_trajectory_groups",)),
    ("Groups fed the same inputs ↓", 3, None, 2, ("same_input_groups",)),
    (None, 3, "DIVERSITY", 3, ("diversity", "score")),
    ("Distinct answers ↑", 3, "answers", 2, ("diversity", "distinct_answers")),
    ("Distinct intermediate results ↑", 3, "results", 2, ("diversity", "distinct_intermediate")),
    ("Self-BLEU ↓", 3, "self-BLEU", 2, ("diversity", "self_bleu")),
    ("Distinct-2 ↑", 3, None, 2, ("diversity", "distinct_2")),
    ("Edit distance ↑", 3, "edit", 2, ("diversity", "edit_distance")),
    (None, 3, "VALIDITY", 3, ("validity", "score")),
    ("Parseable ↑", 3, "parsed", 2, ("validity", "parseable")),
    ("Repetition ↓", 3, "loops", 2, ("validity", "repetition")),
    ("Perplexity ↓", 2, "perplexity", 2, ("validity", "perplexity")),
    ("Anchor still nearest ↑", 3, "anchor near", 2, ("validity", "anchor_nearest")),
    ("Text still nearest ↑", 3, None, 2, ("validity", "text_nearest")),
    ("Cut off at the limit ↓", 3, None, 2, ("truncated",)),
    ("Relative shift of the input", 3, "shift", 3, ("relative_shift",)),
    ("Actual rate", 3, "rate", 3, ("rate",)),
    ("Tokens per second", 1, "tokens/s", 0, ("tokens_per_second",)),
    ("Record (bytes per token)", 2, None, 2, ("record_bytes_per_token",)),
)
_AXES = ("validity", "diversity")  # across, upward
# Class, outline around a point, and meaning of the map's marks.
_DOT = ("anchor", "M{:g} {:g}m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", "a token")
_NEAR = ("near", "M{:g} {:g}h0", "perturbed, still the token or one related to it")
_FAR = ("far", "M{:g} {:g}m-2.5 -2.5l5 5m-5 0l5 -5", "perturbed, nearest to an unrelated token")
_DIAMOND = ("nearby", "M{:g} {:g}m-3 0l3 -3l3 3l-3 3Z", "a neighbor of a token")

Point = tuple[float, float | None, float | None, float | None]
"""x; y, None in a gap; the ends of its band, None where there is none."""
Label = tuple[str, float, float, str]
"""Text, x, y and SVG's text-anchor."""
Rows = Mapping[int, Mapping[str, Any]]
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


def line_chart(
    name: str,
    lines: Mapping[Series, Sequence[Point]],
    xs: Scale,
    labels: Sequence[str],
    titles: tuple[str, str, str],
    *,
    size: Size = WIDE,
    digits: int = 3,
) -> Chart | None:
    """Curves with their bands.

    Args:
        name: unique in the page.
        lines: points by strategy, one (or a gap) for every position of ``labels``.
        xs: the scale across.
        labels: the tooltip's name of each position, ``step 12``.
        titles: of the chart for those who cannot see it, of the axis across, and of the axis upward.
        size: its size.
        digits: decimals in the tooltip.

    Returns:
        The chart; None where no line has a point.
    """
    lines = {one: points for one, points in lines.items() if any(y is not None for _, y, _, _ in points)}
    reach = [value for points in lines.values() for point in points for value in point[1:] if value is not None]
    if not lines:
        return None
    ys = spread(reach, size.upward, count=size.y_ticks, share=True)
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
        steps = itertools.pairwise([(0.0, None), *pixels])
        pen = [f"{'M' if before is None else 'L'}{x:g} {y:g}" for (_, before), (x, y) in steps if y is not None]
        paths.append(("line", "".join(pen)))
        # Each strategy's markers start elsewhere, so that overlapping curves can still be told apart.
        stride = -(-len(pixels) // _MOST_MARKERS)
        markers = [(x, y) for x, y in pixels[series.index % stride :: stride] if y is not None]
        groups.append(Group(series.classes, paths, series, markers))
        texts = [with_ends(*point[1:], digits) for point in points]
        readings.append([series.index, series.name, [y for _, y in pixels], texts])
        finals.append(f"{series.name}: {format_number([y for _, y, _, _ in points if y is not None][-1], digits)}")
    columns = [xs(point[0]) for point in next(iter(lines.values()))]
    data = {"kind": "lines", "x": columns, "labels": list(labels), "series": readings}
    title, x_title, y_title = titles
    return Chart(name, title, f"Last values: {'; '.join(finals)}.", size, xs, ys, x_title, y_title, groups, data)


def learning(results: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any]:
    """Evaluation and reward over steps, and small charts of rate, shift and gap.

    Means are over the finished runs of a strategy. Only the evaluation compares strategies: each draws its rollouts,
    and so their rewards, in its own way.
    """
    runs, evaluated = defaultdict[str, list[Rows]](list), defaultdict[str, list[Rows]](list)
    for run in rows(results, "runs"):
        if run.get("status") == "done" and run.get("strategy") in series:
            for key, into in (("steps", runs), ("evaluations", evaluated)):
                logged = {int(step): row for row in rows(run, key) if (step := number(row.get("step"))) is not None}
                into[run["strategy"]].append(logged)
    steps, at = (sorted({s for of in kind.values() for run in of for s in run}) for kind in (runs, evaluated))
    if not steps:
        return {"order": []}
    width = -(-len(steps) // _MOST_BINS)
    bins = [steps[i : i + width] for i in range(0, len(steps), width)]
    order = [one for one in series.values() if one.name in runs]

    def chart(key: str, y_title: str, digits: int = 3, size: Size = WIDE, title: str = "") -> Chart | None:
        of, parts = (evaluated, [[step] for step in at]) if key == "mean_at_n" else (runs, bins)
        lines = {one: _points(of[one.name], key, parts) for one in order}
        labels = [f"step {part[0]}" if len(part) == 1 else f"steps {part[0]}–{part[-1]}" for part in parts]
        titles = (f"{title or y_title} over training steps", "training step", y_title)
        xs = spread(steps + at, size.across, count=size.x_ticks, least=1.0)
        return line_chart(f"learning-{key}", lines, xs, labels, titles, size=size, digits=digits)

    ids = [row.get("id") for row in rows(results, "strategies")]
    return {
        "order": order,
        "several": any(len(group) > 1 for group in runs.values()),
        "width": width,
        "absent": [one.name for one in series.values() if one.name in ids and one.name not in runs],
        "evaluation": chart("mean_at_n", "Mean@n", title="Evaluation while training, unperturbed,"),
        "reward": chart("reward", "Reward of the training rollouts"),
        "small": [made for key, title, digits in _SMALL_CHARTS if (made := chart(key, title, digits, drawing.SMALL))],
    }


def _points(runs: Sequence[Rows], key: str, bins: Sequence[Sequence[int]]) -> list[Point]:
    """Mean over seeds in each bin of steps, with the lowest and the highest seed where there are several."""
    points: list[Point] = []
    for part in bins:
        logged = ([value for step in part if (value := number(run.get(step), key)) is not None] for run in runs)
        seeds = [sum(values) / len(values) for values in logged if values]
        mean = sum(seeds) / len(seeds) if seeds else None
        low, high = (min(seeds), max(seeds)) if len(seeds) > 1 else (None, None)
        points.append((sum(part) / len(part), mean, low, high))
    return points


def pass_at_k(source: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """Pass@k over k, of the ``summary`` of results or of a diagnosis's ``strategies``."""
    curves = defaultdict[Series, dict[int, Point]](dict)
    for row in rows(source, "summary") or rows(source, "strategies"):
        name = str(row.get("strategy", row.get("name")))
        for k, value in (row.get("pass_at_k") or {}).items():
            interval = value if isinstance(value, Mapping) else {"value": value}
            share, low, high = (number(interval, key) for key in ("value", "low", "high"))
            if share is not None and name in series:
                curves[series[name]][int(k)] = (math.log2(int(k)), share, low, high)
    ks = sorted({k for curve in curves.values() for k in curve})
    if not ks:
        return None

    gaps = {k: (math.log2(k), None, None, None) for k in ks}
    lines = {one: list({**gaps, **curves[one]}.values()) for one in series.values() if one in curves}
    over = [dig(row, "mean_at_n", "over") for row in rows(source, "summary")]
    labels = [f"Pass@{k}" for k in ks]
    titles = ("Pass@k over the number of samples k", "samples k", "Pass@k")
    chart = line_chart("pass-at-k", lines, drawing.doubling(ks, WIDE), labels, titles)
    banded = " or ".join(what for what in ("seeds", "problems") if what in over)
    return {"order": list(lines), "chart": chart, "banded": banded}


def diversity_validity(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """One point per strategy, with whiskers: more valid to the right, more diverse upward; and all numbers."""
    listed = drawing.by_series(diagnosis, series)
    shown = [(heading, keys, decimals) for heading, decimals, _, _, keys in MEASURES if heading]
    columns = [column for column in shown if any(number(row, *column[1]) is not None for _, row in listed)]
    placed = [(one, row) for one, row in listed if ends([dig(row, axis, "score") for axis in _AXES])]
    found = {"chart": None, "order": [one for one, _ in placed], "columns": columns, "listed": listed}
    if not placed:
        return found if listed else None
    across, upward = ([ends(dig(row, "intervals", axis)) for _, row in placed] for axis in _AXES)
    right, up = ([float(row[axis]["score"]) for _, row in placed] for axis in _AXES)
    xs = spread([*right, *(end for pair in across for end in pair or ())], SQUARE.across)
    ys = spread([*up, *(end for pair in upward for end in pair or ())], SQUARE.upward)
    x_title, y_title = "validity → more valid is better", "↑ diversity: more diverse is better"
    groups, readings, values = [], [], []
    for (one, row), valid, diverse, wide, high in zip(placed, right, up, across, upward):
        x, y = xs(valid), ys(diverse)
        whiskers = []
        if wide:
            whiskers.append(("whisker", f"M{xs(wide[0]):g} {y:g}H{xs(wide[1]):g}"))
        if high:
            whiskers.append(("whisker", f"M{x:g} {ys(high[0]):g}V{ys(high[1]):g}"))
        groups.append(Group(f"{one.classes} big", whiskers, one, [(x, y)]))
        valued = zip(_AXES, (valid, diverse), (wide, high))
        notes = [f"{axis} {with_ends(value, *(interval or (None, None)))}" for axis, value, interval in valued]
        if number(row.get("reward")) is not None:
            notes.append(f"reward {format_number(row['reward'])}")
        readings.append([x, y, one.index, [one.name, *notes]])
        values.append(f"{one.name}: {x_title} {format_number(valid)}, {y_title} {format_number(diverse)}")
    title = "Diversity against validity, one point per strategy"
    data = {"kind": "points", "points": readings}
    desc = f"{'; '.join(values)}."
    chart = Chart("diversity-validity", title, desc, SQUARE, xs, ys, x_title, y_title, groups, data)
    return {**found, "chart": chart}


def embedding_map(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """Tokens and their perturbed copies in the plane of two principal components, one panel per perturbation.

    Copies related and unrelated to their token differ in shape and colour.
    """
    found = dig(diagnosis, "embedding_map")
    tokens = _placed([{**row, "index": i} for i, row in enumerate(rows(found, "tokens"))])
    neighbors, perturbations = _placed(rows(found, "neighbors")), rows(found, "perturbations")
    if not tokens or not perturbations:
        return None
    copies = [_placed(rows(perturbation, "points")) for perturbation in perturbations]
    xs, ys = (  # The same plane in every panel.
        spread([point[axis] for points in (tokens, neighbors, *copies) for point in points], edges, count=7)
        for axis, edges in (("x", SQUARE.across), ("y", SQUARE.upward))
    )

    def pixels(points: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
        return [(xs(point["x"]), ys(point["y"])) for point in points]

    def path(mark: tuple[str, str, str], points: Sequence[tuple[float, float]]) -> tuple[str, str]:
        return mark[0], "".join(mark[1].format(x, y) for x, y in points) or "M0 0"

    anchors, nearby = pixels(tokens), pixels(neighbors)
    labels: list[Label] = []
    for row, (x, y) in zip(tokens, anchors):  # towards the middle of the picture, where there is room
        text = token(row.get("text")).strip()
        labels.append((text, x + 9, y, "start") if x < SQUARE.width / 2 else (text, x - 9, y, "end"))
    around = [
        [x, y, -1, [f"“{token(row.get('text'))}”", "a neighbor of a token"]] for row, (x, y) in zip(neighbors, nearby)
    ]
    variance = dig(found, "explained_variance") or (None, None)
    x_title, y_title = (
        f"component {i}" + ("" if v is None else f" ({100 * v:.0f}% of variance)") for i, v in enumerate(variance, 1)
    )
    panels = []
    for count, (perturbation, points) in enumerate(zip(perturbations, copies)):
        name = str(perturbation.get("strategy"))
        near, far = (pixels([p for p in points if bool(p.get("related")) is kind]) for kind in (True, False))
        unrelated, other = (
            "–" if (part := number(perturbation.get(key))) is None else f"{format_number(100 * part, 1)}%"
            for key in ("unrelated_share", "changed_share")
        )
        share, changed = f"{unrelated} became an unrelated token", f"{other} changed their nearest token"
        readings = [*around]
        for row, (x, y) in zip(tokens, anchors):  # what the token's copies are read as, the most frequent first
            counts = Counter(token(point.get("nearest")) for point in points if point.get("token") == row["index"])
            ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
            lines = [f"“{token(row.get('text'))}” is read as", *(f"“{other}” {count}×" for other, count in ordered[:6])]
            lines += [f"and {len(ordered) - 6} others"] if len(ordered) > 6 else []
            readings.append([x, y, -1, lines])
        marks = [path(_NEAR, near), path(_FAR, far), path(_DIAMOND, nearby), path(_DOT, anchors)]
        groups = [Group("halo", marks, labels=labels)]
        title = f"{name}: perturbed embeddings and their nearest tokens"
        data = {"kind": "points", "points": readings}
        chart = Chart(f"map-{count}", title, f"{share}, {changed}.", SQUARE, xs, ys, x_title, y_title, groups, data)
        panel = {"name": name, "series": series.get(name), "share": share, "changed": changed, "points": len(points)}
        panels.append({**panel, "chart": chart})
    shapes = [_DOT, _NEAR, _FAR, *([_DIAMOND] if neighbors else [])]
    legend = [(kind, outline.format(6, 6), words) for kind, outline, words in shapes]
    return {"panels": panels, "legend": legend, "metric": dig(found, "metric")}


def _placed(points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [point for point in points if ends((point.get("x"), point.get("y"))) is not None]
