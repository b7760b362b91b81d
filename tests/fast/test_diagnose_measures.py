# SPDX-License-Identifier: Apache-2.0
"""Diversity and repetition measures against numbers worked out by hand."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from ngrpo.workbench.diagnose import measures
from ngrpo.workbench.scoring.answers import numbers

KITTEN, SITTING = [ord(c) for c in "kitten"], [ord(c) for c in "sitting"]


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ([KITTEN, SITTING], 3 / 7),  # k→s, e→i, +g: 3 edits, longer length 7
        ([SITTING, KITTEN], 3 / 7),
        # (1 2 3) and (1 3): one deletion, 1/3. (1 2 3) and (): 3/3. (1 3) and (): 2/2. Mean (1/3 + 1 + 1) / 3 = 7/9.
        ([[1, 2, 3], [1, 3], []], 7 / 9),
        ([[1, 2], [1, 2], [1, 2]], 0.0),
        ([[1, 1, 1], [2, 2, 2]], 1.0),
        ([[], []], 0.0),
    ],
)
def test_edit_distance(group: list[list[int]], expected: float) -> None:
    assert measures.edit_distance(group) == pytest.approx(expected)


def test_edit_distance_against_the_textbook_recurrence() -> None:
    def textbook(a: list[int], b: list[int]) -> int:
        row = list(range(len(b) + 1))
        for i, x in enumerate(a):
            following = [i + 1]
            for j, y in enumerate(b):
                following.append(min(row[j + 1] + 1, following[j] + 1, row[j] + (x != y)))
            row = following
        return row[-1]

    chance = random.Random(0)
    for _ in range(200):
        group = [[chance.randrange(3) for _ in range(chance.randrange(9))] for _ in range(chance.randrange(2, 6))]
        pairs = list(itertools.combinations(group, 2))
        expected = sum(textbook(a, b) / max(len(a), len(b), 1) for a, b in pairs) / len(pairs)
        assert measures.edit_distance(group) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("hypothesis", "references", "expected"),
    [
        ([1, 2, 3, 4, 5], [[1, 2, 3, 4, 5]], 1.0),
        # 1 2 3 4 5 against 1 2 3 9 5. Unigrams: 4 of 5. Bigrams: 12 23 match of 12 23 34 45: (2+1)/(4+1).
        # Trigrams: 123 of 123 234 345: (1+1)/(3+1). 4-grams: none of 2: (0+1)/(2+1). Equal lengths: no penalty.
        ([1, 2, 3, 4, 5], [[1, 2, 3, 9, 5]], (4 / 5 * 3 / 5 * 2 / 4 * 1 / 3) ** (1 / 4)),
        # Counts are clipped at the best single reference: 1 1 1 against 1 1 and 1 2: one reference has two 1s, so 2 of
        # 3 unigrams. Bigrams: 11 once of two: (1+1)/(2+1). Trigrams: 0 of 1: (0+1)/(1+1). Closest reference length 2,
        # hypothesis longer: no penalty.
        ([1, 1, 1], [[1, 1], [1, 2]], (2 / 3 * 2 / 3 * 1 / 2) ** (1 / 3)),
        # 1 2 against 1 2 3 4: both precisions are 1 (2/2 and (1+1)/(1+1)); the penalty is exp(1 - 4/2).
        ([1, 2], [[1, 2, 3, 4]], math.exp(-1.0)),
        ([1, 2], [[3, 4]], 0.0),
        ([], [[3, 4]], 0.0),
        ([], [[3, 4], []], 1.0),
    ],
)
def test_bleu(hypothesis: list[int], references: list[list[int]], expected: float) -> None:
    assert measures.bleu(hypothesis, references) == pytest.approx(expected)


def test_self_bleu_is_the_mean_over_the_group() -> None:
    # The two equal responses have 1; the third has no token in common with either.
    assert measures.self_bleu([[1, 2, 3, 4], [1, 2, 3, 4], [7, 8]]) == pytest.approx(2 / 3)


def test_distinct_n() -> None:
    # Bigrams 12 21 12 and 12 22: five, of them 12, 21, 22 different.
    assert measures.distinct_n([[1, 2, 1, 2], [1, 2, 2]], 2) == pytest.approx(3 / 5)
    assert measures.distinct_n([[1], []], 2) is None


@pytest.mark.parametrize(
    ("tokens", "looped"),
    [
        ([1, 2, 3] * 10, True),  # 27 4-grams, 3 different: 24/27 have occurred before
        ([*range(50)], False),
        ([1, 1, 1], False),  # no 4-gram at all
        # 8 tokens of one kind: 5 4-grams, 4 of them repeats. Followed by 8 new tokens: 13 4-grams, 4 repeats, 0.31.
        ([1] * 8, True),
        ([1] * 8 + [*range(10, 18)], False),
        ([*range(1000, 1400), *[5, 6] * 64], True),  # the end counts
        ([*[5, 6] * 64, *range(1000, 1400)], False),
    ],
)
def test_loops(tokens: list[int], looped: bool) -> None:
    assert measures.loops(tokens) is looped


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1,234.50 and 007 and 100", {"1234.5", "7", "100"}),
        ("-7, 8-5, (-2), x-3 and 2(4)-1", {"-7", "8", "5", "-2", "3", "2", "4", "1"}),
        ("x3 2x 3rd v1.2", set()),
        ("12.5. 0.50, -0", {"12.5", "0.5", "0"}),
    ],
)
def test_numbers_in_one_form(text: str, found: set[str]) -> None:
    assert set(numbers(text, alone=True)) == found


def test_intermediate_results_leave_out_question_and_final_answer() -> None:
    text = "3 * 4 = 12, and 12 + 5 = 17, so 17.00 + 3 = 20. The answer is 20."
    assert measures.intermediate_results(text, "What is 3 * 4 + 5 + 3?", "20") == {"12", "17"}
    assert measures.intermediate_results(text, "What is 3 * 4 + 5 + 3?", None) == {"12", "17", "20"}


def test_distinct_share() -> None:
    # Three elements in all sets together, two of them different.
    assert measures.distinct_share([{"1"}, {"1", "2"}]) == pytest.approx(2 / 3)
    assert measures.distinct_share([{"1"}, {"1"}, {"1"}, {"1"}]) == pytest.approx(1 / 4)
    assert measures.distinct_share([set(), set()]) is None
