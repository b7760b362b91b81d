# SPDX-License-Identifier: Apache-2.0
"""`ngrpo diagnose`: before any training, how different and how valid a strategy's rollouts are."""

from __future__ import annotations

from collections.abc import Sequence

from ngrpo.config.arms import Arm
from ngrpo.workbench.evaluate.rollout_policy import RolloutPolicy
from perturbations.errors import UsageError


def policy_of(strategy: Arm, step: int = 0, steps: int | None = None) -> RolloutPolicy:
    """The sampling schedule and the parameter noise of a strategy at a training step.

    Args:
        strategy: its options ``sampling.schedule`` and ``policy_noise`` are read as ``ngrpo train`` reads the flags.
        step: from 0.
        steps: of the whole run, where something depends on it.

    Raises:
        UsageError: with the strategy, as :meth:`RolloutPolicy.of`.
    """
    from ngrpo.config import parse

    words = [word for key, value in strategy.rollouts.items() for word in (f"--{key}", *([value] if value else []))]
    try:
        return RolloutPolicy.of(parse.run_config(words), step, steps)
    except UsageError as error:
        raise UsageError(f"--strategy {strategy.id!r}: {error}") from None


def without_repeats(strategies: Sequence[Arm], step: int = 0, steps: int | None = None) -> list[Arm]:
    """The strategies, without those that an earlier one equals up to its id; step and steps as in :func:`policy_of`."""
    distinct: list[Arm] = []
    seen: list[tuple[object, ...]] = []
    for strategy in strategies:
        drawn = (strategy.name, dict(strategy.options), policy_of(strategy, step, steps).described())
        if drawn not in seen:
            distinct.append(strategy)
            seen.append(drawn)
    return distinct
