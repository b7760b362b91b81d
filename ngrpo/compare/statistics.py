"""Bootstrap intervals over problems and seeds, and paired differences to the baseline.

Percentile bootstrap (Efron and Tibshirani, 1993, chapter 13). Seeds and problems are two crossed random factors: each
replicate draws both anew, with replacement, and takes the mean over the drawn table. A paired difference draws the
same seeds and problems for both strategies, since both ran under the same seeds on the same problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

REPLICATES = 4000
LEVEL = 0.95
ENOUGH_SEEDS = 3
_SEED = 20260610  # of the resampling alone; the same data give the same interval

Interval = dict[str, Any]


def interval(table: np.ndarray) -> Interval:
    """Mean and interval of one strategy.

    Args:
        table: seeds × problems (or seeds × 1), float.

    Returns:
        ``value``, ``low``, ``high``; the bounds are None where a single number leaves nothing to resample.
    """
    table = np.atleast_2d(np.asarray(table, dtype=np.float64))
    value = float(table.mean())
    if table.size == 1:
        return {"value": value, "low": None, "high": None}
    means = _replicates(table)
    tail = (1.0 - LEVEL) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return {"value": value, "low": float(low), "high": float(high)}


def paired(ours: np.ndarray, baseline: np.ndarray) -> Interval:
    """Mean paired difference with its interval.

    Args:
        ours: seeds × problems of a strategy.
        baseline: the same seeds and problems, in the same order, of the baseline.

    Returns:
        As :func:`interval`, and ``within_noise``: whether 0 lies inside, or nothing could be resampled.

    Raises:
        ValueError: where the shapes differ.
    """
    if np.shape(ours) != np.shape(baseline):
        raise ValueError(
            f"tables of {np.shape(ours)} and {np.shape(baseline)}: pairs need the same seeds and problems."
        )
    result = interval(np.asarray(ours, dtype=np.float64) - np.asarray(baseline, dtype=np.float64))
    known = result["low"] is not None
    return {**result, "within_noise": not known or bool(result["low"] <= 0.0 <= result["high"])}


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


def pass_at_k_table(correct: np.ndarray, n: int, k: int) -> np.ndarray:
    """Unbiased Pass@k of each seed and problem, from the counts of correct samples (seeds × problems)."""
    from ngrpo.evaluate import pass_at_k

    values = [pass_at_k(n, c, k) for c in range(n + 1)]
    return np.array(values)[np.asarray(correct, dtype=np.int64)]


def last_quarter(rewards: Sequence[float]) -> float:
    """Mean of the last quarter of a learning curve, at least one step."""
    count = max(1, len(rewards) // 4)
    return float(np.mean(rewards[-count:]))


def first_quarter(rewards: Sequence[float]) -> float:
    """Mean of the first quarter of a learning curve, at least one step."""
    return float(np.mean(rewards[: max(1, len(rewards) // 4)]))


def _replicates(table: np.ndarray) -> np.ndarray:
    """(REPLICATES,) means of tables whose rows and columns are drawn with replacement."""
    rows, columns = table.shape
    draw = np.random.default_rng(_SEED)
    by_row = draw.multinomial(rows, np.full(rows, 1.0 / rows), size=REPLICATES) / rows
    by_column = draw.multinomial(columns, np.full(columns, 1.0 / columns), size=REPLICATES) / columns
    return np.einsum("rs,sp,rp->r", by_row, table, by_column, optimize=True)
