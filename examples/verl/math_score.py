# SPDX-License-Identifier: Apache-2.0
"""verl's reward of the recipe: 1 where math-verify finds the answer equal to the reference, else 0."""

from __future__ import annotations

from typing import Any

from ngrpo.methods.tasks.math import reward_func


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """What verl calls with each response."""
    return float(reward_func([solution_str], [""], [ground_truth])["rewards"][0])
