# SPDX-License-Identifier: Apache-2.0
"""Estimators over the responses to a problem, bootstrap intervals over problems, and tests over seeds.

An interval over seeds covers the evaluated problems only; `python -m benchmarks.coverage` measures how often.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

LEVEL, POWER = 0.95, 0.8
ENOUGH_SEEDS = 3
"""The fewest seeds that tell a method from luck."""
REPLICATES, DRAWS = 4000, 2000
MOST_FLIPPED = 16
"""The most problems with a difference of which all patterns of signs are counted."""
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
    for name, value, low, high, what in (
        ("n", n, 1, math.inf, "of responses, at least 1"),
        ("c", c, 0, n, f"of right responses in [0, n={n}]"),
        ("k", k, 1, n, f"in [1, n={n}]; Pass@k needs k responses per problem"),
    ):
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{name}={value!r}: must be a whole number {what}.")


def mean_of_known(values: Iterable[float | None], average: Callable[[list[float]], Any] = np.mean) -> float | None:
    """The mean, or another ``average``, of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return float(average(known)) if known else None


def resamples(count: int, seed: int) -> np.ndarray:
    """Bootstrap draws of ``count`` prompts: (DRAWS, count), the same in every run."""
    return np.random.default_rng(seed).integers(0, count, size=(DRAWS, count))


def bounds(replicates: np.ndarray) -> tuple[float, float]:
    """The central 95% of bootstrap replicates (N,)."""
    low, high = np.quantile(replicates, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def with_noise(difference: Interval) -> Interval:
    """A difference with ``within_noise``: whether its interval contains 0, or there is none."""
    low, high = difference["low"], difference["high"]
    return {**difference, "within_noise": low is None or low <= 0.0 <= high}


def interval(table: np.ndarray, *, share: bool = False) -> Interval:
    """``value``, ``low`` and ``high`` of one arm's table, seeds × problems: Student's t ``over`` seeds.

    With one seed it is the percentile bootstrap over ``problems``; equal numbers have none (None). Of a ``share`` the
    interval ends at 0 and 1, and is Wilson's (J. Am. Stat. Assoc. 22, 1927) where all are 0 or 1; of problems, if these
    are more, where all seeds have the same.
    """
    table = np.atleast_2d(np.asarray(table, dtype=np.float64))
    seeds, problems = table.shape
    over = None if table.size == 1 else "problems" if seeds == 1 else "seeds"
    found = {"value": float(table.mean()), "low": None, "high": None, "over": over}
    units = table[0] if seeds == 1 else table.mean(axis=1)
    if over and share and np.isin(units, (0.0, 1.0)).all():
        if problems > seeds and _tied(units):
            units, found["over"] = table[0], "problems"
        from scipy.stats import binomtest

        wilson = binomtest(int(units.sum()), len(units)).proportion_ci(LEVEL, method="wilson")
        return {**found, "low": float(wilson.low), "high": float(wilson.high)}
    if over is None or _tied(units):
        return found
    if seeds == 1:
        draws = np.random.default_rng(_SEED).multinomial(problems, np.full(problems, 1.0 / problems), size=REPLICATES)
        low, high = bounds(draws @ units / problems)
    else:
        from scipy.stats import t

        half = float(t.ppf((1 + LEVEL) / 2, seeds - 1)) * (float(units.std(ddof=1)) / math.sqrt(seeds))
        low, high = found["value"] - half, found["value"] + half
    return {**found, "low": max(low, 0.0) if share else low, "high": min(high, 1.0) if share else high}


def _tied(values: np.ndarray) -> bool:
    """Whether values are equal up to rounding; shares are far coarser."""
    return float(np.ptp(values)) <= 1e-12


def paired(ours: np.ndarray, baseline: np.ndarray, *, of_problems: bool = False) -> Interval:
    """Mean paired difference of two tables of shares, seeds × problems in the same order, and its test over seeds.

    As :func:`interval`, with ``p``, two-sided, and ``spread``, the standard deviation over ``seeds``; None for one. The
    paired t test is over seeds, or ``tested`` over problems where seeds differ by the same: :func:`_p_of_problems`.
    ``within_noise``: by ``p``, uncorrected, or one seed's interval.

    ``of_problems``: the tables' rows are problems and not seeds.
    """
    if np.shape(ours) != np.shape(baseline):
        raise ValueError(f"{np.shape(ours)} and {np.shape(baseline)}: pairs need the same seeds and problems.")
    table = np.atleast_2d(np.asarray(ours, dtype=np.float64) - np.asarray(baseline, dtype=np.float64))
    if not np.isfinite(table).all():
        raise ValueError(f"{int((~np.isfinite(table)).sum())} of {table.size} differences are not finite numbers.")
    seeds, problems = table.shape
    found: Interval = {**interval(table), "p": None, "spread": None, "seeds": seeds}
    if found["low"] is not None:
        found |= {"low": max(found["low"], -1.0), "high": min(found["high"], 1.0)}
    if seeds == 1:
        equal = problems > 1 and _tied(table[0])
        return {**found, "within_noise": _p_of_problems(table[0]) >= 1 - LEVEL} if equal else with_noise(found)
    by_seed = table.mean(axis=1)
    over_problems = _tied(by_seed) and problems > 1
    if over_problems:
        p = _p_of_problems(table.mean(axis=0))
    else:
        p = _p_of_problems(by_seed) if of_problems else _p_value(by_seed)
    found |= {"tested": "problems"} if over_problems else {}
    return {**found, "p": p, "spread": float(by_seed.std(ddof=1)), "within_noise": p >= 1 - LEVEL}


def _p_value(differences: np.ndarray) -> float:
    if _tied(differences):
        return 1.0 if abs(differences.mean()) <= 1e-12 else 2.0 ** (1 - len(differences))
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(differences, 0.0).pvalue)


def _p_of_problems(differences: np.ndarray) -> float:
    """The exact sign-flip test where few problems differ, or all by the same; else the paired t test.

    Most problems often have a difference of 0, and a t test takes the few others for more than they are: five of 30
    that gain have p = 0.023 there, and 2 of 2^5 patterns of signs, 0.0625, are as far from 0.
    """
    differing = differences[np.abs(differences) > 1e-12]
    if _tied(differences) or len(differing) > MOST_FLIPPED:
        return _p_value(differences)
    signs = 1 - 2 * (np.arange(2 ** len(differing))[:, None] >> np.arange(len(differing)) & 1)
    return float((np.abs(signs @ differing) >= abs(differing.sum()) - 1e-12).mean())


def in_words(interval: Mapping[str, Any] | None, form: str = ".3f") -> str:
    """``0.412 [0.381, 0.442]``; ``–`` for None."""
    if interval is None:
        return "–"
    ends = "" if interval["low"] is None else f" [{interval['low']:{form}}, {interval['high']:{form}}]"
    return f"{interval['value']:{form}}{ends}"


def correct(differences: Sequence[Interval]) -> None:
    """Adds ``p_corrected``, ``comparisons`` and ``detectable`` to paired differences in one measure; judges them."""
    tested = [difference for difference in differences if difference["p"] is not None]
    for difference, p in zip(tested, holm([difference["p"] for difference in tested])):
        least = detectable(difference["spread"], difference["seeds"], len(tested))
        if least is not None and least > 1.0:  # two shares differ by at most 1
            least = None
        difference |= {"p_corrected": p, "comparisons": len(tested), "detectable": least}
        difference["within_noise"] = p >= 1 - LEVEL


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number by Holm's step-down method (Scandinavian Journal of Statistics 6, 1979)."""
    values = np.asarray(p_values, dtype=np.float64)
    if not ((values >= 0.0) & (values <= 1.0)).all():
        raise ValueError(f"p-values {p_values}: each must be in [0, 1].")
    order, corrected = np.argsort(values, kind="stable"), np.empty_like(values)
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, np.arange(len(values), 0, -1) * values[order]))
    return corrected.tolist()


def detectable(spread: float, pairs: int, comparisons: int = 1, tasks: int = 1) -> float | None:
    """The smallest true difference that a two-sided paired t test finds with a chance of 80%; None without a spread.

    ``spread`` is over ``pairs`` seeds; of several ``tasks`` each has both. The level is Holm's hardest: 0.05 over
    ``comparisons``.
    """
    if pairs < 2 or spread <= 1e-12:
        return None
    from scipy import optimize, stats

    freedom = tasks * (pairs - 1)
    critical = float(stats.t.isf((1 - LEVEL) / (2 * comparisons), freedom))

    # The power at a true difference of ``shift`` standard errors, in its own direction, less what is wanted.
    def missing(shift: float) -> float:
        return float(stats.nct.sf(critical, freedom, shift)) - POWER

    shift: Any = optimize.brentq(missing, 0.0, 3 * critical + 10)
    return float(shift) * spread / math.sqrt(tasks * pairs)
