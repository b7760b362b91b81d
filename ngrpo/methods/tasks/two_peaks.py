# SPDX-License-Identifier: Apache-2.0
"""A number from 0 to 99 with a graded reward of two peaks: ``--task two_peaks``, for the sandbox.

A bandit of 100 arms: the sandbox model starts near the lower peak.
"""

import math

from ngrpo.machine.models.sandbox import HIGH_PEAK, LOW_PEAK, NUMBERS, PEAK_QUESTION
from ngrpo.methods.scoring.answers import last_number
from ngrpo.methods.tasks import Split, reward_function

TRAIN_ROWS = 4096
EVAL_ROWS = 16
# The least reward of a response that an evaluation counts as right: the lower peak has 0.6, and its slopes less.
RIGHT_FROM = 0.8


def problems(rows: int = TRAIN_ROWS) -> Split:
    """One question many times, in training and in evaluation; the label is the best number."""
    row = {"input": PEAK_QUESTION, "label": str(HIGH_PEAK)}
    return [row] * rows, [row] * EVAL_ROWS


def reward(number: int) -> float:
    """In [0.1, 1]: 1 at the higher peak, 0.6 at the lower one, 0.1 far from both."""
    high = math.exp(-((number - HIGH_PEAK) ** 2) / 50)
    low = math.exp(-((number - LOW_PEAK) ** 2) / 50)
    return 0.1 + 0.9 * high + 0.5 * low


def score(answer: str, label: str) -> float:
    """The reward of the last number in a response, in [0, 1]; 0 where there is none from 0 to 99."""
    number = final_answer(answer)
    return 0.0 if number is None else reward(int(number))


def final_answer(answer: str) -> str | None:
    """The last number of a response where it is a whole one from 0 to 99."""
    number = last_number(answer)
    if number is None or not number.isdecimal() or int(number) not in NUMBERS:
        return None
    return number


def near_high_peak(answer: str) -> bool:
    """Whether the number is nearer to the higher peak than to the lower one."""
    return int(final_answer(answer) or LOW_PEAK) < (HIGH_PEAK + LOW_PEAK) / 2


def _judge(answer: str, label: str) -> tuple[float, bool]:
    return score(answer, label), near_high_peak(answer)


reward_func = reward_function(_judge, "task/near_high_peak")
