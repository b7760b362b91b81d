# SPDX-License-Identifier: Apache-2.0
"""The coverage of intervals over seeds, in a simulation small enough for a test, and what is pooled over tasks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import coverage, pooled

SPREAD = coverage.WORLDS[1]


@pytest.mark.more
@pytest.mark.parametrize("seeds", [3, 5])
def test_students_t_covers_and_the_bootstrap_does_not(seeds: int) -> None:
    """400 trials, standard error 0.011 at 0.95. With five seeds a percentile interval reaches 1.96 · sqrt(4/5) standard
    errors where t reaches 2.776, which under a normal distribution is 85%; with three it is lower still."""
    assert coverage.coverage(SPREAD, seeds, 400, coverage.student) == pytest.approx(0.95, abs=0.033)
    assert coverage.coverage(SPREAD, seeds, 400, coverage.percentile) < 0.90


@pytest.mark.more
def test_holm_keeps_the_chance_of_any_false_finding() -> None:
    """150 comparisons of eight equal strategies: without a correction far more than one in twenty calls one
    different, with it at most that many; 0.05 plus 2.5 standard errors of 0.018."""
    plain, corrected = coverage.false_findings(SPREAD, 5, 150)
    assert plain > 0.15 and corrected < 0.095


def test_the_pooled_difference_by_hand() -> None:
    """Differences 1, 3 and 2, 6: means 2 and 4, so 3. Variances 2 and 8 of two each: (1 + 4) / 4 = 1.25 in all, with
    1.25² / (0.25² + 1²) = 1.4706 degrees of freedom."""
    from scipy import stats

    found = pooled.mean_difference([np.array([1.0, 3.0]), np.array([2.0, 6.0])])
    half = stats.t.ppf(0.975, 1.25**2 / 1.0625) * math.sqrt(1.25)
    assert found["value"] == 3.0
    assert (found["low"], found["high"]) == pytest.approx((3 - half, 3 + half))
    assert found["p"] == pytest.approx(2 * stats.t.sf(3 / math.sqrt(1.25), 1.25**2 / 1.0625))


def test_the_probability_of_improvement_by_hand() -> None:
    """On the first task 3 of 4 pairs are won; on the second one is won, one tied, two lost: (0.75 + 0.375) / 2."""
    tasks = [(np.array([0.5, 0.9]), np.array([0.4, 0.6])), (np.array([0.2, 0.7]), np.array([0.7, 0.3]))]
    found = pooled.probability_of_improvement(tasks)
    assert found["value"] == pytest.approx((0.75 + 0.375) / 2)
    assert found["low"] < found["value"] < found["high"]
    certain = pooled.probability_of_improvement([(np.array([0.9, 0.8]), np.array([0.1, 0.2]))])
    assert certain == {"value": 1.0, "low": 1.0, "high": 1.0}
