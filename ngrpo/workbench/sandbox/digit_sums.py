# SPDX-License-Identifier: Apache-2.0
"""Digit sums with a shortcut: six digits, asked for is their sum modulo 10.

There are two ways to answer. ``copy`` names the first digit: right on the easy problems, whose other digits sum to 0
modulo 10, and on no other. ``count`` writes the running sums modulo 10: right on all once it is learnt, but the sandbox
model seldom chooses it, and slips at its last step. Nothing but the sum itself tells an easy problem from another.
"""

from __future__ import annotations

import random

from ngrpo.workbench.sandbox.vocabulary import FILLERS

DIGITS = 6
COPY, COUNT = "copy", "count"
FILLED = 3  # words before the way, in the form whose way is chosen late
# Of the demonstrations: how many count, and how many of those are right.
COUNTED, SKILL = 0.2, 0.1


def problem(chance: random.Random, easy: bool) -> list[int]:
    """Six digits; on an easy problem the last five sum to 0 modulo 10, on another they do not."""
    digits = [chance.randrange(10) for _ in range(DIGITS - 1)]
    rest = 0 if easy else chance.randrange(1, 10)
    return [*digits, (rest - sum(digits[1:])) % 10]


def solution(digits: list[int]) -> int:
    """The sum modulo 10."""
    return sum(digits) % 10


def question(digits: list[int], late: bool) -> str:
    """The problem as the model is asked for it.

    Args:
        digits: of :func:`problem`.
        late: whether words without a meaning come before the way, so that it is not the first token.
    """
    return " ".join(["ponder" if late else "sum", *map(str, digits)])


def demonstration(
    chance: random.Random, digits: list[int], late: bool, counted: float = COUNTED, skill: float = SKILL
) -> str:
    """An answer such as the sandbox model gives before any reinforcement learning.

    Args:
        chance: draws the words, the way and the slip.
        digits: of :func:`problem`.
        late: as in :func:`question`.
        counted: the probability of ``count``.
        skill: the probability that the last of the running sums is right.
    """
    filled = [chance.choice(FILLERS) for _ in range(FILLED)] if late else []
    if chance.random() >= counted:
        return " ".join([*filled, COPY, str(digits[0])])
    sums = [sum(digits[: n + 1]) % 10 for n in range(1, DIGITS)]
    if chance.random() >= skill:
        sums[-1] = (sums[-1] + 1) % 10
    return " ".join([*filled, COUNT, *map(str, sums)])
