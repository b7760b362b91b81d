# SPDX-License-Identifier: Apache-2.0
"""Diversity and repetition measures against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from ngrpo.workbench.diagnose import measures
from ngrpo.workbench.scoring.answers import numbers


def test_edit_distance_of_known_pairs() -> None:
    # kitten → sitting: k→s, e→i, +g: 3 edits, longer length 7.
    kitten, sitting = [ord(c) for c in "kitten"], [ord(c) for c in "sitting"]
    assert measures.edit_distance([kitten, sitting]) == pytest.approx(3 / 7)
    assert measures.edit_distance([sitting, kitten]) == pytest.approx(3 / 7)


def test_edit_distance_is_the_mean_over_pairs() -> None:
    # (1 2 3) and (1 3): one deletion, 1/3. (1 2 3) and (): 3/3. (1 3) and (): 2/2. Mean (1/3 + 1 + 1) / 3 = 7/9.
    assert measures.edit_distance([[1, 2, 3], [1, 3], []]) == pytest.approx(7 / 9)


def test_edit_distance_extremes() -> None:
    assert measures.edit_distance([[1, 2], [1, 2], [1, 2]]) == 0.0
    assert measures.edit_distance([[1, 1, 1], [2, 2, 2]]) == 1.0
    assert measures.edit_distance([[], []]) == 0.0


def test_edit_distance_against_the_textbook_recurrence() -> None:
    import itertools
    import random

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


def test_bleu_of_equal_texts_is_one() -> None:
    assert measures.bleu([1, 2, 3, 4, 5], [[1, 2, 3, 4, 5]]) == pytest.approx(1.0)


def test_bleu_by_hand() -> None:
    # 1 2 3 4 5 against 1 2 3 9 5. Unigrams: 4 of 5. Bigrams: 12 23 match of 12 23 34 45: (2+1)/(4+1).
    # Trigrams: 123 of 123 234 345: (1+1)/(3+1). 4-grams: none of 2: (0+1)/(2+1). Equal lengths: no penalty.
    expected = (4 / 5 * 3 / 5 * 2 / 4 * 1 / 3) ** (1 / 4)
    assert measures.bleu([1, 2, 3, 4, 5], [[1, 2, 3, 9, 5]]) == pytest.approx(expected)


def test_bleu_clips_counts_at_the_best_single_reference() -> None:
    # 1 1 1 against 1 1 and 1 2: one reference has two 1s, so 2 of 3 unigrams. Bigrams: 11 once of two: (1+1)/(2+1).
    # Trigrams: 0 of 1: (0+1)/(1+1). Closest reference length 2, hypothesis longer: no penalty.
    expected = (2 / 3 * 2 / 3 * 1 / 2) ** (1 / 3)
    assert measures.bleu([1, 1, 1], [[1, 1], [1, 2]]) == pytest.approx(expected)


def test_bleu_brevity_penalty() -> None:
    # 1 2 against 1 2 3 4: both precisions are 1 (2/2 and (1+1)/(1+1)); the penalty is exp(1 - 4/2).
    assert measures.bleu([1, 2], [[1, 2, 3, 4]]) == pytest.approx(math.exp(-1.0))


def test_bleu_without_a_common_token_and_of_nothing() -> None:
    assert measures.bleu([1, 2], [[3, 4]]) == 0.0
    assert measures.bleu([], [[3, 4]]) == 0.0
    assert measures.bleu([], [[3, 4], []]) == 1.0


def test_self_bleu_is_the_mean_over_the_group() -> None:
    # The two equal answers have 1; the third has no token in common with either.
    assert measures.self_bleu([[1, 2, 3, 4], [1, 2, 3, 4], [7, 8]]) == pytest.approx(2 / 3)


def test_distinct_n() -> None:
    # Bigrams 12 21 12 and 12 22: five, of them 12, 21, 22 different.
    assert measures.distinct_n([[1, 2, 1, 2], [1, 2, 2]], 2) == pytest.approx(3 / 5)
    assert measures.distinct_n([[1], []], 2) is None


def test_loops() -> None:
    assert measures.loops([1, 2, 3] * 10)  # 27 4-grams, 3 different: 24/27 have occurred before
    assert not measures.loops(list(range(50)))
    assert not measures.loops([1, 1, 1])  # no 4-gram at all
    # 8 tokens of one kind: 5 4-grams, 4 of them repeats. Followed by 8 new tokens: 13 4-grams, 4 repeats, 0.31.
    assert measures.loops([1] * 8)
    assert not measures.loops([1] * 8 + list(range(10, 18)))


def test_loops_looks_at_the_end() -> None:
    start = list(range(1000, 1400))
    assert measures.loops(start + [5, 6] * 64)
    assert not measures.loops([5, 6] * 64 + start)


def test_numbers_in_one_form() -> None:
    def found(text: str) -> set[str]:
        return set(numbers(text, alone=True))

    assert found("1,234.50 and 007 and 100") == {"1234.5", "7", "100"}
    assert found("-7, 8-5, (-2), x-3 and 2(4)-1") == {"-7", "8", "5", "-2", "3", "2", "4", "1"}
    assert found("x3 2x 3rd v1.2") == set()
    assert found("12.5. 0.50, -0") == {"12.5", "0.5", "0"}


def test_intermediate_results_leave_out_question_and_final_answer() -> None:
    text = "3 * 4 = 12, and 12 + 5 = 17, so 17.00 + 3 = 20. The answer is 20."
    assert measures.intermediate_results(text, "What is 3 * 4 + 5 + 3?", "20") == {"12", "17"}
    assert measures.intermediate_results(text, "What is 3 * 4 + 5 + 3?", None) == {"12", "17", "20"}


def test_distinct_share() -> None:
    # Three elements in all sets together, two of them different.
    assert measures.distinct_share([{"1"}, {"1", "2"}]) == pytest.approx(2 / 3)
    assert measures.distinct_share([{"1"}, {"1"}, {"1"}, {"1"}]) == pytest.approx(1 / 4)
    assert measures.distinct_share([set(), set()]) is None
