# SPDX-License-Identifier: Apache-2.0
"""Advantages of this project in verl's own registry: ``algorithm.adv_estimator=rs_grpo +advantage.beta=2``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ngrpo.config import compatibility
from ngrpo.config.features import Combination
from ngrpo.methods import advantages
from ngrpo.methods.advantages.base import Advantage
from perturbations.errors import UsageError


def register(name: str, options: dict[str, object], *, kl_in_reward: bool) -> None:
    """Enters an advantage into verl's registry; does nothing for an estimator of verl's own.

    Args:
        name: ``algorithm.adv_estimator``.
        options: of ours.
        kl_in_reward: ``algorithm.use_kl_in_reward``.

    Raises:
        UsageError: for bad options, options of an estimator that is none of ours, an advantage that needs more than
            the rewards of a group, or rewards that would contain a KL term.
    """
    if name not in advantages.available():
        if options:
            raise UsageError(f"advantage.{next(iter(options))}: algorithm.adv_estimator={name} has no such options.")
        return
    advantage = advantages.create(name, **options)
    asked = Combination(parts={"advantage": advantage}, arguments={"kl_in_reward": kl_in_reward})
    compatibility.check(compatibility.VERL_ADVANTAGE, asked)
    from verl.trainer.ppo.core_algos import register_adv_est

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
