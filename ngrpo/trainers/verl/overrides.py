# SPDX-License-Identifier: Apache-2.0
"""A perturbation in verl's configuration: read, checked against what is not replayed, and handed to the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ngrpo.config import compatibility
from ngrpo.config.features import Combination
from ngrpo.config.verl_lines import MODE
from ngrpo.rollout.settings import DEFERRED_PROBE, KEY
from ngrpo.trainers.verl import advantage_estimators
from perturbations import registry
from perturbations.base import Perturbation
from perturbations.errors import UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig

MANAGER = "ngrpo.trainers.verl.agent_loops.PerturbedAgentLoopManager"
_ADDITIONAL = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config"
_GAP_LIMIT = 10.0


def prepare(config: DictConfig) -> tuple[Perturbation, float, bool]:
    """Reads ``config.perturbation`` and enters what verl's processes are to find in its configuration.

    Args:
        config: verl's, an ``omegaconf.DictConfig``, changed in place: the engine's ``additional_config``, the agent
            loop manager, and the trainer's mode, which for all else of verl is the synchronous one.

    Returns:
        The perturbation, the gap limit, and whether a wider gap is an error.

    Raises:
        UsageError: for a bad perturbation, or a setting under which a rollout would not be replayed.
    """
    from omegaconf import OmegaConf, open_dict

    options = OmegaConf.to_container(OmegaConf.create(config.get(KEY) or {}), resolve=True)
    if not isinstance(options, dict) or "name" not in options:
        raise UsageError(f"trainer.v1.trainer_mode={MODE} needs a perturbation: +{KEY}.name=neighbor, for example.")
    limit, strict = options.pop("gap_limit", _GAP_LIMIT), options.pop("strict", False)
    if not isinstance(limit, (int, float)) or not limit >= 1.0:
        raise UsageError(f"{KEY}.gap_limit={limit!r}: a number of at least 1 is needed; the default is 10.")
    if not isinstance(strict, bool):
        raise UsageError(f"{KEY}.strict={strict!r}: true or false is needed.")
    perturbation = registry.create(**options)
    advantage = OmegaConf.to_container(OmegaConf.create(config.get("advantage") or {}), resolve=True)
    in_reward = bool(config.algorithm.use_kl_in_reward)
    advantage_estimators.register(str(config.algorithm.adv_estimator), dict(advantage), kl_in_reward=in_reward)
    compatibility.check(compatibility.VERL, Combination(parts={"perturbation": perturbation}, settings=config))
    with open_dict(config):
        config.trainer.v1.trainer_mode = "sync"
        OmegaConf.update(config, _ADDITIONAL, {KEY: perturbation.spec(), DEFERRED_PROBE: True}, force_add=True)
        config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = MANAGER
    return perturbation, float(limit), strict
