# SPDX-License-Identifier: Apache-2.0
"""A perturbation and an advantage in verl's configuration: read, checked, and handed to the engine and to verl."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ngrpo.config.verl_lines import KL_IN_REWARD, MODE, check_advantage
from ngrpo.methods import advantages
from ngrpo.methods.advantages.base import Advantage
from ngrpo.rollout.settings import DEFERRED_PROBE, KEY
from perturbations import registry
from perturbations.base import Perturbation
from perturbations.errors import UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig

MANAGER = "ngrpo.trainers.verl.rollout_server.PerturbedAgentLoopManager"
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
    register_advantage(str(config.algorithm.adv_estimator), dict(advantage), kl_in_reward=in_reward)
    wrong = [f"{setting}: {reason}" for refused, setting, reason in _refused(config, perturbation) if refused]
    if wrong:
        raise UsageError(f"perturbation {perturbation.name!r} in verl does not work with " + "; nor with ".join(wrong))
    with open_dict(config):
        config.trainer.v1.trainer_mode = "sync"
        OmegaConf.update(config, _ADDITIONAL, {KEY: perturbation.spec(), DEFERRED_PROBE: True}, force_add=True)
        config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = MANAGER
    return perturbation, float(limit), strict


def _refused(config: DictConfig, perturbation: Perturbation) -> Iterator[tuple[bool, str, str]]:
    """What is refused: whether this configuration asks for it, the setting, and the reason with the fix."""
    from omegaconf import OmegaConf

    def value(key: str, default: object = None) -> Any:
        return OmegaConf.select(config, key, default=default)

    def off(key: str, reason: str) -> tuple[bool, str, str]:
        return bool(value(key)), f"{key}={value(key)}", reason

    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    yield not value("trainer.use_v1", True), "trainer.use_v1=False", "its batches carry no records; leave it out"
    name = value(f"{rollout}.name")
    yield name != "vllm", f"{rollout}.name={name}", "rollouts are perturbed inside vLLM"
    for role in ("actor", "ref"):
        key = f"actor_rollout_ref.{role}.strategy"
        yield value(key) not in ("fsdp", "fsdp2"), f"{key}={value(key)}", "only fsdp and fsdp2 replay"
        for engine in (f"actor_rollout_ref.{role}.fsdp_config", f"actor_rollout_ref.{role}"):
            yield off(f"{engine}.pad_to_length", "a packed batch must be its samples alone. Leave it out")
            split = value(f"{engine}.ulysses_sequence_parallel_size", 1)
            yield split > 1, f"{engine}.ulysses_sequence_parallel_size={split}", "it splits a sequence. Set it to 1"
    loop = value(f"{rollout}.agent.default_agent_loop", "single_turn_agent")
    yield loop != "single_turn_agent", f"agent.default_agent_loop={loop}", "records cover one turn"
    manager = value(f"{rollout}.agent.agent_loop_manager_class")
    yield bool(manager), f"agent.agent_loop_manager_class={manager}", "ours takes its place. Leave it out"
    yield off(f"{rollout}.multi_turn.enable", "records cover one turn. Leave it out")
    yield off(f"{rollout}.disaggregation.enabled", "one engine must feed prompt and answer. Leave it out")
    yield off(f"{actor}.use_prefix_grouper", "it shares prompts among samples. Leave it out")
    yield off("distillation.enabled", "the teacher's log-probabilities are not replayed. Leave it out")
    yield (off("algorithm.rollout_correction.bypass_mode", "the replay would not be measured. Leave it out"))
    critic = value("critic.enable")
    yield (
        bool(critic) or (critic is None and value("algorithm.adv_estimator") == "gae"),
        "a critic (algorithm.adv_estimator=gae)",
        "its values are not replayed. Use an estimator without one, such as grpo",
    )
    yield (
        perturbation.has_parameters,
        "parameters of its own",
        "verl would neither train nor send them. Use the variant without them, or OpenRLHF",
    )
    if not perturbation.has_density:
        return
    fix = f"Or set +{KEY}.density=token"
    yield off("actor_rollout_ref.model.use_fused_kernels", f"a density needs the logits. Leave it out. {fix}")
    correction = value("algorithm.rollout_correction.rollout_is")
    yield bool(correction), f"rollout_correction.rollout_is={correction}", f"its ratio is the token's. {fix}"
    yield (
        perturbation.score_only and bool(value(f"{actor}.use_kl_loss")),
        f"{actor}.use_kl_loss=True",
        f"the density counts in the policy loss alone, and verl's losses share one log-probability. {fix}",
    )
    yield (
        perturbation.score_only and value(f"{actor}.ppo_epochs", 1) > 1,
        f"{actor}.ppo_epochs={value(f'{actor}.ppo_epochs')}",
        f"its gradient is that of the first update. Set it to 1. {fix}",
    )


def register_advantage(name: str, options: dict[str, object], *, kl_in_reward: bool) -> None:
    """Enters an advantage of this project into verl's registry; verl's own estimators are there already.

    Args:
        name: ``algorithm.adv_estimator``.
        options: ``advantage.…``.
        kl_in_reward: ``algorithm.use_kl_in_reward``.

    Raises:
        UsageError: for bad options, options of an estimator of verl's, an advantage that needs more than the rewards of
            a group, or rewards that would contain a KL term.
    """
    if name not in advantages.available():
        if options:
            raise UsageError(f"advantage.{next(iter(options))}: algorithm.adv_estimator={name} has no such options.")
        return
    advantage = advantages.create(name, **options)
    check_advantage(advantage, f"algorithm.adv_estimator={name}")
    if kl_in_reward:
        raise UsageError(
            f"algorithm.use_kl_in_reward=True cannot be used with algorithm.adv_estimator={name}: {KL_IN_REWARD}."
            " Set it to False, and actor_rollout_ref.actor.use_kl_loss=True for a KL term in the loss."
        )
    from verl.trainer.ppo.core_algos import register_adv_est

    register_adv_est(name)(estimator(advantage))


def estimator(advantage: Advantage) -> Callable[..., tuple[Tensor, Tensor]]:
    """As verl calls it: token rewards and mask, (B, T) each, and the group of each row; returns (B, T) twice."""

    def compute(
        token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, **_: object
    ) -> tuple[Tensor, Tensor]:
        rewards, values = token_level_rewards.sum(dim=-1), torch.zeros(len(index))
        for group in dict.fromkeys(index):
            rows = torch.from_numpy(np.flatnonzero(index == group))
            if bool(response_mask[rows].any()):  # not verl's padding
                values[rows] = advantage.compute(rewards[rows][None])[0].to(values.dtype)
        full = values.to(rewards.device).unsqueeze(-1) * response_mask
        return full, full

    return compute
