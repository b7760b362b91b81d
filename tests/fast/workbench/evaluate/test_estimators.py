# SPDX-License-Identifier: Apache-2.0
"""Pass@k and Mean@n against exact enumeration and numbers worked out by hand."""

from fractions import Fraction
from itertools import combinations

import pytest

from ngrpo.workbench.evaluate import mean_at_n, pass_at_k
from tests.support.import_probe import HEAVY, probe


def test_pass_at_k_is_that_of_an_exact_enumeration() -> None:
    """Every draw of k from n responses, c of them right: the share of draws with at least one right."""
    for n in range(1, 9):
        for c in range(n + 1):
            right = set(range(c))
            for k in range(1, n + 1):
                draws = list(combinations(range(n), k))
                hits = sum(not right.isdisjoint(draw) for draw in draws)
                assert pass_at_k(n, c, k) == float(Fraction(hits, len(draws))), (n, c, k)


def test_large_numbers_keep_their_digits() -> None:
    # c = 1: exactly k/n. C(100000, 50000) has 30,101 digits; a product of floats would have lost the tenth of them.
    assert pass_at_k(100_000, 1, 50_000) == 0.5
    assert pass_at_k(100_000, 1, 3) == 3 / 100_000
    assert pass_at_k(32, 31, 2) == 1.0, "one wrong answer cannot fill a pair"


@pytest.mark.parametrize(
    ("n", "c", "k", "says"),
    [
        (0, 0, 1, "n=0: must be a whole number of responses, at least 1"),
        (4, 5, 1, r"c=5: must be .* in \[0, n=4\]"),
        (4, 2, 5, r"k=5: must be a whole number in \[1, n=4\]"),
        (4, 2, 1.5, r"k=1\.5"),
    ],
)
def test_bad_numbers(n: int, c: int, k: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pass_at_k(n, c, k)


def test_mean_at_n() -> None:
    assert mean_at_n(32, 8) == 0.25
    assert mean_at_n(1, 0) == 0.0
    with pytest.raises(ValueError, match="c=3"):
        mean_at_n(2, 3)


def test_import_is_light() -> None:
    names = "Problem, Verdict, load_problems, load_task, mean_at_n, pass_at_k, score"
    _, modules = probe(f"from ngrpo.workbench.evaluate import {names}")
    assert not modules & {*HEAVY, "datasets", "pyarrow", "sympy", "math_verify", "reasoning_gym"}
