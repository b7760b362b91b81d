# SPDX-License-Identifier: Apache-2.0
"""The minimum non-negative sum of CoT2 (Gozeten et al., arXiv 2505.23648): signs for numbers, one running sum a token.

Each number gets a sign; the sum of all shall be as small as it can be without being negative. An answer is the chain of
running sums, whose last one counts. The sandbox model adds without error and chooses its signs by chance.
"""

from __future__ import annotations

import itertools
import random

COUNT, LARGEST = 4, 9


def problem(chance: random.Random) -> list[int]:
    """Four numbers from 1 to 9."""
    return [chance.randint(1, LARGEST) for _ in range(COUNT)]


def solution(numbers: list[int]) -> int:
    """The smallest sum of the numbers with signs that is not negative."""
    signed = itertools.product(*((number, -number) for number in numbers))
    return min(total for total in map(sum, signed) if total >= 0)


def question(numbers: list[int]) -> str:
    """The problem as the model is asked for it."""
    return " ".join(["signs", *map(str, numbers)])


def demonstration(chance: random.Random, numbers: list[int]) -> str:
    """Running sums with a fair coin for each sign."""
    return " ".join(map(str, itertools.accumulate(chance.choice((1, -1)) * number for number in numbers)))
