# SPDX-License-Identifier: Apache-2.0
"""Parts of every chart: a strategy's look, and axes with ticks at round numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ngrpo.workbench.report.values import dig, rows

HUES = 7  # --hue0 (the baseline's grey) to --hue6 in style.css
_DASHES = 6
# Outlines around (0, 0), of about the same area.
_SHAPES = (
    "M-3 0A3 3 0 1 0 3 0A3 3 0 1 0 -3 0Z",
    "M-2.7 -2.7H2.7V2.7H-2.7Z",
    "M0 -3.7L3.5 2.6H-3.5Z",
    "M0 -3.9L3.4 0L0 3.9L-3.4 0Z",
    "M0 3.7L3.5 -2.6H-3.5Z",
    "M-1.2 -3.4H1.2V-1.2H3.4V1.2H1.2V3.4H-1.2V1.2H-3.4V-1.2H-1.2Z",
)
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 14, 30, 46


@dataclass(frozen=True)
class Series:
    """A strategy and its number in the list, 0 being the baseline or the first: colour is never the only difference."""

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
    """The look of each strategy of a comparison, of a diagnosis, or of both; the baseline comes first."""
    both = [*rows(results, "strategies"), *rows(results, "diagnosis", "strategies")]
    names = [str(row.get("id", row.get("name"))) for row in both]
    baseline = dig(results, "baseline") or dig(results, "diagnosis", "baseline")
    ordered = dict.fromkeys([name for name in names if name == baseline] + names)
    return {name: Series(index, name) for index, name in enumerate(ordered)}


def by_series(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> list[tuple[Series, Mapping[str, Any]]]:
    """The rows of a diagnosis, each with its strategy's look."""
    return [(series[str(row.get("id", row.get("name")))], row) for row in rows(diagnosis, "strategies")]


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


WIDE, SMALL, SQUARE = Size(560, 300, "wide", 7, 5), Size(360, 210, "small", 4, 4), Size(480, 380, "square", 5, 5)


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
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
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
    low, high = min(values), max(values)
    if share and 0 <= low <= 0.35 * high:
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(high) / 4 or 0.5
        low, high = (max(low - room, 0.0) if share and low >= 0 else low - room), high + room
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(least, next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if share and max(values) <= 1 < last * step:
        last = max(first + 1, math.floor(1 / step + 1e-9))
    ticks = [float(f"{i * step:.9g}") for i in range(first, last + 1)]
    decimals = next((digits for digits in range(7) if math.isclose(round(step, digits), step)), None)
    form = ".3g" if decimals is None or high >= 1e6 else f",.{decimals}f"
    labels = [f"{tick:{form}}".replace("-", "−") for tick in ticks]
    return Scale(ticks[0], max(ticks[-1], *values), *edges, ticks, labels)


def doubling(values: Sequence[int], size: Size) -> Scale:
    """The logarithmic scale across for k = 1, 2, 4, …: call it with ``math.log2(k)``; each k is a tick."""
    logs = [math.log2(value) for value in values]
    pad = 0.5 if len(logs) == 1 else 0.0
    return Scale(logs[0] - pad, logs[-1] + pad, *size.across, logs, [str(value) for value in values])
