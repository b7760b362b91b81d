# SPDX-License-Identifier: Apache-2.0
"""Figures of measurements in pairs: medians, and the range of their ratios."""

import statistics
from collections.abc import Mapping, Sequence


def summary(pairs: Sequence[tuple[float, float]], plain: str) -> dict[str, float]:
    """The figures of measurements without and with something, which were made in turn.

    Args:
        pairs: (measured without it, measured with it), side by side.
        plain: the name of the median without it.

    Returns:
        That median, and ``ratio``, ``lowest``, ``highest``: with over without, the median and the range of the pairs.
    """
    ratios = [measured_with / measured_without for measured_without, measured_with in pairs]
    return {
        plain: statistics.median(measured_without for measured_without, _ in pairs),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def ratio_and_range(figures: Mapping[str, float]) -> str:
    """The cells of a printed table for the ratio and its range."""
    return f"{figures['ratio']:7.3f}  {figures['lowest']:.3f}-{figures['highest']:.3f}"
