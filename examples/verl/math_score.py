# SPDX-License-Identifier: Apache-2.0
"""verl's reward of the recipe: 1 where math-verify finds the answer equal to the reference, else 0."""

from __future__ import annotations

from typing import Any

from ngrpo.methods.tasks.math import reward_func


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, opening: str = "", **_: Any
) -> float:
    """What verl calls with each response.

    ``ground_truth``: the reference, or an object with it as ``target``. ``opening``: how the chat template opens the
    response, such as ``<think>``, without which thinking that was cut off would be read as an answer.

    Raises ``ValueError`` for a row without a reference, on which every response would be wrong.
    """
    reference = ground_truth.get("target") if isinstance(ground_truth, dict) else ground_truth
    if reference is None or reference == "":
        raise ValueError(f"{data_source}: reward_model.ground_truth is {ground_truth!r}, and math needs a reference.")
    return float(reward_func([opening + solution_str], [opening], [reference])["rewards"][0])
