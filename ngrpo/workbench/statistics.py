# SPDX-License-Identifier: Apache-2.0
"""Estimators over the responses to a problem, bootstrap intervals over problems, and tests over seeds.

Student's t over seeds keeps its 95%, where the bootstrap over five covers about 85% (`python -m benchmarks.coverage`).
An interval over seeds covers the evaluated problems only; with one seed the problems are resampled instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

LEVEL, POWER = 0.95, 0.8
ENOUGH_SEEDS = 3
"""The fewest seeds that tell a method from luck."""
REPLICATES, DRAWS = 4000, 2000
_SEED = 20260610  # of the resampling alone; the same data give the same interval

Interval = dict[str, Any]


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that of k responses, drawn without replacement from n of which c are right, at least one is right.

    1 − C(n−c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1), exact up to the rounding of one division.

    Raises:
        ValueError: unless n is at least 1, c in [0, n] and k in [1, n], all whole numbers.
    """
    _check_counts(n, c)
    if not _whole(k) or not 1 <= k <= n:
        raise ValueError(f"k={k!r}: must be a whole number in [1, n={n}]; Pass@k needs at least k answers per problem.")
    ways = math.comb(n, k)
    return (ways - math.comb(n - c, k)) / ways


def mean_at_n(n: int, c: int) -> float:
    """The fraction of right responses, c / n; n and c as in :func:`pass_at_k`."""
    _check_counts(n, c)
    return c / n


def cover_at(n: int, c: int, tau: float) -> bool:
    """Whether at least the fraction τ in (0, 1] of the responses is right; n and c as in :func:`pass_at_k`.

    Cover@τ is the fraction of such problems; c / n estimates the chance that Dragoi et al. 2025 (arXiv 2510.08325) use.
    """
    _check_counts(n, c)
    if isinstance(tau, bool) or not isinstance(tau, (int, float)) or not 0.0 < tau <= 1.0:
        raise ValueError(f"tau={tau!r}: must be a number in (0, 1].")
    return c / n >= tau


def _check_counts(n: int, c: int) -> None:
    if not _whole(n) or n < 1:
        raise ValueError(f"n={n!r}: must be a whole number of answers, at least 1.")
    if not _whole(c) or not 0 <= c <= n:
        raise ValueError(f"c={c!r}: must be a whole number of right answers in [0, n={n}].")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def resamples(count: int, seed: int) -> np.ndarray:
    """Bootstrap draws of ``count`` prompts with replacement: (DRAWS, count), the same in every run."""
    return np.random.default_rng(seed).integers(0, count, size=(DRAWS, count))


def bounds(replicates: np.ndarray) -> tuple[float, float]:
    """The central 95% of bootstrap replicates (N,) (Efron and Tibshirani, 1993, chapter 13)."""
    low, high = np.quantile(replicates, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def with_noise(difference: Interval) -> Interval:
    """A difference with ``within_noise``: whether its interval contains 0, or there is none."""
    low, high = difference["low"], difference["high"]
    return {**difference, "within_noise": low is None or low <= 0.0 <= high}


def interval(table: np.ndarray) -> Interval:
    """``value``, ``low`` and ``high`` of one arm's table, seeds × problems or seeds × 1.

    ``over``: ``seeds``; ``problems`` for one seed; None for a single number, which has no interval.
    """
    table = np.atleast_2d(np.asarray(table, dtype=np.float64))
    value, (seeds, problems) = float(table.mean()), table.shape
    if table.size == 1:
        return {"value": value, "low": None, "high": None, "over": None}
    if seeds == 1:
        draws = np.random.default_rng(_SEED).multinomial(problems, np.full(problems, 1.0 / problems), size=REPLICATES)
        low, high = bounds(draws @ table[0] / problems)
        return {"value": value, "low": low, "high": high, "over": "problems"}
    from scipy import stats

    error = float(table.mean(axis=1).std(ddof=1)) / math.sqrt(seeds)
    half = float(stats.t.ppf((1 + LEVEL) / 2, seeds - 1)) * error
    return {"value": value, "low": value - half, "high": value + half, "over": "seeds"}


def paired(ours: np.ndarray, baseline: np.ndarray) -> Interval:
    """Mean paired difference of two tables, seeds × problems in the same order, and the paired t test over seeds.

    Returns:
        As :func:`interval`, with ``p``: two-sided, of no difference, and ``spread``: the standard deviation over
        ``seeds``; both None for one seed, ``p`` also for equal differences in all seeds, which leave no spread.
        ``within_noise``: by ``p``, before :func:`correct`; with one seed, whether the interval contains 0.

    Raises:
        ValueError: for tables of different shapes.
    """
    if np.shape(ours) != np.shape(baseline):
        raise ValueError(f"{np.shape(ours)} and {np.shape(baseline)}: pairs need the same seeds and problems.")
    table = np.atleast_2d(np.asarray(ours, dtype=np.float64) - np.asarray(baseline, dtype=np.float64))
    estimate = interval(table)
    if estimate["over"] != "seeds":
        return {**with_noise(estimate), "p": None, "spread": None, "seeds": len(table)}
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
    """Corrects several arms' paired differences in one measure, in place; those without a p-value stay as they are.

    Adds ``p_corrected`` (Holm's), ``comparisons`` (their number) and ``detectable``, the smallest true difference that
    four of five repetitions find, and updates ``within_noise``.
    """
    tested = [difference for difference in differences if difference["p"] is not None]
    for difference, p in zip(tested, holm([difference["p"] for difference in tested])):
        least = detectable(difference["spread"], difference["seeds"], len(tested))
        difference |= {"p_corrected": p, "comparisons": len(tested), "detectable": least}
        difference["within_noise"] = p >= 1 - LEVEL


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number by Holm's step-down method (Scandinavian Journal of Statistics 6, 1979).

    The i-th smallest of m (i from 0) is multiplied by m − i; none is below a smaller one's, and none above 1.
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def detectable(spread: float, pairs: int, comparisons: int = 1, tasks: int = 1) -> float | None:
    """The smallest true difference that a two-sided paired t test finds with a chance of 80%; None below two pairs.

    Args:
        spread: standard deviation of the paired differences over seeds.
        pairs: seeds.
        comparisons: the level is 0.05 over this number, which is Holm's first and hardest step.
        tasks: how many are pooled, each with this number of seeds and this spread.
    """
    if pairs < 2:
        return None
    from scipy import optimize, stats

    freedom = tasks * (pairs - 1)
    critical = float(stats.t.isf((1 - LEVEL) / (2 * comparisons), freedom))

    # The power at a true difference of ``shift`` standard errors, in its own direction, less what is wanted.
    def missing(shift: float) -> float:
        return float(stats.nct.sf(critical, freedom, shift)) - POWER

    shift: Any = optimize.brentq(missing, 0.0, 3 * critical + 10)
    return float(shift) * spread / math.sqrt(tasks * pairs)
