# SPDX-License-Identifier: Apache-2.0
"""What a comparison's numbers say: quarters of learning curves, and one plain sentence per strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

ENOUGH_SEEDS = 3
_OF_ONE_SEED = {
    True: "within noise even of its problems; one seed gives no interval over seeds",
    False: "the problems agree, but one seed is too few to tell a method from luck",
}


def verdict(difference: Mapping[str, Any] | None, measure: str, baseline: str, seeds: int) -> str:
    """One plain sentence on a strategy.

    Args:
        difference: from `statistics.paired`, corrected; None where nothing could be compared.
        measure: what was measured, for people: ``Mean@8``.
        baseline: the baseline's id.
        seeds: how many seeds both have.
    """
    if seeds == 0:
        return f"could not be compared with {baseline}: no seed has finished for both"
    if difference is None:
        return f"was not compared with {baseline}: there is no evaluation, and rewards are of rollouts drawn otherwise"
    value, low, high = difference["value"], difference["low"], difference["high"]
    if value == 0.0 and (low in (None, 0.0)) and (high in (None, 0.0)):
        return f"equal to {baseline} in {measure} with every seed"
    text = f"{measure} {value:+.3f}"
    if difference["over"] == "seeds" and difference["p"] is None:
        return f"{text} against {baseline} with each of {seeds} seeds: without a spread nothing can be tested"
    over = " over problems" if difference["over"] == "problems" else ""
    text += ("" if low is None else f" [{low:+.3f}, {high:+.3f}]{over}") + f" against {baseline}"
    if seeds == 1:
        return f"{text}, {_OF_ONE_SEED[difference['within_noise']]}"
    count = difference["comparisons"]
    corrected = "" if count == 1 else f", {difference['p_corrected']:.2g} corrected for {count} comparisons"
    text += f" over {seeds} seeds (p {difference['p']:.2g}{corrected})"
    if difference["within_noise"]:
        least = difference["detectable"]
        return f"within noise: {text}; below about {least:.3f} a difference would often have been missed"
    if seeds < ENOUGH_SEEDS:
        return f"{text}; {seeds} seeds are too few to tell a method from luck"
    return f"{'better' if value > 0 else 'worse'}: {text}"


def last_quarter(rewards: Sequence[float]) -> float:
    """Mean of the last quarter of a learning curve, at least one step."""
    count = max(1, len(rewards) // 4)
    return float(np.mean(rewards[-count:]))


def first_quarter(rewards: Sequence[float]) -> float:
    """Mean of the first quarter of a learning curve, at least one step."""
    return float(np.mean(rewards[: max(1, len(rewards) // 4)]))
