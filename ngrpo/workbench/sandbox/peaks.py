# SPDX-License-Identifier: Apache-2.0
"""A number from 0 to 99, with a reward of two peaks: the higher is where the sandbox model seldom looks."""

from __future__ import annotations

import math
import random

QUESTION = "pick"
NUMBERS = range(100)
HIGH, LOW = 40, 75
# Where the sandbox model looks at first: near the lower peak, but for a floor under every number.
WIDTH, FLOOR = 5.0, 0.02


def reward(number: int) -> float:
    """In [0.1, 1]: 1 at the higher peak, 0.6 at the lower one, 0.1 far from both."""
    high, low = (math.exp(-((number - peak) ** 2) / 50) for peak in (HIGH, LOW))
    return 0.1 + 0.9 * high + 0.5 * low


def habit() -> list[float]:
    """The probability of each number before any reinforcement learning, (100,)."""
    weights = [math.exp(-0.5 * ((number - LOW) / WIDTH) ** 2) + FLOOR for number in NUMBERS]
    return [weight / sum(weights) for weight in weights]


def demonstration(chance: random.Random) -> str:
    """A number drawn from :func:`habit`."""
    return str(chance.choices(NUMBERS, habit())[0])
