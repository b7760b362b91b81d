# SPDX-License-Identifier: Apache-2.0
"""One question of several tasks: the mean difference over tasks, and the probability of improvement.

A task is a stratum: its paired differences over seeds are its own sample, and tasks weigh the same. The mean has an
interval by Welch's t: the degrees of freedom come from the spread of each task (Welch, Biometrika 34, 1947). The
probability of improvement is that of Agarwal et al. (2021, arXiv 2108.13264), with its stratified bootstrap.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ngrpo.workbench.statistics import LEVEL, POWER, TIE, bounds

REPLICATES = 2000
STUDIES = 40_000
"""The number of studies that :func:`detectable` simulates; with other draws its result differs by about 1%."""


def mean_difference(tasks: Sequence[np.ndarray]) -> dict[str, float | None]:
    """The mean over tasks of the mean paired difference.

    Args:
        tasks: for each task the paired differences of its seeds, (seeds,), at least two.

    Returns:
        ``value``, ``low``, ``high`` and ``p``; all but the first are None where no task has a spread.
    """
    from scipy import stats

    value = float(np.mean([task.mean() for task in tasks]))
    variances = np.array([task.var(ddof=1) / len(task) for task in tasks]) / len(tasks) ** 2
    error = math.sqrt(variances.sum())
    if error <= TIE:
        return {"value": value, "low": None, "high": None, "p": None}
    freedom = _degrees_of_freedom(variances, [len(task) for task in tasks])
    half_width = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * error
    p = 2 * float(stats.t.sf(abs(value) / error, freedom))
    return {"value": value, "low": value - half_width, "high": value + half_width, "p": p}


def _degrees_of_freedom(variances: np.ndarray, seeds: Sequence[int]) -> Any:
    """Welch's degrees of freedom of a sum of means with these variances, (tasks, ...), each over its ``seeds``."""
    squares = sum(variance**2 / (count - 1) for variance, count in zip(variances, seeds))
    return variances.sum(axis=0) ** 2 / squares


def detectable(tasks: Sequence[np.ndarray], comparisons: int = 1) -> float | None:
    """The smallest true difference, the same on each task, that :func:`mean_difference` finds with a chance of 80%.

    It is found in simulated studies: Welch's degrees of freedom depend on the spreads that a study happens to see,
    often on that of one task alone, so that no formula with fixed degrees of freedom has this chance.

    Args:
        tasks: for each task the paired differences of its seeds, (seeds,), at least two; their spreads are taken for
            the true ones.
        comparisons: the two-sided test's level is 0.05 / ``comparisons``, the smallest one of Holm's method.

    Returns:
        None where no task has a spread.
    """
    from scipy import stats

    spreads = [task.std(ddof=1) for task in tasks]
    if max(spreads) <= TIE:
        return None
    draw = np.random.default_rng(0)
    means = []
    variances = []
    for task, spread in zip(tasks, spreads):
        noise = draw.normal(0.0, spread, size=(STUDIES, len(task)))
        means.append(noise.mean(axis=1))
        variances.append(noise.var(axis=1, ddof=1) / len(task) / len(tasks) ** 2)
    freedom = _degrees_of_freedom(np.array(variances), [len(task) for task in tasks])
    critical = stats.t.isf((1 - LEVEL) / (2 * comparisons), freedom)
    # A study finds every true difference above this one, at which its own t is the critical one.
    least_found = critical * np.sqrt(np.sum(variances, axis=0)) - np.mean(means, axis=0)
    return float(np.quantile(least_found, POWER))


def probability_of_improvement(tasks: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """The chance that a run of ours scores higher than one of the baseline on the same task, ties counting half.

    Args:
        tasks: for each task the scores of our runs and those of the baseline's, (seeds,) each.

    Returns:
        ``value``, and ``low`` and ``high`` by the percentile bootstrap that draws seeds within each task and side. From
        few seeds it is too narrow: benchmarks/coverage.py says by how much.
    """
    tables = [wins(ours, baseline) for ours, baseline in tasks]
    draw = np.random.default_rng(0)
    replicates = np.zeros(REPLICATES)
    for table in tables:
        our_seeds, baseline_seeds = table.shape
        our_weights = resampled(draw, our_seeds, REPLICATES)
        baseline_weights = resampled(draw, baseline_seeds, REPLICATES)
        replicates += np.einsum("rs,st,rt->r", our_weights, table, baseline_weights) / len(tables)
    low, high = bounds(replicates)
    value = float(np.mean([table.mean() for table in tables]))
    return {"value": value, "low": low, "high": high}


def resampled(draw: np.random.Generator, count: int, replicates: int) -> np.ndarray:
    """The weights of ``count`` observations in bootstrap samples, (replicates, count); each row sums to 1."""
    return draw.multinomial(count, np.full(count, 1 / count), size=replicates) / count


def wins(ours: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """Which run of each pair scores higher, (seeds, seeds): 1 for ours, 0 for the baseline's, or 0.5 for a tie."""
    differences = ours[:, None] - baseline
    return (differences > TIE) + 0.5 * (np.abs(differences) <= TIE)
