# SPDX-License-Identifier: Apache-2.0
"""Axes: from values to pixels, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A linear scale; all fields are finite and ``low < high``.

    Attributes:
        low: value at ``start``.
        high: value at ``end``.
        start: pixel of ``low``.
        end: pixel of ``high``; smaller than ``start`` on a vertical axis.
        ticks: values to label, inside ``[low, high]``.
        labels: one text per tick.
    """

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    def __call__(self, value: float) -> float:
        """The pixel of a value, to a tenth; values outside are put on the edge."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def places(self) -> list[tuple[float, str]]:
        """The pixel of each tick with its label."""
        return [(self(tick), label) for tick, label in zip(self.ticks, self.labels)]


def spread(values: Iterable[float], start: float, end: float, *, count: int = 5, share: bool = False) -> Scale:
    """A scale over values that ends at round numbers.

    Args:
        values: what it must hold; may be empty.
        start: pixel of its low end.
        end: pixel of its high end.
        count: about how many ticks.
        share: whether the values are shares or never negative; then zero is taken in where it is near, and
            the scale does not run past 1 where no value does.
    """
    amounts = list(values) or [0.0, 1.0]
    low, high = min(amounts), max(amounts)
    if share and 0 <= low <= 0.35 * high:
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(high) / 4 or 0.5
        low, high = (max(low - room, 0.0) if share and low >= 0 else low - room), high + room
    step = _step(low, high, count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if share and max(amounts) <= 1 < last * step:
        last = max(first + 1, math.floor(1 / step + 1e-9))
    ticks = [round(i * step, 12) if step > 1e-9 else i * step for i in range(first, last + 1)]
    top = max(ticks[-1], max(amounts))
    return Scale(ticks[0], top, start, end, tuple(ticks), tuple(_label(tick, step) for tick in ticks))


def counted(values: Sequence[float], start: float, end: float, *, count: int = 6) -> Scale:
    """A scale over steps: it runs from the first to the last, with whole numbers as ticks, both ends among them."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if low == high:
        return Scale(low - 1, high + 1, start, end, (low,), (f"{low:,.0f}",))
    step = max(1.0, _step(low, high, count))
    inner = [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    inner = [tick for tick in inner if tick - low > 0.6 * step and high - tick > 0.6 * step]
    ticks = (low, *inner, high)
    return Scale(low, high, start, end, ticks, tuple(f"{tick:,.0f}" for tick in ticks))


def doubling(values: Sequence[float], start: float, end: float) -> Scale:
    """A logarithmic scale for k = 1, 2, 4, …: call it with ``math.log2(k)``; each k is a tick."""
    logs = sorted({math.log2(value) for value in values}) or [0.0]
    pad = 0.5 if len(logs) == 1 else 0.0
    labels = tuple(f"{round(2**log)}" for log in logs)
    return Scale(logs[0] - pad, logs[-1] + pad, start, end, tuple(logs), labels)


def _step(low: float, high: float, count: int) -> float:
    """1, 2, 2.5 or 5 times a power of ten, so that there are about ``count`` steps."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)


def _label(value: float, step: float) -> str:
    """As many digits as tell two ticks apart."""
    power = math.floor(math.log10(step) + 1e-9)
    if abs(step / 10.0**power - 2.5) < 1e-6:
        power -= 1  # the last digit of 0.25 or 0.025
    if power >= -6 and abs(value) < 1e6:
        return f"{value:,.{max(0, -power)}f}".replace("-", "−")
    if not value:
        return "0"
    decimals = max(0, math.floor(math.log10(abs(value)) + 1e-9) - power)
    mantissa, _, exponent = f"{value:.{decimals}e}".partition("e")
    return f"{mantissa}e{int(exponent)}".replace("-", "−")
