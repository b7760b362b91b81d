# SPDX-License-Identifier: Apache-2.0
"""What pairs of measurements say: medians, and the range of their ratios."""

import statistics
from collections.abc import Sequence


def summary(pairs: Sequence[tuple[float, float]], plain: str) -> dict[str, float]:
    """Of measurements made in turn.

    Args:
        pairs: (without, with) what is measured, side by side.
        plain: the name of the median without it.

    Returns:
        That median, and ``ratio``, ``lowest``, ``highest``: with over without, the median and the range of the pairs.
    """
    ratios = [ours / theirs for theirs, ours in pairs]
    return {
        plain: statistics.median(theirs for theirs, _ in pairs),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }
