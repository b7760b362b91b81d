# SPDX-License-Identifier: Apache-2.0
"""Estimators over the responses to a problem, bootstrap intervals over problems, and tests over seeds.

An interval over seeds covers the evaluated problems only; `python -m benchmarks.coverage` measures how often.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

LEVEL = 0.95
"""The confidence level of every interval; tests are at 1 − LEVEL."""
POWER = 0.8
"""The chance with which a difference of :func:`detectable` size is found."""
ENOUGH_SEEDS = 3
"""The fewest seeds that tell a method from luck."""
ENOUGH_PROBLEMS = 6
"""The fewest problems that can differ beyond noise: the signs of five agree by luck with a chance of 2 / 2^5."""
REPLICATES = 4000
"""Bootstrap replicates of one seed's problems, in :func:`interval`."""
DRAWS = 2000
"""Bootstrap replicates of a diagnosis's prompts, in :func:`resamples`."""
MOST_FLIPPED = 16
"""The most problems with a difference of which all patterns of signs are counted."""
TIE = 1e-12
"""Means of equal shares differ by rounding only; different shares differ by far more."""
_SEED = 20260610  # of the resampling alone; the same data give the same interval

Interval = dict[str, Any]


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 − C(n−c, k) / C(n, k), exact up to one division's rounding (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    The chance that of k of n responses, c of them right, one is right; ValueError unless 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    _check_counts(n, c, k)
    ways = math.comb(n, k)
    return (ways - math.comb(n - c, k)) / ways


def mean_at_n(n: int, c: int) -> float:
    """The fraction of right responses, c / n; n and c as in :func:`pass_at_k`."""
    _check_counts(n, c)
    return c / n


def _check_counts(n: int, c: int, k: int = 1) -> None:
    def check(name: str, value: int, low: int, high: float, requirement: str) -> None:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{name}={value!r}: must be a whole number {requirement}.")

    check("n", n, low=1, high=math.inf, requirement="of responses, at least 1")
    check("c", c, low=0, high=n, requirement=f"of right responses in [0, n={n}]")
    check("k", k, low=1, high=n, requirement=f"in [1, n={n}]; Pass@k needs k responses per problem")


def mean_of_known(values: Iterable[float | None], average: Callable[[list[float]], Any] = np.mean) -> float | None:
    """The mean, or another ``average``, of the values that are not None; None where all are."""
    numbers = [value for value in values if value is not None]
    return float(average(numbers)) if numbers else None


def resamples(count: int, seed: int) -> np.ndarray:
    """Bootstrap draws of ``count`` prompts: (DRAWS, count), the same in every run."""
    return np.random.default_rng(seed).integers(0, count, size=(DRAWS, count))


def bounds(replicates: np.ndarray, problems: int | None = None) -> tuple[float, float]:
    """The ends of a 95% interval from bootstrap replicates (N,): their central 95%, or with ``problems`` a wider range.

    The central 95% hold the truth of few problems too seldom (benchmarks/coverage.py says how seldom). With
    ``problems``, at least two, the interval is the expanded percentile one (Hesterberg, Am. Stat. 69, 2015): its tails
    are smaller by what Student's t and the divisor n − 1 add to a normal interval.
    """
    tail = (1 - LEVEL) / 2
    if problems is not None:
        from scipy.stats import norm, t

        tail = float(norm.cdf(math.sqrt(problems / (problems - 1)) * t.ppf(tail, problems - 1)))
    low, high = np.quantile(replicates, [tail, 1 - tail])
    return float(low), float(high)


def with_noise(difference: Interval, problems: int) -> Interval:
    """A difference over problems with ``within_noise``: whether its interval contains 0, or there are too few."""
    within_noise = problems < ENOUGH_PROBLEMS or difference["low"] <= 0.0 <= difference["high"]
    return {**difference, "within_noise": within_noise}


def interval(table: np.ndarray, *, share: bool = False) -> Interval:
    """The mean of one arm's table, seeds × problems, with its 95% interval.

    With several seeds it is Student's t interval over the seeds' means; with one seed the bootstrap over its problems,
    with :func:`bounds`. Equal numbers have no interval.

    Args:
        table: one row per seed, one column per problem.
        share: whether the values are shares. Their interval is then clipped to [0, 1]. It is Wilson's (J. Am. Stat.
            Assoc. 22, 1927) where each seed (with one seed: each problem) has exactly 0 or exactly 1. Where all seeds
            have the same value, and there are more problems than seeds, Wilson's interval is over the problems.

    Returns:
        ``value``, ``low`` and ``high`` (None without an interval), and ``over``: ``seeds``, ``problems``, or None for a
        single number.
    """
    table = np.atleast_2d(np.asarray(table, dtype=np.float64))
    seeds, problems = table.shape
    mean = float(table.mean())
    over: str | None = "seeds"
    if table.size == 1:
        over = None
    elif seeds == 1:
        over = "problems"
    units = table[0] if seeds == 1 else table.mean(axis=1)

    if over and share and np.isin(units, (0.0, 1.0)).all():
        # All seeds have 0 on every problem, or all have 1: each problem of one seed then counts as an outcome.
        if problems > seeds and _tied(units):
            units = table[0]
            over = "problems"
        low, high = _wilson(units)
        return {"value": mean, "low": low, "high": high, "over": over}
    if over is None or _tied(units):
        return {"value": mean, "low": None, "high": None, "over": over}

    low, high = _bootstrap_of_problems(units) if seeds == 1 else _students_t(units, mean)
    if share:
        low = max(low, 0.0)
        high = min(high, 1.0)
    return {"value": mean, "low": low, "high": high, "over": over}


def _wilson(outcomes: np.ndarray) -> tuple[float, float]:
    from scipy.stats import binomtest

    ends = binomtest(int(outcomes.sum()), len(outcomes)).proportion_ci(LEVEL, method="wilson")
    return float(ends.low), float(ends.high)


def _bootstrap_of_problems(values: np.ndarray) -> tuple[float, float]:
    count = len(values)
    weights = np.random.default_rng(_SEED).multinomial(count, np.full(count, 1.0 / count), size=REPLICATES)
    return bounds(weights @ values / count, count)


def _students_t(values: np.ndarray, mean: float) -> tuple[float, float]:
    from scipy.stats import t

    critical = float(t.ppf((1 + LEVEL) / 2, len(values) - 1))
    standard_error = float(values.std(ddof=1)) / math.sqrt(len(values))
    half = critical * standard_error
    return mean - half, mean + half


def _tied(values: np.ndarray) -> bool:
    """Whether values are equal up to rounding; shares are far coarser."""
    return float(np.ptp(values)) <= TIE


def paired(ours: np.ndarray, baseline: np.ndarray, *, of_problems: bool = False) -> Interval:
    """The mean paired difference of two tables of shares, and its test.

    Args:
        ours: one arm's table, seeds × problems.
        baseline: the other arm's, with the same seeds and problems in the same order.
        of_problems: whether the tables' rows are problems and not seeds. ``seeds`` and ``spread`` are then of problems,
            and ``p`` is :func:`_p_of_problems`.

    Returns:
        As :func:`interval`, and in addition:

        - ``p``: two-sided, of the paired t test over seeds. With one seed, and where all seeds have the same
          difference, it is :func:`_p_of_problems`, and ``tested`` is ``problems``.
        - ``spread``: the standard deviation of the difference over seeds; None for one seed.
        - ``seeds``: their number.
        - ``within_noise``: by ``p``, not yet corrected for other comparisons.

    Raises:
        ValueError: for tables of different shapes, or with a value that is not finite.
    """
    if np.shape(ours) != np.shape(baseline):
        raise ValueError(f"{np.shape(ours)} and {np.shape(baseline)}: pairs need the same seeds and problems.")
    table = np.atleast_2d(np.asarray(ours, dtype=np.float64) - np.asarray(baseline, dtype=np.float64))
    if not np.isfinite(table).all():
        raise ValueError(f"{int((~np.isfinite(table)).sum())} of {table.size} differences are not finite numbers.")
    rows, columns = table.shape  # seeds × problems, or problems × 1
    difference: Interval = {**within_shares(interval(table)), "seeds": rows}

    row_means = table.mean(axis=1)
    if rows == 1 or (columns > 1 and _tied(row_means)):
        difference["tested"] = "problems"
        p = _p_of_problems(table.mean(axis=0))
    elif of_problems:
        p = _p_of_problems(row_means)
    else:
        p = _p_value(row_means)
    spread = None if rows == 1 else float(row_means.std(ddof=1))
    return {**difference, "p": p, "spread": spread, "within_noise": p >= 1 - LEVEL}


def _p_value(differences: np.ndarray) -> float:
    """The paired t test's, two-sided; where all differences are equal, the sign-flip test's."""
    if _tied(differences):
        return 1.0 if abs(differences.mean()) <= TIE else 2.0 ** (1 - len(differences))
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(differences, 0.0).pvalue)


def _p_of_problems(differences: np.ndarray) -> float:
    """The exact sign-flip test where few problems differ, or all by the same; else the paired t test.

    Most problems often have a difference of 0, and the t test then takes the few others for more than they are. Of 30
    problems of which five gain, it has p = 0.023; but 2 of the 2^5 patterns of signs are as far from 0, p = 0.0625.
    """
    differing = differences[np.abs(differences) > TIE]
    if _tied(differences) or len(differing) > MOST_FLIPPED:
        return _p_value(differences)
    patterns = np.arange(2 ** len(differing))[:, None]
    flipped = patterns >> np.arange(len(differing)) & 1  # (2^N, N): bit i of a pattern's number flips difference i
    sums = (1 - 2 * flipped) @ differing
    return float((np.abs(sums) >= abs(differing.sum()) - TIE).mean())


def within_shares(difference: Interval) -> Interval:
    """The difference of two shares, with its interval clipped to [-1, 1]."""
    if difference["low"] is None:
        return difference
    return {**difference, "low": max(difference["low"], -1.0), "high": min(difference["high"], 1.0)}


def in_words(interval: Mapping[str, Any] | None, form: str = ".3f") -> str:
    """``0.412 [0.381, 0.442]``; ``–`` for None."""
    if interval is None:
        return "–"
    value = f"{interval['value']:{form}}"
    if interval["low"] is None:
        return value
    return f"{value} [{interval['low']:{form}}, {interval['high']:{form}}]"


def correct(differences: Sequence[Interval], comparisons: int | None = None) -> None:
    """Corrects paired differences in one measure for the number of ``comparisons``, by default their own number.

    Differences of one seed are corrected apart from the others: their tests see no luck of a run, so that their small
    p-values must not lighten the correction of the others.

    Adds ``p_corrected``, ``comparisons`` and ``detectable``, and sets ``within_noise`` by the corrected p.
    """
    count = len(differences) if comparisons is None else comparisons
    for of_one_seed in (True, False):
        alike = [difference for difference in differences if (difference["seeds"] == 1) is of_one_seed]
        corrected = holm([difference["p"] for difference in alike], count)
        for difference, p in zip(alike, corrected):
            difference["p_corrected"] = p
            difference["comparisons"] = count
            difference["detectable"] = detectable_share(difference["spread"], difference["seeds"], count)
            difference["within_noise"] = p >= 1 - LEVEL


def holm(p_values: Sequence[float], comparisons: int | None = None) -> list[float]:
    """p-values corrected for their number by Holm's step-down method (Scandinavian Journal of Statistics 6, 1979).

    Where there are more ``comparisons`` than p-values, those without one count as if theirs was 1.
    """
    values = np.asarray(p_values, dtype=np.float64)
    count = len(values) if comparisons is None else comparisons
    if not ((values >= 0.0) & (values <= 1.0)).all():
        raise ValueError(f"p-values {p_values}: each must be in [0, 1].")
    ascending = np.argsort(values, kind="stable")
    remaining = count - np.arange(len(values))  # the smallest is multiplied by their number, the next by one less, ...
    products = np.minimum(1.0, remaining * values[ascending])
    corrected = np.empty_like(values)
    corrected[ascending] = np.maximum.accumulate(products)
    return corrected.tolist()


def detectable(spread: float | None, pairs: int, comparisons: int = 1) -> float | None:
    """The smallest true difference that a two-sided paired t test finds with a chance of 80%; None without a spread.

    ``spread`` is the standard deviation of the difference over ``pairs`` seeds. The test's level is
    0.05 / ``comparisons``, the smallest one of Holm's method.
    """
    if spread is None or pairs < 2 or spread <= TIE:
        return None
    from scipy import optimize, stats

    freedom = pairs - 1
    critical = float(stats.t.isf((1 - LEVEL) / (2 * comparisons), freedom))

    def power_above_wanted(shift: float) -> float:
        """At a true difference of ``shift`` standard errors; only a result of the right sign counts."""
        return float(stats.nct.sf(critical, freedom, shift)) - POWER

    shift: Any = optimize.brentq(power_above_wanted, 0.0, 3 * critical + 10)
    return float(shift) * spread / math.sqrt(pairs)


def detectable_share(spread: float | None, pairs: int, comparisons: int = 1) -> float | None:
    """As :func:`detectable`, of two shares: None where the difference had to be above 1, which they cannot have."""
    return possible_share(detectable(spread, pairs, comparisons))


def possible_share(least: float | None) -> float | None:
    """A detectable difference of two shares: None where it had to be above 1, which they cannot have."""
    return None if least is None or least > 1.0 else least
