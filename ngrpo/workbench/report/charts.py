# SPDX-License-Identifier: Apache-2.0
"""The parts of a chart, and the curves over steps and over k.

A chart is paths and labels that templates/charts.html draws as SVG.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from ngrpo.workbench.report import drawing
from ngrpo.workbench.report.drawing import WIDE, Scale, Series, Size, beginning, spread
from ngrpo.workbench.report.values import dig, format_number, number, rows, with_ends

_MOST_MARKERS = 12
_MOST_BINS = 60
# OpenRLHF logs an evaluation as eval_DATASET_pass1, its Mean@n, and eval_DATASET_passN, with N responses to a problem.
_EVALUATION_TAG = re.compile(r"_pass(\d+)$")
_MANY_LINES = 5  # with more lines than this, style.css makes their bands paler


class SmallChart(NamedTuple):
    """A small chart over the training steps: the key of its value in a step, its title, and decimals."""

    key: str
    title: str
    digits: int


_SMALL_CHARTS = (
    SmallChart("rate", "Perturbation rate", digits=3),
    SmallChart("shift", "Relative shift of the input", digits=4),
    SmallChart("gap_perturbed_mean", "Training–inference mismatch, perturbed", digits=5),
    SmallChart("gap_plain_mean", "Training–inference mismatch, plain", digits=5),
)


class Point(NamedTuple):
    """A point of a curve: ``y`` is None in a gap, ``low`` and ``high`` are None where there is no band."""

    x: float
    y: float | None = None
    low: float | None = None
    high: float | None = None


class Label(NamedTuple):
    """A text in the drawing; ``anchor`` is SVG's text-anchor."""

    text: str
    x: float
    y: float
    anchor: str


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
    *,
    title: str,
    x_title: str,
    y_title: str,
    size: Size = WIDE,
    digits: int = 3,
) -> Chart | None:
    """Curves with their bands.

    Args:
        name: unique in the page.
        lines: points by arm, one (or a gap) for every position of ``labels``.
        xs: the scale across.
        labels: the tooltip's name of each position, ``step 12``.
        title: of the chart, for those who cannot see it.
        x_title: of the axis across.
        y_title: of the axis upward.
        size: its size.
        digits: decimals in the tooltip.

    Returns:
        The chart; None where no line has a point.
    """
    lines = {series: points for series, points in lines.items() if any(point.y is not None for point in points)}
    if not lines:
        return None
    drawn_values = []
    for points in lines.values():
        for point in points:
            drawn_values += [value for value in (point.y, point.low, point.high) if value is not None]
    ys = spread(drawn_values, size.upward, count=size.y_ticks, share=True)
    groups, readings, last_values = [], [], []
    for series, points in lines.items():
        pixels = [(xs(point.x), None if point.y is None else ys(point.y)) for point in points]
        paths = [*_band(points, xs, ys, many=len(lines) > _MANY_LINES), ("line", _pen(pixels))]
        # Each arm's markers start elsewhere, so that overlapping curves can still be told apart.
        stride = -(-len(pixels) // _MOST_MARKERS)
        markers = [(x, y) for x, y in pixels[series.index % stride :: stride] if y is not None]
        groups.append(Group(series.classes, paths, series, markers))
        texts = [with_ends(point.y, point.low, point.high, digits) for point in points]
        readings.append([series.index, series.name, [y for _, y in pixels], texts])
        last_value = [point.y for point in points if point.y is not None][-1]
        last_values.append(f"{series.name}: {format_number(last_value, digits)}")
    columns = [xs(point.x) for point in next(iter(lines.values()))]
    return Chart(
        name=name,
        title=title,
        desc=f"Last values: {'; '.join(last_values)}.",
        size=size,
        xs=xs,
        ys=ys,
        x_title=x_title,
        y_title=f"{y_title}{beginning(ys)}",
        groups=groups,
        data={"kind": "lines", "x": columns, "labels": list(labels), "series": readings},
    )


def _band(points: Sequence[Point], xs: Scale, ys: Scale, *, many: bool) -> list[tuple[str, str]]:
    """The area between the ends of a curve's intervals, or a whisker where only one point has them."""
    edges = []
    for point in points:
        if point.low is not None and point.high is not None:
            edges.append((xs(point.x), ys(point.low), ys(point.high)))
    if not edges:
        return []
    if len(edges) == 1:
        x, low, high = edges[0]
        return [("whisker", f"M{x:g} {low:g}V{high:g}")]
    forward = [f"{x:g} {low:g}" for x, low, _ in edges]
    back = [f"{x:g} {high:g}" for x, _, high in reversed(edges)]
    css_class = "band many" if many else "band"
    return [(css_class, f"M{'L'.join(forward + back)}Z")]


def _pen(pixels: Sequence[tuple[float, float | None]]) -> str:
    """The path of a curve, which begins again after each gap."""
    path = ""
    in_gap = True
    for x, y in pixels:
        if y is not None:
            path += f"{'M' if in_gap else 'L'}{x:g} {y:g}"
        in_gap = y is None
    return path


def evaluations(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """OpenRLHF's evaluations while training (--eval.steps), by step; of several datasets their mean."""
    by_step = defaultdict[int, defaultdict[str, list[float]]](lambda: defaultdict(list))
    for tag, values in (summary.get("evaluation") or {}).items():
        match = _EVALUATION_TAG.search(tag)
        if match:
            measure = "mean_at_n" if match[1] == "1" else "pass_at_n"
            for step, value in values.items():
                by_step[int(step)][measure].append(value)
    means_by_step = []
    for step, measures in sorted(by_step.items()):
        means = {measure: fmean(values) for measure, values in measures.items()}
        means_by_step.append({"step": step, **means})
    return means_by_step


def learning(results: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any]:
    """Evaluation and reward over steps, and small charts of rate, shift and mismatch.

    Means are over the finished runs of an arm. Only the evaluation compares arms: each draws its rollouts, and so
    their rewards, in its own way.
    """
    trained = defaultdict[str, list[Rows]](list)
    evaluated = defaultdict[str, list[Rows]](list)
    for run in rows(results, "runs"):
        name = run.get("strategy")
        if run.get("status") == "done" and name in series:
            trained[name].append(_by_step(run, "steps"))
            evaluated[name].append(_by_step(run, "evaluations"))
    steps = _all_steps(trained)
    if not steps:
        return {"order": []}
    evaluated_steps = _all_steps(evaluated)
    order = [arm for arm in series.values() if arm.name in trained]

    def chart(
        key: str,
        runs_by_arm: Mapping[str, Sequence[Rows]],
        bins: Sequence[Sequence[int]],
        *,
        title: str,
        y_title: str,
        digits: int = 3,
        size: Size = WIDE,
    ) -> Chart | None:
        return line_chart(
            f"learning-{key}",
            {arm: _seed_means(runs_by_arm[arm.name], key, bins) for arm in order},
            spread(steps + evaluated_steps, size.across, count=size.x_ticks, least=1.0),
            [_bin_label(steps_of_bin) for steps_of_bin in bins],
            title=f"{title} over training steps",
            x_title="training step",
            y_title=y_title,
            size=size,
            digits=digits,
        )

    evaluations = []
    for key, measure in (("mean_at_n", "Mean@n"), ("pass_at_n", "Pass@n")):
        one_step_each = [[step] for step in evaluated_steps]
        title = f"{measure} while training, unperturbed,"
        evaluations.append(chart(key, evaluated, one_step_each, title=title, y_title=measure))

    width = -(-len(steps) // _MOST_BINS)
    bins = [steps[first : first + width] for first in range(0, len(steps), width)]
    reward_title = "Reward of the training rollouts"
    small_charts = []
    for key, title, digits in _SMALL_CHARTS:
        small_charts.append(chart(key, trained, bins, title=title, y_title=title, digits=digits, size=drawing.SMALL))
    ids = [row.get("id") for row in rows(results, "strategies")]
    return {
        "order": order,
        "several": any(len(runs) > 1 for runs in trained.values()),
        "width": width,
        "absent": [arm.name for arm in series.values() if arm.name in ids and arm.name not in trained],
        "evaluations": [evaluation for evaluation in evaluations if evaluation],
        "reward": chart("reward", trained, bins, title=reward_title, y_title=reward_title),
        "small": [small_chart for small_chart in small_charts if small_chart],
        "samples": _samples(rows(results, "runs"), series),
    }


def _samples(runs: Sequence[Mapping[str, Any]], series: Mapping[str, Series]) -> list[dict[str, Any]]:
    """The logged samples of the first finished run of each arm that has any: series, seed and rows."""
    by_arm: dict[str, dict[str, Any]] = {}
    for run in runs:
        name = str(run.get("strategy"))
        sampled = rows(run, "samples")
        if run.get("status") == "done" and sampled and name in series and name not in by_arm:
            by_arm[name] = {"series": series[name], "seed": run.get("seed"), "rows": sampled}
    return [by_arm[name] for name in series if name in by_arm]


def _bin_label(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}–{steps[-1]}"


def _by_step(run: Mapping[str, Any], key: str) -> Rows:
    by_step = {}
    for row in rows(run, key):
        step = number(row.get("step"))
        if step is not None:
            by_step[int(step)] = row
    return by_step


def _all_steps(runs_by_arm: Mapping[str, Sequence[Rows]]) -> list[int]:
    return sorted({step for runs in runs_by_arm.values() for run in runs for step in run})


def _seed_means(runs: Sequence[Rows], key: str, bins: Sequence[Sequence[int]]) -> list[Point]:
    """A curve of the mean over seeds: for each bin of steps a point, with the lowest and the highest seed.

    Args:
        runs: the runs of one arm, a seed each.
        key: of the value in a step.
        bins: steps of which each point is the mean.
    """
    points = []
    for steps in bins:
        means = []  # of the seeds that logged the value in these steps
        for run in runs:
            values = [number(run.get(step), key) for step in steps]
            logged = [value for value in values if value is not None]
            if logged:
                means.append(sum(logged) / len(logged))
        middle = sum(steps) / len(steps)
        if not means:
            points.append(Point(middle))
        elif len(means) == 1:
            points.append(Point(middle, means[0]))
        else:
            points.append(Point(middle, sum(means) / len(means), min(means), max(means)))
    return points


def pass_at_k(source: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """Pass@k over k, of the ``summary`` of results or of a diagnosis's ``strategies``."""
    curves = defaultdict[Series, dict[int, Point]](dict)
    for row in rows(source, "summary") or rows(source, "strategies"):
        name = str(row.get("strategy", row.get("name")))
        for text, value in (row.get("pass_at_k") or {}).items():
            k = int(text)
            interval = value if isinstance(value, Mapping) else {"value": value}
            share = number(interval, "value")
            if share is not None and name in series:
                point = Point(math.log2(k), share, number(interval, "low"), number(interval, "high"))
                curves[series[name]][k] = point
    ks = sorted({k for curve in curves.values() for k in curve})
    if not ks:
        return None

    gaps = {k: Point(math.log2(k)) for k in ks}
    lines = {}
    for arm in series.values():
        if arm in curves:
            point_by_k = {**gaps, **curves[arm]}  # a k that the arm lacks is a gap
            lines[arm] = list(point_by_k.values())
    chart = line_chart(
        "pass-at-k",
        lines,
        drawing.doubling(ks, WIDE),
        [f"Pass@{k}" for k in ks],
        title="Pass@k over the number of samples k",
        x_title="samples k",
        y_title="Pass@k",
    )
    over = [dig(row, "mean_at_n", "over") for row in rows(source, "summary")]
    banded = " or ".join(unit for unit in ("seeds", "problems") if unit in over)
    return {"order": list(lines), "chart": chart, "banded": banded}
