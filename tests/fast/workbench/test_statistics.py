# SPDX-License-Identifier: Apache-2.0
"""Intervals over seeds, paired t tests, Holm's correction, detectable differences, and verdicts on them."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ngrpo.workbench import statistics
from ngrpo.workbench.compare import results


def test_one_seed_resamples_the_problems_and_says_so() -> None:
    """One seed, 100 problems, half right: the mean's standard error is sqrt(0.5 · 0.5 / 100) = 0.05, so the
    interval is about 0.5 ± 1.96 · 0.05 = [0.402, 0.598]."""
    result = statistics.interval(np.array([[0.0, 1.0] * 50]))
    assert (result["value"], result["over"]) == (0.5, "problems")
    assert result["low"] == pytest.approx(0.402, abs=0.015)
    assert result["high"] == pytest.approx(0.598, abs=0.015)


def test_interval_over_seeds_by_hand() -> None:
    """Seeds with means 0.2, 0.4, 0.6 (whatever their problems): mean 0.4, standard deviation 0.2, standard error
    0.11547; the 97.5% quantile of t with 2 degrees of freedom is 4.30265, so the half is 0.49683."""
    result = statistics.interval(np.array([[0.0, 0.4], [0.3, 0.5], [0.6, 0.6]]))
    assert (result["value"], result["over"]) == (pytest.approx(0.4), "seeds")
    assert (result["low"], result["high"]) == pytest.approx((0.4 - 0.49683, 0.4 + 0.49683), abs=1e-5)
    single = statistics.interval(np.array([[0.4]]))
    assert single == {"value": 0.4, "low": None, "high": None, "over": None}, "a single number has no interval"


def test_paired_t_test_by_hand() -> None:
    """Differences 0.1, 0.2, 0.3, 0.4: mean 0.25, deviation 0.129099, t = 0.25 / (0.129099 / 2) = 3.87298 with 3 degrees
    of freedom. Their distribution function has a closed form, which gives p = 0.030466."""
    base = np.array([[0.3], [0.1], [0.1], [0.5]])
    result = statistics.paired(base + np.array([[0.1], [0.2], [0.3], [0.4]]), base)
    t = 3.8729833
    angle = math.atan(t / math.sqrt(3))
    closed = 1 - 2 / math.pi * (angle + math.sin(angle) * math.cos(angle))
    assert result["p"] == pytest.approx(closed) == pytest.approx(0.030466, abs=1e-6)
    assert result["spread"] == pytest.approx(0.12909944) and not result["within_noise"]


def test_numbers_that_are_not_finite_are_no_difference() -> None:
    """NaN is neither below nor above 0.05, so that it was called a difference."""
    table = np.zeros((2, 3))
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match="1 of 6 differences are not finite numbers"):
            statistics.paired(table, np.array([[0.0, 0.0, 0.0], [0.0, wrong, 0.0]]))
    for wrong in (math.nan, 1.5, -0.1):
        with pytest.raises(ValueError, match="each must be in"):
            statistics.holm([0.01, wrong])


def test_equal_tables_are_equal_and_not_different() -> None:
    table = np.random.default_rng(0).random((2, 16))
    result = statistics.paired(table, table)
    statistics.correct([result])
    assert (result["value"], result["low"], result["p"], result["detectable"]) == (0.0, None, 1.0, None)
    assert results.verdict(result, "Mean@8", "none", 2) == "equal to none in Mean@8 with every seed"


@pytest.mark.parametrize(
    ("table", "p", "verdict"),
    [
        # Five seeds, 16 problems, 1 instead of 0 in each: 2 of 2^16 patterns of signs are as far from 0.
        (np.ones((5, 16)), 2 / 2**16, "better: Mean@8 +1.000 against none with each of 5 seeds (p 3.1e-05 over"),
        # One problem: over seeds.
        (np.ones((6, 1)), 2 / 2**6, "better: Mean@8 +1.000 against none with each of 6 seeds (p 0.031)"),
        # Seeds differ by the same, problems do not: of 2^3 patterns of signs of 0.5, 0.5 and 1 two are as far from 0.
        (np.tile([0.0, 0.5, 0.5, 1.0], (3, 1)), 0.25, "within noise: Mean@8 +0.500 against none with each of 3"),
        # 30 of 30 right against 29, another wrong one with each seed: a t test over problems has p 0.023.
        (np.eye(5, 30), 0.0625, "within noise: Mean@8 +0.033 against none with each of 5 seeds"),
        # 1 or more in size: of 2^4 patterns 6, those with both 0.5 of one sign and not both 0.25 of the other.
        (np.tile([0.5, 0.5, 0.25, -0.25, 0.0], (2, 1)), 0.375, "within noise: Mean@8 +0.200 against none with each"),
        # More problems that differ than are counted: t = 0.5 / 0.1.
        (np.tile([0.4, 0.6] * 9, (2, 1)), 1e-15, "Mean@8 +0.500 against none with each of 2 seeds"),
    ],
)  # fmt: skip
def test_seeds_that_differ_by_the_same(table: np.ndarray, p: float, verdict: str) -> None:
    """Without a spread over seeds the problems decide: exact signs where they differ by the same too."""
    result = statistics.paired(table, np.zeros_like(table))
    statistics.correct([result])
    assert result["p"] == pytest.approx(p, abs=1e-12)
    assert (result["low"], result["high"], result["detectable"]) == (None, None, None)
    assert results.verdict(result, "Mean@8", "none", len(table)).startswith(verdict)


@pytest.mark.parametrize(("problems", "noise"), [(30, False), (5, True)])
def test_one_seed_whose_problems_all_gain(problems: int, noise: bool) -> None:
    assert statistics.paired(np.ones((1, problems)), np.zeros((1, problems)))["within_noise"] is noise


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [
        # Wilson: of 0 in 30 from 0 to z² / (30 + z²), z = 1.959964.
        (np.zeros((30, 1)), 0.0, 3.841459 / 33.841459),
        (np.ones((5, 16)), 16 / (16 + 3.841459), 1.0),
        # 1 in 3: (1 + z²/2 ± z √(2/3 + z²/4)) / (3 + z²).
        (np.array([[1.0], [0.0], [0.0]]), 0.0615, 0.7923),
        # Student's t of 0.5, 0.9, 1.0 is 0.8 ± 0.6572; the rest is beyond a share.
        (np.array([[0.5], [0.9], [1.0]]), 0.1428, 1.0),
        # That of 0, 0.1, 0.2 is 0.1 ± 0.2484; the rest is beyond a share.
        (np.array([[0.0], [0.1], [0.2]]), 0.0, 0.3484),
        # (0.3 + 0) / 2 and (0.1 + 0.2) / 2 differ in their last bit alone.
        (np.array([[0.3, 0.0], [0.1, 0.2]]), None, None),
        (np.full((3, 4), 0.5), None, None),  # nothing varies: neither t nor the bootstrap can say anything
    ],
)
def test_intervals_of_shares_at_the_edge(table: np.ndarray, low: float | None, high: float | None) -> None:
    found = statistics.interval(table, share=True)
    assert (found["low"], found["high"]) == pytest.approx((low, high), abs=1e-4)


def test_wilsons_interval_is_of_problems_where_these_are_more() -> None:
    assert [statistics.interval(np.ones(shape), share=True)["over"] for shape in ((3, 3), (3, 4))] == [
        "seeds",
        "problems",
    ]


def test_a_p_value_at_the_level_itself_is_noise() -> None:
    at, below = 1 - statistics.LEVEL, np.nextafter(1 - statistics.LEVEL, 0.0)
    found = [{"p": p, "spread": 0.1, "seeds": 3, "within_noise": None} for p in (at, below)]
    for difference in found:
        statistics.correct([difference])
    assert [difference["within_noise"] for difference in found] == [True, False]


def test_a_difference_of_shares_is_at_most_1() -> None:
    found = statistics.paired(np.array([[1.0], [0.9], [1.0]]), np.array([[0.0], [0.6], [0.0]]))
    assert found["low"] < 0.0 and found["high"] == 1.0


def test_holm_by_hand() -> None:
    """0.01, 0.02, 0.03, 0.6 of four: 4 · 0.01, 3 · 0.02, 2 · 0.03 and 1 · 0.6; the order given is kept. 0.03 and 0.031
    of two: 2 · 0.03 = 0.06, and 0.031 is raised to it. Nothing exceeds 1."""
    assert statistics.holm([0.6, 0.01, 0.03, 0.02]) == pytest.approx([0.6, 0.04, 0.06, 0.06])
    assert statistics.holm([0.031, 0.03]) == pytest.approx([0.06, 0.06])
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0]


def test_no_difference_of_shares_above_1_can_be_seen() -> None:
    difference = statistics.paired(np.array([[1.0], [0.0]]), np.array([[0.0], [0.3]]))
    statistics.correct([difference])
    least = statistics.detectable(difference["spread"], 2)
    assert least is not None and least > 1.0 and difference["detectable"] is None


def test_correction_decides_and_leaves_the_untested_out() -> None:
    """p = 0.030 beside 0.031 is 0.061 corrected for two, and no longer beyond noise; one seed counts for nothing."""
    base = np.zeros((4, 1))
    values = (np.array([[1.0], [2.0], [3.0], [4.0]]), np.array([[1.0], [2.0], [3.0], [4.02]]))
    found = [statistics.paired(each, base) for each in values]
    single = statistics.paired(np.array([[0.5, 0.7]]), np.array([[0.1, 0.2]]))
    assert [each["within_noise"] for each in found] == [False, False]
    statistics.correct([*found, single])
    assert [each["within_noise"] for each in found] == [True, True]
    assert all(each["comparisons"] == 2 and each["p_corrected"] > 0.06 for each in found)
    assert "comparisons" not in single and not single["within_noise"]


@pytest.mark.parametrize(("pairs", "comparisons"), [(3, 1), (5, 8)])
def test_four_of_five_studies_find_the_detectable_difference(pairs: int, comparisons: int) -> None:
    """20,000 studies with a true difference of that size; 0.8 ± 3.5 standard errors of 0.0028."""
    least = statistics.detectable(0.05, pairs, comparisons)
    assert least is not None
    draws = np.random.default_rng(0).normal(least, 0.05, size=(20_000, pairs))
    t = draws.mean(axis=1) / draws.std(axis=1, ddof=1) * math.sqrt(pairs)
    found = (t > stats.t.ppf(1 - 0.025 / comparisons, pairs - 1)).mean()
    assert found == pytest.approx(0.8, abs=0.01)


def test_a_second_task_adds_pairs_and_degrees_of_freedom() -> None:
    """Two tasks with 2 seeds each: 4 differences, 2 degrees of freedom, which 3 seeds of one task have; so its value
    for 3 pairs, times sqrt(3 / 4)."""
    two, one = statistics.detectable(0.05, 2, 1, 2), statistics.detectable(0.05, 3)
    assert two is not None and one is not None
    assert two == pytest.approx(one * math.sqrt(3 / 4))
    assert statistics.detectable(0.05, 1) is None, "one pair detects nothing"


def of(value: float, p: float, count: int = 1, seeds: int = 5) -> dict[str, Any]:
    found = {"value": value, "low": value - 0.03, "high": value + 0.03, "over": "seeds", "p": p / count, "seeds": seeds}
    return {**found, "p_corrected": p, "comparisons": count, "detectable": 0.07, "within_noise": p >= 0.05}


def problems(value: float, low: float) -> dict[str, Any]:
    found = {"value": value, "low": low, "high": value + 0.03, "over": "problems", "p": None, "seeds": 1}
    return {**found, "within_noise": low <= 0.0}


@pytest.mark.parametrize(
    ("difference", "seeds", "expected"),
    [
        (
            of(0.02, 0.4, 4),
            5,
            "within noise: Mean@8 +0.020 [-0.010, +0.050] against none over 5 seeds (p 0.1, 0.4 corr",
        ),
        (of(0.09, 0.01), 5, "better: Mean@8 +0.090 [+0.060, +0.120] against none over 5 seeds (p 0.01)"),
        (of(-0.09, 0.02, 2), 3, "worse: Mean@8 -0.090"),
        (of(0.09, 0.01, seeds=2), 2, "2 seeds are too few to tell a method from luck"),
        (problems(0.09, 0.04), 1, "Mean@8 +0.090 [+0.040, +0.120] over problems against none, the problems agree, but"),
        (problems(0.01, -0.04), 1, "one seed gives no interval over seeds"),
        (None, 3, "was not compared with none: there is no evaluation, and rewards are of rollouts drawn otherwise"),
    ],
)
def test_verdicts(difference: dict | None, seeds: int, expected: str) -> None:
    assert expected in results.verdict(difference, "Mean@8", "none", seeds)


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.2), (-0.2, 0.0)])
def test_an_interval_that_ends_at_0_holds_it(low: float, high: float) -> None:
    assert statistics.with_noise({"low": low, "high": high})["within_noise"]
