# SPDX-License-Identifier: Apache-2.0
"""verl's agent loops, whose requests say which trajectory they are and whether it is perturbed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import ray
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from ngrpo.rollout.settings import KEY
from perturbations import registry, seeds
from perturbations.errors import UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig

SINGLE_TURN = "single_turn_agent"


def request_arguments(
    config: DictConfig, trajectory: Mapping[str, object], agent_name: str, session: int
) -> dict[str, object]:
    """What a request says to the engine: a trajectory's draws follow from step, sample and its number in the group.

    Raises:
        UsageError: for another agent loop than verl's of a single turn.
    """
    if agent_name != SINGLE_TURN:
        raise UsageError(f"agent_name={agent_name!r}: records cover one turn, so only {SINGLE_TURN} is supported.")
    spec = OmegaConf.to_container(config.actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config[KEY])
    return {
        "enabled": bool(registry.create(**spec).perturb_eval or not trajectory["validate"]),
        "seed": seeds.trajectory_seed(
            str(trajectory["step"]), str(trajectory["sample_index"]), str(bool(trajectory["validate"]))
        ),
        "sample": session,
    }


def perturbed(plain: type) -> type:
    """`AgentLoopWorkerTQ` with these arguments.

    A class without a name to be found under, as verl's own behind its ``@ray.remote``: so Ray pickles both by value.
    """

    class PerturbedAgentLoopWorker(plain):  # type: ignore[misc]
        async def _run_agent_loop(
            self,
            sampling_params: dict[str, object],
            trajectory: dict[str, object],
            *,
            agent_name: str,
            **rest: object,
        ) -> object:
            arguments = request_arguments(self.config, trajectory, agent_name, int(str(rest.get("session_id", 0))))
            params = {**sampling_params, "extra_args": {KEY: arguments}}  # verl gives all of a group one dictionary
            return await plain._run_agent_loop(self, params, trajectory, agent_name=agent_name, **rest)

    return PerturbedAgentLoopWorker


class PerturbedAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager, which starts our workers."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        plain = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__
        self.agent_loop_workers_class = ray.remote(perturbed(plain))
