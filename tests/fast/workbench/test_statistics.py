# SPDX-License-Identifier: Apache-2.0
"""Intervals over seeds, paired t tests, Holm's correction, detectable differences, and verdicts on them."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ngrpo.workbench import statistics
from ngrpo.workbench.compare import summaries


def test_one_seed_resamples_the_problems_and_says_so() -> None:
    """One seed, 100 problems, half right: the mean's standard error is sqrt(0.5 · 0.5 / 100) = 0.05, so the
    interval is about 0.5 ± 1.96 · 0.05 = [0.402, 0.598]."""
    result = statistics.interval(np.array([[0.0, 1.0] * 50]))
    assert result["value"] == 0.5
    assert result["over"] == "problems"
    assert result["low"] == pytest.approx(0.402, abs=0.015)
    assert result["high"] == pytest.approx(0.598, abs=0.015)


def test_a_bootstrap_interval_of_eight_problems_by_hand() -> None:
    """Student's t with 7 degrees of freedom is 2.3646 at 97.5%; √(8/7) · 2.3646 = 2.5279, and Φ(−2.5279) = 0.00574."""
    replicates = np.linspace(0.0, 1.0, 100_001)
    assert statistics.bounds(replicates, 8) == pytest.approx((0.00574, 0.99426), abs=1e-5)
    assert statistics.bounds(replicates) == pytest.approx((0.025, 0.975))


def test_interval_over_seeds_by_hand() -> None:
    """Seeds with means 0.2, 0.4, 0.6 (whatever their problems): mean 0.4, standard deviation 0.2, standard error
    0.11547; the 97.5% quantile of t with 2 degrees of freedom is 4.30265, so the half is 0.49683."""
    by_seed_and_problem = np.array([[0.0, 0.4], [0.3, 0.5], [0.6, 0.6]])
    result = statistics.interval(by_seed_and_problem)
    assert result["value"] == pytest.approx(0.4)
    assert result["over"] == "seeds"
    assert result["low"] == pytest.approx(0.4 - 0.49683, abs=1e-5)
    assert result["high"] == pytest.approx(0.4 + 0.49683, abs=1e-5)


def test_a_single_number_has_no_interval() -> None:
    single = statistics.interval(np.array([[0.4]]))
    assert single == {"value": 0.4, "low": None, "high": None, "over": None}


def test_paired_t_test_by_hand() -> None:
    """Differences 0.1, 0.2, 0.3, 0.4: mean 0.25, deviation 0.129099, t = 0.25 / (0.129099 / 2) = 3.87298 with 3 degrees
    of freedom. Their distribution function has a closed form, which gives p = 0.030466."""
    base = np.array([[0.3], [0.1], [0.1], [0.5]])
    differences = np.array([[0.1], [0.2], [0.3], [0.4]])

    result = statistics.paired(base + differences, base)

    angle = math.atan(3.8729833 / math.sqrt(3))
    closed_form = 1 - 2 / math.pi * (angle + math.sin(angle) * math.cos(angle))
    assert closed_form == pytest.approx(0.030466, abs=1e-6)
    assert result["p"] == pytest.approx(closed_form)
    assert result["spread"] == pytest.approx(0.12909944)
    assert not result["within_noise"]


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_no_difference(wrong: float) -> None:
    """NaN is neither below nor above 0.05, so a comparison with the level would not be an error."""
    table = np.zeros((2, 3))
    table_with_one = np.array([[0.0, 0.0, 0.0], [0.0, wrong, 0.0]])
    with pytest.raises(ValueError, match="1 of 6 differences are not finite numbers"):
        statistics.paired(table, table_with_one)


@pytest.mark.parametrize("wrong", [math.nan, 1.5, -0.1])
def test_a_p_value_outside_of_0_to_1_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="each must be in"):
        statistics.holm([0.01, wrong])


def test_equal_tables_are_equal_and_not_different() -> None:
    table = np.random.default_rng(0).random((2, 16))

    result = statistics.paired(table, table)
    statistics.correct([result])

    assert result["value"] == 0.0
    assert result["low"] is None
    assert result["p"] == 1.0
    assert result["detectable"] is None
    assert summaries.verdict(result, "Mean@8", "none", 2) == "equal to none in Mean@8 with every seed"
    rounded = {**result, "value": -1e-17}
    assert summaries.verdict(rounded, "Mean@8", "none", 2) == "equal to none in Mean@8 with every seed"


@pytest.mark.parametrize(
    ("table", "p", "verdict"),
    [
        pytest.param(
            np.ones((5, 16)),
            2 / 2**16,  # 2 of the 2^16 patterns of signs are as far from 0
            "better: Mean@8 +1.000 against none with each of 5 seeds (p 3.1e-05 over",
            id="five seeds, 16 problems, 1 instead of 0 in each",
        ),
        pytest.param(
            np.ones((6, 1)),
            2 / 2**6,
            "better: Mean@8 +1.000 against none with each of 6 seeds (p 0.031)",
            id="one problem, so over six seeds",
        ),
        pytest.param(
            np.tile([0.0, 0.5, 0.5, 1.0], (3, 1)),
            0.25,  # of the 2^3 patterns of signs of 0.5, 0.5 and 1 two are as far from 0
            "within noise: Mean@8 +0.500 against none with each of 3",
            id="seeds differ by the same, problems do not",
        ),
        pytest.param(
            np.eye(5, 30),
            0.0625,  # 2 of the 2^5 patterns; a t test over problems has p 0.023
            "within noise: Mean@8 +0.033 against none with each of 5 seeds",
            id="30 of 30 right against 29, another wrong one with each seed",
        ),
        pytest.param(
            np.tile([0.5, 0.5, 0.25, -0.25, 0.0], (2, 1)),
            0.375,  # 6 of the 2^4 sums are 1 or more in size: both 0.5 of one sign, and not both 0.25 of the other
            "within noise: Mean@8 +0.200 against none with each",
            id="four problems that differ by different sizes",
        ),
        pytest.param(
            np.tile([0.4, 0.6] * 9, (2, 1)),
            1e-15,  # a t test: t = 0.5 / (0.1 / sqrt(18))
            "Mean@8 +0.500 against none with each of 2 seeds",
            id="more problems that differ than signs are counted for",
        ),
    ],
)
def test_seeds_that_differ_by_the_same(table: np.ndarray, p: float, verdict: str) -> None:
    """Without a spread over seeds the problems decide: exact signs where they differ by the same too."""
    result = statistics.paired(table, np.zeros_like(table))
    statistics.correct([result])
    assert result["p"] == pytest.approx(p, abs=1e-12)
    assert result["low"] is None
    assert result["high"] is None
    assert result["detectable"] is None
    assert summaries.verdict(result, "Mean@8", "none", len(table)).startswith(verdict)


@pytest.mark.parametrize("least", [1.0, 0.5])
@pytest.mark.parametrize(("problems", "noise"), [(30, False), (6, False), (5, True), (1, True)])
def test_one_seed_whose_problems_all_gain(problems: int, noise: bool, least: float) -> None:
    """By the same or not: 2 of the 2^5 patterns of signs are as far from 0, p = 0.0625."""
    difference = statistics.paired(np.linspace(least, 1.0, problems)[None], np.zeros((1, problems)))
    assert difference["within_noise"] is noise


def test_one_seed_of_which_few_problems_gain() -> None:
    """Four of 30 problems: a bootstrap leaves all four out in 1.4% of its draws, but the signs have p = 0.125."""
    assert statistics.paired(np.eye(4, 30).sum(axis=0)[None], np.zeros((1, 30)))["within_noise"]


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [
        pytest.param(
            np.zeros((30, 1)),
            0.0,
            3.841459 / 33.841459,  # z² / (30 + z²), z = 1.959964
            id="Wilson, 0 in 30",
        ),
        pytest.param(
            np.ones((5, 16)),
            16 / (16 + 3.841459),
            1.0,
            id="Wilson, all right",
        ),
        pytest.param(
            np.array([[1.0], [0.0], [0.0]]),
            0.0615,  # (1 + z²/2 ± z √(2/3 + z²/4)) / (3 + z²)
            0.7923,
            id="Wilson, 1 in 3",
        ),
        pytest.param(
            np.array([[0.5], [0.9], [1.0]]),
            0.1428,  # Student's t: 0.8 ± 0.6572, cut at 1
            1.0,
            id="Student, beyond 1",
        ),
        pytest.param(
            np.array([[0.0], [0.1], [0.2]]),
            0.0,
            0.3484,  # Student's t: 0.1 ± 0.2484, cut at 0
            id="Student, below 0",
        ),
        pytest.param(
            np.array([[0.3, 0.0], [0.1, 0.2]]),
            None,
            None,
            id="means (0.3 + 0) / 2 and (0.1 + 0.2) / 2, which differ in their last bit alone",
        ),
        pytest.param(
            np.full((3, 4), 0.5),
            None,
            None,
            id="nothing varies, so neither t nor the bootstrap can say anything",
        ),
    ],
)
def test_intervals_of_shares_at_the_edge(table: np.ndarray, low: float | None, high: float | None) -> None:
    interval = statistics.interval(table, share=True)
    assert interval["low"] == pytest.approx(low, abs=1e-4)
    assert interval["high"] == pytest.approx(high, abs=1e-4)


@pytest.mark.parametrize(("problems", "over"), [(3, "seeds"), (4, "problems")])
def test_wilsons_interval_is_over_problems_where_they_outnumber_three_seeds(problems: int, over: str) -> None:
    all_right = np.ones((3, problems))
    assert statistics.interval(all_right, share=True)["over"] == over


LEVEL_P = 1 - statistics.LEVEL


@pytest.mark.parametrize(
    ("p", "within_noise"),
    [
        pytest.param(LEVEL_P, True, id="at the level"),
        pytest.param(np.nextafter(LEVEL_P, 0.0), False, id="just below the level"),
    ],
)
def test_a_p_value_at_the_level_itself_is_noise(p: float, within_noise: bool) -> None:
    difference: Any = {"p": p, "spread": 0.1, "seeds": 3, "within_noise": None}
    statistics.correct([difference])
    assert difference["within_noise"] is within_noise


def test_a_difference_of_shares_is_at_most_1() -> None:
    ours = np.array([[1.0], [0.9], [1.0]])
    base = np.array([[0.0], [0.6], [0.0]])
    difference = statistics.paired(ours, base)
    assert difference["low"] < 0.0
    assert difference["high"] == 1.0


def test_holm_by_hand() -> None:
    # 4 · 0.01, 3 · 0.02, 2 · 0.03 and 1 · 0.6, in the order of the arguments.
    assert statistics.holm([0.6, 0.01, 0.03, 0.02]) == pytest.approx([0.6, 0.04, 0.06, 0.06])
    # 2 · 0.03 = 0.06, and 0.031 is raised to it.
    assert statistics.holm([0.031, 0.03]) == pytest.approx([0.06, 0.06])
    # Nothing exceeds 1.
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0]


def test_no_difference_of_shares_above_1_can_be_seen() -> None:
    difference = statistics.paired(np.array([[1.0], [0.0]]), np.array([[0.0], [0.3]]))
    statistics.correct([difference])
    least = statistics.detectable(difference["spread"], 2)
    assert least is not None
    assert least > 1.0
    assert difference["detectable"] is None


def test_correction_decides_and_one_seed_is_corrected_apart() -> None:
    """p = 0.030 beside 0.031 is 0.091 corrected for three comparisons, and no longer beyond noise. The problems of one
    seed have p = 2 / 2^6 = 0.031, tripled too; with it in one row, the others would be multiplied by less."""
    base = np.zeros((4, 1))
    first = statistics.paired(np.array([[1.0], [2.0], [3.0], [4.0]]), base)
    second = statistics.paired(np.array([[1.0], [2.0], [3.0], [4.02]]), base)
    one_seed = statistics.paired(np.linspace(0.5, 1.0, 6)[None], np.full((1, 6), 0.25))
    for difference in (first, second):
        assert not difference["within_noise"], "beyond noise before the correction"

    statistics.correct([first, second, one_seed])

    for difference in (first, second, one_seed):
        assert difference["within_noise"]
        assert difference["comparisons"] == 3
    assert first["p_corrected"] == pytest.approx(3 * first["p"])
    assert one_seed["p_corrected"] == pytest.approx(3 * 2 / 2**6)
    assert one_seed["detectable"] is None


def test_comparisons_without_a_p_value_yet_count() -> None:
    # 4 · 0.01 and 3 · 0.02: of four arms two have no finished run.
    assert statistics.holm([0.02, 0.01], comparisons=4) == pytest.approx([0.06, 0.04])


@pytest.mark.parametrize(("pairs", "comparisons"), [(3, 1), (5, 8)])
def test_four_of_five_studies_find_the_detectable_difference(pairs: int, comparisons: int) -> None:
    """20,000 studies with a true difference of that size; 0.8 ± 3.5 standard errors of 0.0028."""
    least = statistics.detectable(0.05, pairs, comparisons)
    assert least is not None
    draws = np.random.default_rng(0).normal(least, 0.05, size=(20_000, pairs))
    t = draws.mean(axis=1) / draws.std(axis=1, ddof=1) * math.sqrt(pairs)
    critical_t = stats.t.ppf(1 - 0.025 / comparisons, pairs - 1)
    assert (t > critical_t).mean() == pytest.approx(0.8, abs=0.01)


def test_one_pair_detects_nothing() -> None:
    assert statistics.detectable(0.05, 1) is None


def over_seeds(value: float, p: float, comparisons: int = 1, seeds: int = 5) -> dict[str, Any]:
    """A difference over several seeds, with the interval ``value`` ± 0.03 and the corrected ``p``."""
    return {
        "value": value,
        "low": value - 0.03,
        "high": value + 0.03,
        "over": "seeds",
        "p": p / comparisons,
        "seeds": seeds,
        "p_corrected": p,
        "comparisons": comparisons,
        "detectable": 0.07,
        "within_noise": p >= 0.05,
    }


def over_problems(value: float, low: float) -> dict[str, Any]:
    """A difference with one seed, whose interval over problems begins at ``low``."""
    return {
        "value": value,
        "low": low,
        "high": value + 0.03,
        "over": "problems",
        "p": 0.01,
        "p_corrected": 0.03,
        "comparisons": 3,
        "tested": "problems",
        "seeds": 1,
        "within_noise": low <= 0.0,
    }


@pytest.mark.parametrize(
    ("difference", "seeds", "expected"),
    [
        pytest.param(
            over_seeds(0.02, p=0.4, comparisons=4),
            5,
            "within noise: Mean@8 +0.020 [-0.010, +0.050] against none over 5 seeds (p 0.1, 0.4 corr",
            id="within noise",
        ),
        pytest.param(
            over_seeds(0.09, p=0.01),
            5,
            "better: Mean@8 +0.090 [+0.060, +0.120] against none over 5 seeds (p 0.01)",
            id="better",
        ),
        pytest.param(
            over_seeds(-0.09, p=0.02, comparisons=2),
            3,
            "worse: Mean@8 -0.090",
            id="worse",
        ),
        pytest.param(
            over_seeds(0.09, p=0.01, seeds=2),
            2,
            "2 seeds are too few to tell a method from luck",
            id="two seeds",
        ),
        pytest.param(
            over_problems(0.09, low=0.04),
            1,
            "Mean@8 +0.090 [+0.040, +0.120] over problems against none"
            " (p 0.01 over problems, 0.03 corrected for 3 comparisons), the problems agree, but one seed is too few",
            id="one seed whose problems agree",
        ),
        pytest.param(
            over_problems(0.01, low=-0.04),
            1,
            "one seed gives no interval over seeds",
            id="one seed whose problems do not agree",
        ),
        pytest.param(
            None,
            3,
            "was not compared with none: there is no evaluation, and rewards are of rollouts drawn otherwise",
            id="no evaluation",
        ),
    ],
)
def test_verdicts(difference: dict | None, seeds: int, expected: str) -> None:
    assert expected in summaries.verdict(difference, "Mean@8", "none", seeds)


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.2), (-0.2, 0.0)])
def test_an_interval_that_ends_at_0_holds_it(low: float, high: float) -> None:
    assert statistics.with_noise({"low": low, "high": high}, 6)["within_noise"]


@pytest.mark.parametrize(("problems", "noise"), [(6, False), (5, True)])
def test_a_difference_of_few_problems_is_within_noise(problems: int, noise: bool) -> None:
    assert statistics.with_noise({"low": 0.1, "high": 0.2}, problems)["within_noise"] is noise
