# SPDX-License-Identifier: Apache-2.0
"""verl's agent loops, whose requests say which trajectory they are and whether it is perturbed."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from ngrpo.rollout.settings import KEY
from perturbations import registry
from perturbations.errors import UsageError
from perturbations.streams import trajectory_seed

SINGLE_TURN = "single_turn_agent"
# The class behind verl's ``@ray.remote``.
_Plain: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__


class PerturbedAgentLoopWorker(_Plain):
    """A trajectory's draws follow from the step, the sample in the dataset and its number in the group."""

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, agent_name: str, **kwargs: Any
    ) -> Any:
        if agent_name != SINGLE_TURN:
            raise UsageError(f"agent_name={agent_name!r}: records cover one turn, so only {SINGLE_TURN} is supported.")
        perturbation = registry.create(
            **self.config.actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config[KEY]
        )
        asked = {
            "enabled": bool(perturbation.perturb_eval or not trajectory["validate"]),
            "seed": trajectory_seed(trajectory["step"], str(trajectory["sample_index"]), int(trajectory["validate"])),
            "sample": int(kwargs.get("session_id", 0)),
        }
        params = {**sampling_params, "extra_args": {KEY: asked}}  # verl gives all of a group one dictionary
        return await super()._run_agent_loop(params, trajectory, agent_name=agent_name, **kwargs)


class PerturbedAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager, which starts our workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(PerturbedAgentLoopWorker)
