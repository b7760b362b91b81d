# SPDX-License-Identifier: Apache-2.0
"""Charts: lines with bands, points with whiskers, as paths and labels that templates/charts.html draws as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ngrpo.workbench.report.marks import Series
from ngrpo.workbench.report.scale import Scale, spread
from ngrpo.workbench.report.values import MISSING, between, figure

_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 14, 30, 46
_MOST_MARKERS = 12


@dataclass(frozen=True)
class Size:
    """A chart's own units. ``kind`` sets the size of its type in style.css: the wide one shrinks more on a phone."""

    width: int
    height: int
    kind: str

    @property
    def across(self) -> tuple[float, float]:
        """The plane's left and right edge."""
        return _LEFT, self.width - _RIGHT

    @property
    def upward(self) -> tuple[float, float]:
        """The plane's lower and upper edge."""
        return self.height - _BOTTOM, _TOP


WIDE = Size(560, 300, "wide")
SMALL = Size(360, 210, "small")
SQUARE = Size(480, 380, "square")


@dataclass(frozen=True)
class Label:
    """A text beside a point; ``anchor`` is the side of it that stands at ``x``, as in SVG."""

    text: str
    x: float
    y: float
    anchor: str


@dataclass(frozen=True)
class Group:
    """What is shown and hidden together: paths with their CSS classes, markers over them, and labels."""

    classes: str
    paths: Sequence[tuple[str, str]]
    series: Series | None = None
    markers: Sequence[tuple[float, float]] = ()
    labels: Sequence[Label] = ()


@dataclass(frozen=True)
class Chart:
    """What is drawn.

    Attributes:
        name: unique in the page; the ids inside come from it.
        title: what the chart shows, for those who cannot see it; ``desc`` says the values.
        size: its size; ``xs`` and ``ys`` are its scales, ``x_title`` and ``y_title`` are theirs.
        groups: in the order in which they are drawn.
        data: what script.js reads values from.
    """

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


@dataclass(frozen=True)
class Line:
    """One strategy's curve.

    Attributes:
        series: the strategy.
        points: ``(x, y, low, high)`` by x; y is None in a gap, low and high are None where there is no band.
    """

    series: Series
    points: Sequence[tuple[float, float | None, float | None, float | None]]


@dataclass(frozen=True)
class Point:
    """One strategy's point.

    Attributes:
        series: the strategy.
        x: its value across.
        y: its value upward.
        x_interval: whisker across.
        y_interval: whisker upward.
        notes: lines for the tooltip.
    """

    series: Series
    x: float
    y: float
    x_interval: Sequence[float] | None = None
    y_interval: Sequence[float] | None = None
    notes: Sequence[str] = field(default_factory=tuple)


def line_chart(
    name: str,
    lines: Sequence[Line],
    xs: Scale,
    labels: Sequence[str],
    *,
    title: str,
    x_title: str,
    y_title: str,
    size: Size,
    digits: int = 3,
) -> Chart | None:
    """Curves with their bands.

    Args:
        name: unique in the page.
        lines: the curves, each with a point (or a gap) for every position of ``labels``.
        xs: the scale across.
        labels: what each position is called in the tooltip, ``step 12``.
        title: what the chart shows, for those who cannot see it.
        x_title: title of the axis across.
        y_title: title of the axis upward, written above it.
        size: its size.
        digits: decimals in the tooltip.

    Returns:
        The chart; None where no line has a point.
    """
    reach = [value for line in lines for point in line.points for value in point[1:] if value is not None]
    if not reach:
        return None
    ys = spread(reach, *size.upward, count=4 if size.kind == "small" else 5, share=True)
    groups, series = [], []
    many = " many" if len(lines) > 5 else ""
    for line in lines:
        pixels = [(xs(x), None if y is None else ys(y)) for x, y, _, _ in line.points]
        band = [(xs(x), ys(low), ys(high)) for x, _, low, high in line.points if low is not None and high is not None]
        paths = []
        if len(band) > 1:
            edge = [f"{x:g} {low:g}" for x, low, _ in band] + [f"{x:g} {high:g}" for x, _, high in reversed(band)]
            paths.append((f"band{many}", f"M{'L'.join(edge)}Z"))
        elif band:
            x, low, high = band[0]
            paths.append(("whisker", f"M{x:g} {low:g}V{high:g}"))
        paths.append(("line", _path(pixels)))
        stride = -(-len(pixels) // _MOST_MARKERS)
        # Each strategy's markers start elsewhere, so that curves on top of each other can still be told apart.
        offset = line.series.index % stride if stride > 1 else 0
        markers = [(x, y) for x, y in pixels[offset::stride] if y is not None]
        groups.append(Group(line.series.classes, paths, line.series, markers))
        texts = [
            figure(y, digits) + (f" ({between(low, high, digits)})" if low is not None and high is not None else "")
            for _, y, low, high in line.points
        ]
        series.append([line.series.index, line.series.name, [y for _, y in pixels], texts])
    columns = [xs(point[0]) for point in lines[0].points]
    data = {"kind": "lines", "x": columns, "labels": list(labels), "series": series}
    finals = "; ".join(f"{line.series.name}: {_last(line, digits)}" for line in lines)
    return Chart(name, title, f"Last values: {finals}.", size, xs, ys, x_title, y_title, groups, data)


def scatter(name: str, points: Sequence[Point], *, title: str, x_title: str, y_title: str, size: Size) -> Chart | None:
    """One labelled point per strategy, with whiskers. Arguments as in `line_chart`; None without points."""
    if not points:
        return None
    xs = spread([v for p in points for v in (p.x, *(p.x_interval or ()))], *size.across)
    ys = spread([v for p in points for v in (p.y, *(p.y_interval or ()))], *size.upward)
    groups, data, boxes, marks = [], [], [], []
    for point in points:  # Labels keep off markers and whiskers.
        x, y = xs(point.x), ys(point.y)
        boxes.append((x - 6, y - 6, x + 6, y + 6))
        whiskers = []
        if point.x_interval:
            left, right = map(xs, point.x_interval)
            boxes.append((left, y - 1, right, y + 1))
            whiskers.append(("whisker", f"M{left:g} {y:g}H{right:g}"))
        if point.y_interval:
            low, high = map(ys, point.y_interval)
            boxes.append((x - 1, high, x + 1, low))
            whiskers.append(("whisker", f"M{x:g} {low:g}V{high:g}"))
        marks.append((point.series, x, y, whiskers))
        data.append([x, y, point.series.index, [point.series.name, *point.notes]])
    for one, x, y, whiskers in marks:
        labels = place_label(one.name, x, y, size, boxes)
        groups.append(Group(f"{one.classes} big", whiskers, one, [(x, y)], labels))
    text = "; ".join(f"{p.series.name}: {x_title} {figure(p.x)}, {y_title} {figure(p.y)}" for p in points)
    return Chart(name, title, f"{text}.", size, xs, ys, x_title, y_title, groups, {"kind": "points", "points": data})


def place_label(
    text: str, x: float, y: float, size: Size, boxes: list[tuple[float, float, float, float]], *, force: bool = False
) -> list[Label]:
    """A label beside a point where nothing else is, or none where there is no room (unless forced)."""
    short = text if len(text) <= 28 else text[:27] + "…"
    wide, high = 7.6 * len(short), 13.0  # At the largest size of type; see style.css.
    right = size.width - 2
    spots = [(x + 9, y, "start"), (x - 9, y, "end"), (x, y - 14, "middle"), (x, y + 14, "middle")]
    spots += [(x + 8, y - 12, "start"), (x - 8, y - 12, "end"), (x + 8, y + 12, "start"), (x - 8, y + 12, "end")]
    for at, level, anchor in spots:
        begin = at - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        box = (begin, level - high / 2, begin + wide, level + high / 2)
        inside = box[0] >= 2 and box[2] <= right and box[1] >= _TOP - 10 and box[3] <= size.upward[0]
        if inside and not any(_overlap(box, other) for other in boxes):
            break
    else:
        if not force:
            return []
        at, level, anchor = (x + 9, y, "start") if x < size.width / 2 else (x - 9, y, "end")
        box = (x, y, x, y)
    boxes.append(box)
    return [Label(short, at, level, anchor)]


def _path(pixels: Sequence[tuple[float, float | None]]) -> str:
    parts, pen = [], "M"
    for x, y in pixels:
        if y is None:
            pen = "M"
            continue
        parts.append(f"{pen}{x:g} {y:g}")
        pen = "L"
    return "".join(parts)


def _last(line: Line, digits: int) -> str:
    return next((figure(y, digits) for _, y, _, _ in reversed(line.points) if y is not None), MISSING)


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
