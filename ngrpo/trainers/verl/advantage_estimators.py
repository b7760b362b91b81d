# SPDX-License-Identifier: Apache-2.0
"""Advantages of this project in verl's own registry: ``algorithm.adv_estimator=rs_grpo +advantage.beta=2``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ngrpo import advantages
from ngrpo.advantages.base import Advantage
from perturbations.errors import UsageError


def register(name: str, options: dict[str, object]) -> None:
    """Enters an advantage into verl's registry; does nothing for an estimator of verl's own.

    Raises:
        UsageError: for bad options, options of an estimator that is none of ours, or an advantage that needs more than
            the rewards of a group.
    """
    from verl.trainer.ppo.core_algos import register_adv_est

    if name not in advantages.available():
        if options:
            raise UsageError(f"advantage.{next(iter(options))}: algorithm.adv_estimator={name} has no such options.")
        return
    advantage = advantages.create(name, **options)
    if advantage.counted or advantage.leaves_out_overlong:
        raise UsageError(f"algorithm.adv_estimator={name}: it looks at more than rewards, which verl does not give it.")
    register_adv_est(name)(estimator(advantage))


def estimator(advantage: Advantage) -> Callable[..., tuple[Tensor, Tensor]]:
    """As verl calls it: token rewards and mask, (B, T) each, and the group of each row; returns (B, T) twice."""

    def compute(
        token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, **_: object
    ) -> tuple[Tensor, Tensor]:
        rewards, advantages = token_level_rewards.sum(dim=-1), torch.zeros(len(index))
        for group in dict.fromkeys(index):
            rows = torch.from_numpy(np.flatnonzero(index == group))
            if bool(response_mask[rows].any()):  # not verl's padding
                advantages[rows] = advantage.compute(rewards[rows][None])[0].to(advantages.dtype)
        full = advantages.to(rewards.device).unsqueeze(-1) * response_mask
        return full, full

    return compute
