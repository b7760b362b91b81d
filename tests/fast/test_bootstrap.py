# SPDX-License-Identifier: Apache-2.0
"""Intervals, paired differences and verdicts of `ngrpo compare`."""

from __future__ import annotations

import numpy as np
import pytest

from ngrpo import bootstrap
from ngrpo.compare import verdicts
from ngrpo.evaluate.estimators import pass_at_k


def test_mean_and_interval_of_one_seed_resample_the_problems() -> None:
    """One seed, 100 problems, half right: the mean's standard error is sqrt(0.5 · 0.5 / 100) = 0.05, so the
    interval is about 0.5 ± 1.96 · 0.05 = [0.402, 0.598]."""
    result = bootstrap.interval(np.array([[0.0, 1.0] * 50]))
    assert result["value"] == 0.5
    assert result["low"] == pytest.approx(0.402, abs=0.015)
    assert result["high"] == pytest.approx(0.598, abs=0.015)


def test_seeds_and_problems_both_widen_the_interval() -> None:
    """Four seeds that differ by 0 and 1 on every problem: problems agree, so all noise is between seeds. The mean of
    4 draws of {0, 1} has standard error sqrt(0.25 / 4) = 0.25; the 2.5 % quantile of binomial(4, 0.5)/4 is 0."""
    result = bootstrap.interval(np.array([[0.0] * 50, [1.0] * 50, [0.0] * 50, [1.0] * 50]))
    assert (result["value"], result["low"], result["high"]) == pytest.approx((0.5, 0.0, 1.0))


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    """60 tables of 8 seeds × 60 problems of a coin with p = 0.3: about 95 % of the intervals hold 0.3. With 60 trials
    at least 50 do, unless the true coverage is below about 0.9 (binomial, 1 % level)."""
    draw = np.random.default_rng(1)
    tables = (draw.random((60, 8, 60)) < 0.3).astype(float)
    results = [bootstrap.interval(table) for table in tables]
    assert sum(r["low"] <= 0.3 <= r["high"] for r in results) >= 50


def test_a_single_number_has_no_interval() -> None:
    assert bootstrap.interval(np.array([[0.4]])) == {"value": 0.4, "low": None, "high": None}


def test_same_data_give_the_same_interval() -> None:
    table = np.random.default_rng(0).random((3, 20))
    assert bootstrap.interval(table) == bootstrap.interval(table.copy())


def test_pairing_removes_what_both_share() -> None:
    """Problems of very different difficulty, and a strategy that is 0.1 better on each: unpaired the intervals
    overlap widely, paired the difference is 0.1 without any spread."""
    base = np.linspace(0.0, 0.9, 30)[None, :].repeat(3, axis=0)
    result = bootstrap.paired(base + 0.1, base)
    assert result["value"] == pytest.approx(0.1)
    assert result["low"] == pytest.approx(0.1) and result["high"] == pytest.approx(0.1)
    assert not result["within_noise"]
    assert bootstrap.interval(base + 0.1)["low"] < bootstrap.interval(base)["high"]


def test_equal_tables_are_equal_and_not_different() -> None:
    table = np.random.default_rng(0).random((2, 16))
    result = bootstrap.paired(table, table)
    assert result == {"value": 0.0, "low": 0.0, "high": 0.0, "within_noise": True}
    assert verdicts.verdict(result, "Mean@8", "none", 2) == "equal to none in Mean@8, sample by sample"


def test_two_draws_of_one_strategy_come_out_as_noise() -> None:
    """Forty pairs of tables from the same coin: a 95 % interval excludes 0 in about two of them; ten would be
    impossible (p < 1e-4) unless the interval were too narrow."""
    draw = np.random.default_rng(3)
    pairs = (draw.random((40, 2, 4, 50)) < 0.4).astype(float)
    assert sum(not bootstrap.paired(a, b)["within_noise"] for a, b in pairs) < 10


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="same seeds and problems"):
        bootstrap.paired(np.zeros((2, 3)), np.zeros((2, 4)))


@pytest.mark.parametrize(
    ("difference", "seeds", "expected"),
    [
        ({"value": 0.02, "low": -0.01, "high": 0.05, "within_noise": True}, 3, "within noise: Mean@8 +0.020"),
        (
            {"value": 0.09, "low": 0.04, "high": 0.12, "within_noise": False},
            3,
            "better: Mean@8 +0.090 [+0.040, +0",
        ),
        ({"value": -0.09, "low": -0.12, "high": -0.04, "within_noise": False}, 5, "worse: Mean@8 -0.090"),
        ({"value": 0.09, "low": 0.04, "high": 0.12, "within_noise": False}, 1, "one seed is too few to tell"),
        ({"value": 0.3, "low": None, "high": None, "within_noise": True}, 1, "within noise: Mean@8 +0.300 against"),
        (None, 0, "could not be compared with none"),
    ],
)
def test_verdicts(difference: dict | None, seeds: int, expected: str) -> None:
    assert expected in verdicts.verdict(difference, "Mean@8", "none", seeds)


def test_pass_at_k_of_counts() -> None:
    """n = 4: Pass@2 of c = 0, 1, 2 is 0, 1 - C(3,2)/C(4,2) = 1/2, 1 - C(2,2)/C(4,2) = 5/6."""
    assert [pass_at_k(4, c, 2) for c in range(3)] == pytest.approx([0.0, 0.5, 5 / 6])


def test_quarters_of_a_learning_curve() -> None:
    rewards = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert verdicts.first_quarter(rewards) == pytest.approx(0.05)
    assert verdicts.last_quarter(rewards) == pytest.approx(0.65)
    assert verdicts.last_quarter([0.25]) == 0.25
