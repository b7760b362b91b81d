# SPDX-License-Identifier: Apache-2.0
"""The minimum non-negative sum of CoT2 (Gozeten et al., arXiv 2505.23648): ``--task minimum_sum``, for the sandbox.

Each of four numbers gets a sign; their sum should be as small as possible without being negative.
"""

import itertools
import random

from ngrpo.machine.models import sandbox
from ngrpo.methods.scoring.answers import last_number
from ngrpo.methods.tasks import Split, distinct_rows, number_reward, number_score

TRAIN_ROWS = 4096
EVAL_ROWS = 256


def problems(rows: int = TRAIN_ROWS) -> Split:
    """Training and held-out rows, the same on every machine; no question is in both."""
    chance = random.Random(0)

    def draw() -> tuple[str, str]:
        numbers = sandbox.sign_problem(chance)
        return sandbox.sign_question(numbers), str(solution(numbers))

    all_rows = distinct_rows(draw, rows + EVAL_ROWS)
    return all_rows[EVAL_ROWS:], all_rows[:EVAL_ROWS]


def solution(numbers: list[int]) -> int:
    """The smallest sum of the numbers with signs that is not negative."""
    with_both_signs = [(number, -number) for number in numbers]
    sums = [sum(signed_numbers) for signed_numbers in itertools.product(*with_both_signs)]
    return min(total for total in sums if total >= 0)


score = number_score
final_answer = last_number
reward_func = number_reward
