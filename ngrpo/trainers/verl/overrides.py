# SPDX-License-Identifier: Apache-2.0
"""A perturbation and an advantage in verl's configuration: read, checked, and handed to the engine and to verl."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ngrpo.config import compatibility
from ngrpo.config.feature_kinds import Combination
from ngrpo.config.verl_lines import MODE
from ngrpo.machine.upstream.types import DictConfig
from ngrpo.methods import advantages
from ngrpo.methods.advantages.base import Advantage, AnnealedK
from ngrpo.rollout.settings import DEFERRED_CHECK, KEY, ROUTED_EXPERTS, SAMPLING_MASKS, SAMPLING_SCHEDULE, SEEDED_DRAWS
from perturbations import Perturbation, UsageError, registry

MANAGER = "ngrpo.trainers.verl.rollout_server.PerturbedAgentLoopManager"
_ADDITIONAL = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config"
_GAP_LIMIT = 10.0


class Settings(NamedTuple):
    """What ``config.perturbation`` has.

    Attributes:
        perturbation: of the rollouts.
        gap_limit: how many times the gap at plain positions the gap after perturbed inputs may be.
        strict: whether a wider gap is an error.
        correct_mask: whether log-probabilities are over the tokens that top-p and top-k left.
    """

    perturbation: Perturbation
    gap_limit: float
    strict: bool
    correct_mask: bool


def prepare(config: DictConfig) -> Settings:
    """Reads ``config.perturbation``, and enters its parts into verl's configuration, in-place.

    These are the engine's ``additional_config`` and its weights, the agent loop manager, and the mode, verl's
    synchronous one.

    Raises ``UsageError`` for a bad perturbation, or a setting under which a rollout would not be replayed.
    """
    from omegaconf import OmegaConf, open_dict

    options = OmegaConf.to_container(OmegaConf.create(config.get(KEY) or {}), resolve=True)
    if not isinstance(options, dict) or not isinstance(options.get("name"), str):
        raise UsageError(f"trainer.v1.trainer_mode={MODE} needs a perturbation: +{KEY}.name=neighbor, for example.")
    limit = options.pop("gap_limit", _GAP_LIMIT)
    switches = {name: options.pop(name, False) for name in ("strict", "correct_mask")}
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit >= 1.0:
        raise UsageError(f"{KEY}.gap_limit={limit!r}: a number of at least 1 is needed; the default is 10.")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UsageError(f"{KEY}.{name}={value!r}: true or false is needed.")
    correct_mask = switches["correct_mask"]
    perturbation = registry.create(**options)
    advantage = OmegaConf.to_container(OmegaConf.create(config.get("advantage") or {}), resolve=True)
    register_advantage(
        str(config.algorithm.adv_estimator),
        dict(advantage),
        kl_in_reward=bool(config.algorithm.use_kl_in_reward),
    )
    combination = Combination(
        parts={"perturbation": perturbation}, settings=config, arguments={"correct_mask": correct_mask}
    )
    compatibility.check(compatibility.VERL, combination)
    engine_config = {
        KEY: perturbation.spec(),
        # Without a perturbation too, records are taken, and each token is drawn as the other arms draw theirs.
        SEEDED_DRAWS: True,
        DEFERRED_CHECK: True,
        SAMPLING_MASKS: correct_mask,
    }
    given = OmegaConf.select(config, _ADDITIONAL) or {}
    for name in (*engine_config, SAMPLING_SCHEDULE, ROUTED_EXPERTS):
        if name in given:
            raise UsageError(
                f"{_ADDITIONAL}.{name}={given[name]}: this trainer sets the engine's entries from +{KEY}, and has no"
                " sampling schedules and no routing replay. Leave the entry out."
            )
    with open_dict(config):
        config.trainer.v1.trainer_mode = "sync"
        OmegaConf.update(config, _ADDITIONAL, engine_config, force_add=True)
        rollout = config.actor_rollout_ref.rollout
        rollout.agent.agent_loop_manager_class = MANAGER
        if rollout.load_format == "dummy":  # verl's default: random weights, which no start-up check can pass
            rollout.load_format = "auto"
    return Settings(perturbation, float(limit), switches["strict"], correct_mask)


def register_advantage(name: str, options: dict[str, object], *, kl_in_reward: bool) -> None:
    """Enters this project's advantage ``name`` into verl's registry; verl's own estimators stay.

    Raises ``UsageError`` for bad options, or an advantage that verl cannot use.
    """
    if name not in advantages.available():
        if options:
            raise UsageError(f"advantage.{next(iter(options))}: algorithm.adv_estimator={name} has no such options.")
        return
    advantage = advantages.create(name, **options)
    combination = Combination(parts={"advantage": advantage}, arguments={"kl_in_reward": kl_in_reward})
    compatibility.check(compatibility.VERL_ADVANTAGE, combination)
    from verl.trainer.ppo.core_algos import register_adv_est

    register_adv_est(name)(estimator(advantage))


def estimator(advantage: Advantage) -> Callable[..., tuple[Tensor, Tensor]]:
    """For verl: from token rewards and mask, (B, T) each, and the group of each row to advantages, (B, T), twice."""

    def compute(
        token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, **_: object
    ) -> tuple[Tensor, Tensor]:
        rewards = token_level_rewards.sum(dim=-1)
        values = torch.zeros(len(index))
        # verl's padding, and responses of which nothing is trained, are no part of their groups.
        trained = response_mask.bool().any(dim=-1).cpu().numpy()
        for group in dict.fromkeys(index[trained]):
            rows = torch.from_numpy(np.flatnonzero((index == group) & trained))
            if isinstance(advantage, AnnealedK) and len(rows) < advantage.k:
                continue  # an advantage of k responses says nothing about a group of fewer: its advantages stay 0
            values[rows] = advantage.compute(rewards[rows][None])[0].to(values.dtype)
        full = values.to(rewards.device).unsqueeze(-1) * response_mask
        return full, full

    return compute
