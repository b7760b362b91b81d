# SPDX-License-Identifier: Apache-2.0
"""`ngrpo diagnose`: before any training, how different and how valid an arm's rollouts are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ngrpo.config.arms import Arm
from perturbations.errors import UsageError

if TYPE_CHECKING:
    from ngrpo.workbench.evaluate.engine import RolloutPolicy


def policy_of(arm: Arm, step: int = 0, steps: int | None = None) -> RolloutPolicy:
    """An arm's sampling schedule and parameter noise at a training step; UsageError as :meth:`RolloutPolicy.of`."""
    from ngrpo.config import parse
    from ngrpo.workbench.evaluate.engine import RolloutPolicy

    words: list[str] = []
    for key, value in arm.rollouts.items():
        words.append(f"--{key}")
        if value:
            words.append(value)
    try:
        return RolloutPolicy.of(parse.run_config(words), step, steps)
    except UsageError as error:
        raise UsageError(f"--strategy {arm.id!r}: {error}") from None


def without_repeats(arms: Sequence[Arm], step: int = 0, steps: int | None = None) -> list[Arm]:
    """The arms without those that roll out as an earlier one does, whatever their ids.

    ``step`` and ``steps`` are as in :func:`policy_of`.
    """
    distinct_arms: list[Arm] = []
    rollouts: list[tuple[str, dict[str, str], dict[str, Any]]] = []
    for arm in arms:
        described = (arm.name, dict(arm.options), policy_of(arm, step, steps).described())
        if described not in rollouts:
            distinct_arms.append(arm)
            rollouts.append(described)
    return distinct_arms
