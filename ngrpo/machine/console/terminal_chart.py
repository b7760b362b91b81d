# SPDX-License-Identifier: Apache-2.0
"""A chart of a few lines of text, for the end of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping

_HEIGHT, _WIDTH = 8, 60
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def columns(values: Mapping[int, float], marks: Mapping[int, float]) -> list[str]:
    """Values in [0, 1] as bars over steps, with marks beside them.

    Args:
        values: a value for each step, from 1; at more than 60 steps a column is the mean of several.
        marks: values that stand as ``●`` in their step's column, step 0 being left of the bars.

    Returns:
        The chart's lines: the scale on the left, the steps below.
    """
    steps = max([*values, *marks, 1])
    each = math.ceil(steps / _WIDTH)
    bars = [
        _mean([values[step] for step in range(first, first + each) if step in values])
        for first in range(1, steps + 1, each)
    ]
    width = 2 if len(bars) * 2 <= _WIDTH else 1
    grid = [[" "] * (len(bars) + 1) for _ in range(_HEIGHT)]
    for column, value in enumerate(bars, start=1):
        eighths = round(min(max(value, 0.0), 1.0) * 8 * _HEIGHT)
        for row in range(_HEIGHT):
            grid[row][column] = _EIGHTHS[min(max(eighths - 8 * row, 0), 8)]
    for step, value in marks.items():
        row = min(int(min(max(value, 0.0), 1.0) * _HEIGHT), _HEIGHT - 1)
        grid[row][math.ceil(step / each)] = "●"
    scale = {_HEIGHT - 1: "1.0", _HEIGHT // 2 - 1: "0.5", 0: "0.0"}
    lines = []
    for row in reversed(range(_HEIGHT)):
        cells = "".join(cell * width if cell in _EIGHTHS else cell + " " * (width - 1) for cell in grid[row])
        lines.append(f"{scale.get(row, ''):>5} │{cells.rstrip()}")
    last = str(steps)
    lines.append(f"      └{'─' * (len(bars) + 1) * width}")
    lines.append(f"step   0{last.rjust((len(bars) + 1) * width - 1)}")
    return lines


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
