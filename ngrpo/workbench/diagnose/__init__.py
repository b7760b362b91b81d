# SPDX-License-Identifier: Apache-2.0
"""`ngrpo diagnose`: before any training, how different and how valid a strategy's rollouts are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ngrpo.config.arms import Arm
from perturbations.errors import UsageError

if TYPE_CHECKING:
    from ngrpo.workbench.evaluate.engine import RolloutPolicy


def policy_of(strategy: Arm, step: int = 0, steps: int | None = None) -> RolloutPolicy:
    """A strategy's sampling schedule and parameter noise at a step; UsageError as :meth:`RolloutPolicy.of`."""
    from ngrpo.config import parse
    from ngrpo.workbench.evaluate.engine import RolloutPolicy

    words = [word for key, value in strategy.rollouts.items() for word in (f"--{key}", *([value] if value else []))]
    try:
        return RolloutPolicy.of(parse.run_config(words), step, steps)
    except UsageError as error:
        raise UsageError(f"--strategy {strategy.id!r}: {error}") from None


def without_repeats(strategies: Sequence[Arm], step: int = 0, steps: int | None = None) -> list[Arm]:
    """The strategies, each once, whatever its id; step and steps as in :func:`policy_of`."""
    drawn = [(s.name, dict(s.options), policy_of(s, step, steps).described()) for s in strategies]
    return [strategy for i, strategy in enumerate(strategies) if drawn[i] not in drawn[:i]]
