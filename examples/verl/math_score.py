# SPDX-License-Identifier: Apache-2.0
"""verl's reward of the recipe: 1 where math-verify finds the answer equal to the reference, else 0."""

from __future__ import annotations

from typing import Any

from ngrpo.methods.tasks.math import reward_func


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, *, opening: str = "", **_: Any
) -> float:
    """What verl calls with each response.

    ``opening``: how the chat template opens the response, such as ``<think>``, without which thinking that was cut off
    would be read as an answer.
    """
    return float(reward_func([opening + solution_str], [opening], [ground_truth])["rewards"][0])
