# SPDX-License-Identifier: Apache-2.0
"""Parts of every chart: an arm's look, and axes with ticks at round numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ngrpo.workbench.report.values import dig, rows, short_exponent, told_apart

HUES = 7  # --hue0 (the baseline's grey) to --hue6 in style.css
_DASHES = 6
_MOST_DECIMALS = 4  # of a tick's label without an exponent
# Outlines around (0, 0), of about the same area.
_SHAPES = (
    "M-3 0A3 3 0 1 0 3 0A3 3 0 1 0 -3 0Z",
    "M-2.7 -2.7H2.7V2.7H-2.7Z",
    "M0 -3.7L3.5 2.6H-3.5Z",
    "M0 -3.9L3.4 0L0 3.9L-3.4 0Z",
    "M0 3.7L3.5 -2.6H-3.5Z",
    "M-1.2 -3.4H1.2V-1.2H3.4V1.2H1.2V3.4H-1.2V1.2H-3.4V-1.2H-1.2Z",
)
# The margins around a chart's plane.
_LEFT = 50
_RIGHT = 14
_TOP = 30
_BOTTOM = 46


@dataclass(frozen=True)
class Series:
    """An arm and its number in the list; 0 is the baseline or the first.

    Two arms differ in dash, or in the marker's shape or fill, and never in color alone.
    """

    index: int
    name: str

    @property
    def classes(self) -> str:
        """CSS classes of its hue and dash; the pair is unique among the first 37."""
        hue = 0 if self.index == 0 else 1 + (self.index - 1) % (HUES - 1)
        return f"h{hue} d{(self.index + self.index // _DASHES) % _DASHES}"

    @property
    def shape(self) -> str:
        """Its marker's outline."""
        return _SHAPES[self.index % len(_SHAPES)]

    @property
    def hollow(self) -> bool:
        """Whether its marker is hollow: in every second half-dozen."""
        return bool(self.index // _DASHES % 2)


def all_series(results: Mapping[str, Any]) -> dict[str, Series]:
    """The look of each arm of a comparison, of a diagnosis, or of both, by its id; the baseline comes first."""
    arms = [*rows(results, "strategies"), *rows(results, "diagnosis", "strategies")]
    ids = [_id(row) for row in arms]
    baseline = dig(results, "baseline") or dig(results, "diagnosis", "baseline")
    if baseline in ids:
        ids.insert(0, baseline)
    return {arm: Series(index, arm) for index, arm in enumerate(dict.fromkeys(ids))}


def by_series(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> list[tuple[Series, Mapping[str, Any]]]:
    """The rows of a diagnosis, each with its arm's look."""
    return [(series[_id(row)], row) for row in rows(diagnosis, "strategies")]


def _id(row: Mapping[str, Any]) -> str:
    """An arm's id, which a comparison has under ``id`` and a diagnosis under ``name``."""
    return str(row.get("id", row.get("name")))


class Size(NamedTuple):
    """A chart's own units, its type's size in style.css, and about how many ticks its axes have."""

    width: int
    height: int
    kind: str
    x_ticks: int
    y_ticks: int

    @property
    def across(self) -> tuple[float, float]:
        """The plane's left and right edge."""
        return _LEFT, self.width - _RIGHT

    @property
    def upward(self) -> tuple[float, float]:
        """The plane's lower and upper edge."""
        return self.height - _BOTTOM, _TOP


WIDE = Size(width=560, height=300, kind="wide", x_ticks=7, y_ticks=5)
SMALL = Size(width=360, height=210, kind="small", x_ticks=4, y_ticks=4)
SQUARE = Size(width=480, height=380, kind="square", x_ticks=5, y_ticks=5)


@dataclass(frozen=True)
class Scale:
    """A linear scale from values ``low < high`` to pixels ``start`` and ``end``, with labelled ticks."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]
    labels: Sequence[str]

    def __call__(self, value: float) -> float:
        """The pixel of a value, to a tenth; values outside are put on the edge."""
        inside = min(max(value, self.low), self.high)
        share = (inside - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def places(self) -> list[tuple[float, str]]:
        """The pixel of each tick with its label."""
        return [(self(tick), label) for tick, label in zip(self.ticks, self.labels)]


def spread(
    values: Sequence[float], edges: tuple[float, float], *, count: int = 5, share: bool = False, least: float = 0.0
) -> Scale:
    """A scale between two pixels over at least one value, with about ``count`` ticks, ending at round numbers.

    ``share``: values are mostly in [0, 1]; the scale then starts at 0 where that is near, and ends at 1 where no value
    is larger. ``least``: the smallest step between ticks.
    """
    low = min(values)
    high = max(values)
    if share and 0 <= low <= 0.35 * high:
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # equal values: make room around them
        room = abs(high) / 4 or 0.5
        begins_at_zero = share and low >= 0
        low = max(low - room, 0.0) if begins_at_zero else low - room
        high += room
    step = max(least, _round_step((high - low) / count))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    if share and max(values) <= 1 < last * step:
        last = max(first + 1, math.floor(1 / step + 1e-9))
    ticks = [float(f"{multiple * step:.9g}") for multiple in range(first, last + 1)]
    return Scale(
        low=ticks[0],
        high=max(ticks[-1], *values),
        start=edges[0],
        end=edges[1],
        ticks=ticks,
        labels=_tick_labels(ticks, step, high),
    )


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is not below a rough step."""
    power = 10.0 ** math.floor(math.log10(rough))
    candidates = [power * factor for factor in (1, 2, 2.5, 5, 10)]
    return next(candidate for candidate in candidates if candidate >= rough * 0.999)


def _tick_labels(ticks: Sequence[float], step: float, high: float) -> list[str]:
    """Labels with as many decimals as the step has; with an exponent, ``5e−6``, where these would be many."""
    exact_decimals = [digits for digits in range(_MOST_DECIMALS + 1) if math.isclose(round(step, digits), step)]
    decimals = exact_decimals[0] if exact_decimals else None
    if decimals is None or high >= 1e6:
        return told_apart(lambda places: [_with_exponent(tick, places) for tick in ticks], range(2, 10))
    return [f"{tick:,.{decimals}f}".replace("-", "−") for tick in ticks]


def _with_exponent(value: float, places: int) -> str:
    """A number with an exponent and at most so many decimals: ``1.25e−5``; zero has no exponent."""
    if value == 0:
        return "0"
    digits, _, exponent = f"{value:.{places}e}".partition("e")
    return short_exponent(f"{digits.rstrip('0').rstrip('.')}e{exponent}").replace("-", "−")


def beginning(scale: Scale) -> str:
    """What an axis's title says of a scale that leaves out 0, ``, axis from 0.6``; empty for any other."""
    if scale.low <= 0.0 <= scale.high:
        return ""
    if scale.low > 0.0:
        return f", axis from {scale.labels[0]}"
    return f", axis up to {scale.labels[-1]}"


def doubling(values: Sequence[int], size: Size) -> Scale:
    """The logarithmic scale across for k = 1, 2, 4, …: call it with ``math.log2(k)``; each k is a tick."""
    logs = [math.log2(value) for value in values]
    pad = 0.5 if len(logs) == 1 else 0.0
    start, end = size.across
    return Scale(
        low=logs[0] - pad,
        high=logs[-1] + pad,
        start=start,
        end=end,
        ticks=logs,
        labels=[str(value) for value in values],
    )
