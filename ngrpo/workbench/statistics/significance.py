# SPDX-License-Identifier: Apache-2.0
"""Statements over seeds: t intervals, paired t tests, Holm's correction, the smallest difference that could be seen.

A trained model's score is one number for each seed, and seeds are few. Student's t over them keeps its 95%, where the
bootstrap over five seeds covers about 85% (`python -m benchmarks.coverage`). Problems are those that were evaluated:
an interval over seeds says nothing of other problems. With one seed only the problems can be resampled, and ``over``
tells which of the two an interval is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ngrpo.workbench.statistics import bootstrap

LEVEL, POWER = bootstrap.LEVEL, 0.8

Interval = dict[str, Any]


def interval(table: np.ndarray) -> Interval:
    """Mean and interval of one strategy.

    Args:
        table: seeds × problems (or seeds × 1), float.

    Returns:
        ``value``, ``low``, ``high``, and ``over``: ``seeds``, ``problems`` where there is one seed, None where a
        single number has no interval.
    """
    table = np.atleast_2d(np.asarray(table, dtype=np.float64))
    value, by_seed = float(table.mean()), table.mean(axis=1)
    if table.size == 1:
        return {"value": value, "low": None, "high": None, "over": None}
    if len(table) == 1:
        low, high = bootstrap.of_mean(table[0])
        return {"value": value, "low": low, "high": high, "over": "problems"}
    from scipy import stats

    error = float(by_seed.std(ddof=1)) / math.sqrt(len(by_seed))
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(by_seed) - 1)) * error
    return {"value": value, "low": value - half, "high": value + half, "over": "seeds"}


def paired(ours: np.ndarray, baseline: np.ndarray) -> Interval:
    """Mean paired difference, its interval, and the paired t test over seeds.

    Args:
        ours: seeds × problems of a strategy.
        baseline: the same seeds and problems, in the same order, of the baseline.

    Returns:
        As :func:`interval`, and:

        ``p``: two-sided, of no difference; None for one seed, and where every seed differs by exactly the same, which
        leaves a t test no spread to judge by.
        ``spread``: the standard deviation of the differences over ``seeds``; None for one seed.
        ``within_noise``: whether the difference may be chance. It is set from ``p`` and corrected by
        :func:`correct`; with one seed it says whether the interval over problems holds 0.

    Raises:
        ValueError: where the shapes differ.
    """
    if np.shape(ours) != np.shape(baseline):
        raise ValueError(
            f"tables of {np.shape(ours)} and {np.shape(baseline)}: pairs need the same seeds and problems."
        )
    table = np.atleast_2d(np.asarray(ours, dtype=np.float64) - np.asarray(baseline, dtype=np.float64))
    estimate = interval(table)
    if estimate["over"] != "seeds":
        return {**bootstrap.judged(estimate), "p": None, "spread": None, "seeds": len(table)}
    by_seed = table.mean(axis=1)
    spread = float(by_seed.std(ddof=1))
    # Equal up to rounding: differences are of shares, which are far coarser.
    if spread <= 1e-12:
        p = 1.0 if abs(estimate["value"]) <= 1e-12 else None
    else:
        from scipy import stats

        p = float(stats.ttest_1samp(by_seed, 0.0).pvalue)
    noise = p is None or p >= 1 - LEVEL
    return {**estimate, "p": p, "spread": spread, "seeds": len(table), "within_noise": noise}


def correct(differences: Sequence[Interval]) -> None:
    """Corrects paired differences that answer one question of several strategies, in place.

    Adds ``p_corrected`` (Holm's), ``comparisons`` (how many were corrected for) and ``detectable``, the smallest true
    difference that would be found in four of five repetitions, and sets ``within_noise`` anew. Those without a p-value
    are left as they are.
    """
    tested = [difference for difference in differences if difference["p"] is not None]
    for difference, p in zip(tested, holm([difference["p"] for difference in tested])):
        least = detectable(difference["spread"], difference["seeds"], len(tested))
        difference |= {"p_corrected": p, "comparisons": len(tested), "detectable": least}
        difference["within_noise"] = p >= 1 - LEVEL


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for being several, by Holm's step-down method (Scandinavian Journal of Statistics 6, 1979).

    The chance that any true null hypothesis has a corrected value below α is at most α, however they depend on each
    other. The i-th smallest of m (i from 0) is multiplied by m − i; none is below a smaller one's, and none above 1.
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def detectable(spread: float, pairs: int, comparisons: int = 1, tasks: int = 1) -> float | None:
    """The smallest true difference that a two-sided paired t test finds with a chance of 80%.

    Args:
        spread: standard deviation of the paired differences over seeds.
        pairs: seeds.
        comparisons: the level is 0.05 over this number, which is Holm's first step: the hardest one.
        tasks: how many are pooled, each with so many seeds and this spread.

    Returns:
        The difference; None for fewer than two pairs.
    """
    if pairs < 2:
        return None
    from scipy import optimize, stats

    freedom = tasks * (pairs - 1)
    critical = float(stats.t.isf((1 - LEVEL) / (2 * comparisons), freedom))

    def missing(shift: float) -> float:
        """The power at a true difference of so many standard errors, in its own direction, less the one wanted."""
        return float(stats.nct.sf(critical, freedom, shift)) - POWER

    shift: Any = optimize.brentq(missing, 0.0, 3 * critical + 10)
    return float(shift) * spread / math.sqrt(tasks * pairs)
