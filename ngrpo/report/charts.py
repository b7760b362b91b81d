"""Charts as inline SVG: lines with bands, points with whiskers. What JavaScript adds is only the reading of values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ngrpo.report.marks import Series
from ngrpo.report.scale import Scale, spread
from ngrpo.report.values import MISSING, between, escape, figure

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
        notes: lines for the tooltip, not escaped.
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
) -> str:
    """Curves with their bands.

    Args:
        name: unique in the page; the ids inside come from it.
        lines: the curves, each with a point (or a gap) for every position of ``labels``.
        xs: the scale across.
        labels: what each position is called in the tooltip, ``step 12``.
        title: what the chart shows, for those who cannot see it.
        x_title: title of the axis across.
        y_title: title of the axis upward, written above it.
        size: its size.
        digits: decimals in the tooltip.

    Returns:
        HTML, empty where no line has a point.
    """
    reach = [value for line in lines for point in line.points for value in point[1:] if value is not None]
    if not reach:
        return ""
    ys = spread(reach, *size.upward, count=4 if size.kind == "small" else 5, share=True)
    body, series = [], []
    many = " many" if len(lines) > 5 else ""
    for line in lines:
        pixels = [(xs(x), None if y is None else ys(y)) for x, y, _, _ in line.points]
        band = [(xs(x), ys(low), ys(high)) for x, _, low, high in line.points if low is not None and high is not None]
        parts = []
        if len(band) > 1:
            edge = [f"{x:g} {low:g}" for x, low, _ in band] + [f"{x:g} {high:g}" for x, _, high in reversed(band)]
            parts.append(f'<path class="band{many}" d="M{"L".join(edge)}Z"/>')
        elif band:
            x, low, high = band[0]
            parts.append(f'<path class="whisker" d="M{x:g} {low:g}V{high:g}"/>')
        parts.append(f'<path class="line" d="{_path(pixels)}"/>')
        stride = -(-len(pixels) // _MOST_MARKERS)
        # Each strategy's markers start elsewhere, so that curves on top of each other can still be told apart.
        offset = line.series.index % stride if stride > 1 else 0
        parts += [line.series.marker(x, y) for x, y in pixels[offset::stride] if y is not None]
        body.append(f'<g class="{line.series.classes}" data-s="{line.series.index}">{"".join(parts)}</g>')
        texts = [
            figure(y, digits) + (f" ({between(low, high, digits)})" if low is not None and high is not None else "")
            for _, y, low, high in line.points
        ]
        series.append([line.series.index, line.series.name, [y for _, y in pixels], texts])
    columns = [xs(point[0]) for point in lines[0].points]
    data = {"kind": "lines", "x": columns, "labels": list(labels), "series": series}
    finals = "; ".join(f"{line.series.name}: {_last(line, digits)}" for line in lines)
    frame = axes(xs, ys, size, x_title, y_title)
    return plot(name, frame + "".join(body), size, title, f"Last values: {finals}.", data)


def scatter(name: str, points: Sequence[Point], *, title: str, x_title: str, y_title: str, size: Size) -> str:
    """One labelled point per strategy, with whiskers. Arguments as in `line_chart`; empty without points."""
    if not points:
        return ""
    xs = spread([v for p in points for v in (p.x, *(p.x_interval or ()))], *size.across)
    ys = spread([v for p in points for v in (p.y, *(p.y_interval or ()))], *size.upward)
    body, data, taken, drawn = [], [], [], []
    for point in points:  # Labels keep off markers and whiskers.
        x, y = xs(point.x), ys(point.y)
        across, upward = ([scale(v) for v in i or ()] for scale, i in ((xs, point.x_interval), (ys, point.y_interval)))
        drawn.append((point, x, y, across, upward))
        taken.append((x - 6, y - 6, x + 6, y + 6))
        taken += [(across[0], y - 1, across[1], y + 1)] if across else []
        taken += [(x - 1, upward[1], x + 1, upward[0])] if upward else []
    for point, x, y, across, upward in drawn:
        whiskers = f'<path class="whisker" d="M{across[0]:g} {y:g}H{across[1]:g}"/>' if across else ""
        whiskers += f'<path class="whisker" d="M{x:g} {upward[0]:g}V{upward[1]:g}"/>' if upward else ""
        shown = whiskers + point.series.marker(x, y) + place_label(point.series.name, x, y, size, taken)
        body.append(f'<g class="{point.series.classes} big" data-s="{point.series.index}">{shown}</g>')
        data.append([x, y, point.series.index, [point.series.name, *point.notes]])
    told = "; ".join(f"{p.series.name}: {x_title} {figure(p.x)}, {y_title} {figure(p.y)}" for p in points)
    frame = axes(xs, ys, size, x_title, y_title)
    return plot(name, frame + "".join(body), size, title, told + ".", {"kind": "points", "points": data})


def axes(xs: Scale, ys: Scale, size: Size, x_title: str, y_title: str) -> str:
    """Grid, tick labels and titles."""
    (left, right), (bottom, _) = size.across, size.upward
    parts = [f'<path class="grid" d="M{left} {ys(tick):g}H{right}"/>' for tick in ys.ticks]
    parts.append(f'<path class="axis" d="M{left} {bottom}H{right}"/>')
    for tick, label in zip(ys.ticks, ys.labels):
        parts.append(f'<text class="tick" x="{left - 7}" y="{ys(tick):g}" dy=".35em" text-anchor="end">{label}</text>')
    for tick, label in zip(xs.ticks, xs.labels):
        x = xs(tick)
        parts.append(f'<path class="axis" d="M{x:g} {bottom}v4"/>')
        parts.append(f'<text class="tick" x="{x:g}" y="{bottom + 7}" dy=".8em" text-anchor="middle">{label}</text>')
    middle = f'x="{(left + right) / 2:g}" y="{bottom + 7}" dy="2.35em" text-anchor="middle"'
    parts.append(f'<text class="axis-title" x="2" y="5" dy=".8em">{escape(y_title)}</text>')
    parts.append(f'<text class="axis-title" {middle}>{escape(x_title)}</text>')
    return "".join(parts)


def place_label(
    text: str, x: float, y: float, size: Size, taken: list[tuple[float, float, float, float]], *, force: bool = False
) -> str:
    """A label beside a point where nothing else is, or none where there is no room (unless forced)."""
    shown = text if len(text) <= 28 else text[:27] + "…"
    wide, high = 7.6 * len(shown), 13.0  # At the largest size of type; see style.css.
    right = size.width - 2
    spots = [(x + 9, y, "start"), (x - 9, y, "end"), (x, y - 14, "middle"), (x, y + 14, "middle")]
    spots += [(x + 8, y - 12, "start"), (x - 8, y - 12, "end"), (x + 8, y + 12, "start"), (x - 8, y + 12, "end")]
    for at, level, anchor in spots:
        begin = at - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        box = (begin, level - high / 2, begin + wide, level + high / 2)
        inside = box[0] >= 2 and box[2] <= right and box[1] >= _TOP - 10 and box[3] <= size.upward[0]
        if inside and not any(_overlap(box, other) for other in taken):
            break
    else:
        if not force:
            return ""
        at, level, anchor = (x + 9, y, "start") if x < size.width / 2 else (x - 9, y, "end")
        box = (x, y, x, y)
    taken.append(box)
    return (
        f'<text class="point-label" x="{at:g}" y="{level:g}" dy=".35em" text-anchor="{anchor}">{escape(shown)}</text>'
    )


def plot(name: str, body: str, size: Size, title: str, desc: str, data: dict[str, Any]) -> str:
    """The SVG in the element that takes pointer and keyboard."""
    return (
        f'<div class="plot {size.kind}" tabindex="0" role="group" aria-label="{escape(title)}. '
        f'Arrow keys read out the values." data-chart="{escape(json.dumps(data, ensure_ascii=False))}">'
        f'<svg viewBox="0 0 {size.width} {size.height}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(desc)}</desc>'
        f"{body}</svg></div>"
    )


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
