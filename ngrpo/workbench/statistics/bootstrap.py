# SPDX-License-Identifier: Apache-2.0
"""Percentile bootstrap intervals of 95% over problems or prompts (Efron and Tibshirani, 1993, chapter 13).

Of many problems only: it is too narrow for the few seeds of a comparison, for which `significance.py` has
Student's t.
"""

from __future__ import annotations

from typing import Any

import numpy as np

REPLICATES, DRAWS = 4000, 2000
LEVEL = 0.95
_SEED = 20260610  # of the resampling alone; the same data give the same interval


def of_mean(values: np.ndarray) -> tuple[float, float]:
    """The interval of the mean of independent values (N,)."""
    count = len(values)
    times = np.random.default_rng(_SEED).multinomial(count, np.full(count, 1.0 / count), size=REPLICATES)
    return bounds(times @ np.asarray(values, dtype=np.float64) / count)


def judged(difference: dict[str, Any]) -> dict[str, Any]:
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
