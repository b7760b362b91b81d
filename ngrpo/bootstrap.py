# SPDX-License-Identifier: Apache-2.0
"""Bootstrap intervals of 95%, and paired differences to a baseline.

Percentile bootstrap (Efron and Tibshirani, 1993, chapter 13). Of trained models seeds and problems are two crossed
random factors: each replicate draws both anew, with replacement, and takes the mean over the drawn table. Of samples
before training only the prompts are drawn, and any function of them is taken. A paired difference draws the same for
both strategies, since both ran under the same seeds on the same problems.
"""

from __future__ import annotations

from typing import Any

import numpy as np

REPLICATES, DRAWS = 4000, 2000
LEVEL = 0.95
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
    low, high = (None, None) if table.size == 1 else bounds(_replicates(table))
    return {"value": float(table.mean()), "low": low, "high": high}


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
    return judged(interval(np.asarray(ours, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)))


def judged(difference: Interval) -> Interval:
    """A difference with ``within_noise``: whether its interval holds 0, or there is none."""
    low, high = difference["low"], difference["high"]
    return {**difference, "within_noise": low is None or low <= 0.0 <= high}


def bounds(replicates: np.ndarray) -> tuple[float, float]:
    """The central 95% of replicates (N,)."""
    low, high = np.quantile(replicates, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def resamples(count: int, seed: int) -> np.ndarray:
    """What to draw from ``count`` prompts, with replacement: (DRAWS, count), the same in every run."""
    return np.random.default_rng(seed).integers(0, count, size=(DRAWS, count))


def _replicates(table: np.ndarray) -> np.ndarray:
    """(REPLICATES,) means of tables whose rows and columns are drawn with replacement."""
    rows, columns = table.shape
    draw = np.random.default_rng(_SEED)
    by_row = draw.multinomial(rows, np.full(rows, 1.0 / rows), size=REPLICATES) / rows
    by_column = draw.multinomial(columns, np.full(columns, 1.0 / columns), size=REPLICATES) / columns
    return np.einsum("rs,sp,rp->r", by_row, table, by_column, optimize=True)
