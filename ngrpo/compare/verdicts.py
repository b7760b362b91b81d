# SPDX-License-Identifier: Apache-2.0
"""What a comparison's numbers say: quarters of learning curves, and one plain sentence per strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

ENOUGH_SEEDS = 3


def verdict(difference: Mapping[str, Any] | None, measure: str, baseline: str, seeds: int) -> str:
    """One plain sentence on a strategy.

    Args:
        difference: from :func:`paired`; None where nothing could be compared.
        measure: what was measured, for people: ``Mean@8``.
        baseline: the baseline's id.
        seeds: how many seeds both have.
    """
    if difference is None:
        return f"could not be compared with {baseline}: no seed has finished for both"
    value, low, high = difference["value"], difference["low"], difference["high"]
    if value == 0.0 and (low in (None, 0.0)) and (high in (None, 0.0)):
        return f"equal to {baseline} in {measure}, sample by sample"
    bounds = "" if low is None else f" [{low:+.3f}, {high:+.3f}]"
    text = f"{measure} {value:+.3f}{bounds} against {baseline}"
    if difference["within_noise"]:
        return f"within noise: {text}"
    if seeds < ENOUGH_SEEDS:
        word = "one seed is" if seeds == 1 else f"{seeds} seeds are"
        return f"{text}; the problems agree, but {word} too few to tell a method from luck"
    return f"{'better' if value > 0 else 'worse'}: {text}, over {seeds} seeds"


def last_quarter(rewards: Sequence[float]) -> float:
    """Mean of the last quarter of a learning curve, at least one step."""
    count = max(1, len(rewards) // 4)
    return float(np.mean(rewards[-count:]))


def first_quarter(rewards: Sequence[float]) -> float:
    """Mean of the first quarter of a learning curve, at least one step."""
    return float(np.mean(rewards[: max(1, len(rewards) // 4)]))
