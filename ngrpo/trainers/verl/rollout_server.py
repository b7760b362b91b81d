# SPDX-License-Identifier: Apache-2.0
"""verl's agent loops and vLLM server: a request names its trajectory, and its response carries the replay record."""

import dataclasses
import uuid
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from ngrpo.machine.upstream.types import Upstream
from ngrpo.rollout.records import confirm, cut_to_response
from ngrpo.rollout.settings import KEY, fingerprint
from ngrpo.trainers.common.sample_records import PickUps
from ngrpo.trainers.common.weights_file import reload_weights
from ngrpo.trainers.verl.replaying_engine import of_each_sample
from perturbations import FinishedTrajectory, UsageError, registry, seeds

SINGLE_TURN = "single_turn_agent"
_COPY = "perturbation_copy"
"""The field of a batch with the number of each row among equal rows, which have draws of their own."""


def request_arguments(
    config: DictConfig, trajectory: Mapping[str, object], agent_name: str, session: int, copy: int
) -> dict[str, object]:
    """A request's arguments; its seed follows from step, sample, copy and number in the group.

    ``copy``: the number of the row among equal rows of the step, from 0.

    Raises ``UsageError`` for an agent loop other than verl's of a single turn.
    """
    if agent_name != SINGLE_TURN:
        raise UsageError(f"agent_name={agent_name!r}: records cover one turn, so only {SINGLE_TURN} is supported.")
    spec = OmegaConf.to_container(config.actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config[KEY])
    validates = bool(trajectory["validate"])
    names = [str(trajectory["step"]), str(trajectory["sample_index"]), str(validates), str(copy)]
    return {
        "enabled": bool(registry.create(**spec).perturb_eval or not validates),
        "seed": seeds.trajectory_seed(*names),
        "sample": session,
    }


def perturbed_worker(upstream: type) -> type:
    """The subclass of `AgentLoopWorkerTQ`, whose class behind ``@ray.remote`` is pickled by value, and this one too."""
    return type(upstream.__name__, (PerturbedAgentLoopWorker, upstream), {})


class PerturbedAgentLoopWorker(Upstream):
    """What goes in front of `AgentLoopWorkerTQ`: requests with our arguments."""

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, object],
        trajectory: dict[str, object],
        *,
        agent_name: str,
        perturbation_copy: Tensor,
        **rest: object,
    ) -> object:
        """As verl's; ``perturbation_copy`` is the row's entry of the field :data:`_COPY`."""
        session = int(str(rest.get("session_id", 0)))
        arguments = request_arguments(self.config, trajectory, agent_name, session, int(perturbation_copy))
        # A new dictionary, since verl gives all of a group the same one.
        params = {**sampling_params, "extra_args": {KEY: arguments}}
        return await super()._run_agent_loop(params, trajectory, agent_name=agent_name, **rest)


class PerturbedAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager, which starts our workers and tells equal rows of a step apart."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        upstream = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__
        self.agent_loop_workers_class = ray.remote(perturbed_worker(upstream))
        self._copies = seeds.RoundCounts()  # of each row in a step

    def generate_sequences(self, prompts: TensorDict) -> None:
        """As verl's, with the number of each row among equal rows of the step."""
        step = int(tu.get(prompts, "global_steps"))
        validates = bool(tu.get(prompts, "validate", False))
        numbers = []
        for index, messages in zip(of_each_sample(prompts, "index"), of_each_sample(prompts, "raw_prompt")):
            numbers.append(self._copies.next(f"{validates} {index} {messages}", step))
        prompts[_COPY] = torch.tensor(numbers)
        super().generate_sequences(prompts)


class PerturbedHttpServer(vLLMHttpServer):
    """A server with engine arguments that may name a perturbation; without one it is verl's own."""

    _pick_ups: PickUps | None = None

    async def run_server(self, args: Namespace) -> None:
        """Starts the engine; raises unless every worker has the perturbation and the start-up check passes."""
        await super().run_server(args)
        spec = (args.additional_config or {}).get(KEY)
        if spec is None:
            return
        await confirm(self.engine, fingerprint(registry.create(**spec), None))
        await self.engine.collective_rpc("perturbation_check")
        self._pick_ups = PickUps(self.engine)

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, *args: object, **kwargs: object
    ) -> TokenOutput:
        """As verl's, with the record in ``extra_fields``; RuntimeError for an aborted response."""
        if self._pick_ups is None:
            return await super().generate(prompt_ids, sampling_params, request_id, *args, **kwargs)
        # With rollout.full_determinism=True verl gives all requests one id, by which records could not be told apart.
        request_id = f"{request_id}-{uuid.uuid4().hex}"
        extra_args = sampling_params.get("extra_args") or {}
        arguments = dict(extra_args.get(KEY) or {})
        # Rows of a dataset need not be numbered, so the prompt itself is in the seed.
        arguments["seed"] = seeds.of_prompt_and_number(prompt_ids, arguments.get("seed", 0))
        params = {**sampling_params, "extra_args": {**extra_args, KEY: arguments}}
        output = await super().generate(prompt_ids, params, request_id, *args, **kwargs)
        if output.stop_reason == "aborted":
            await self.engine.collective_rpc("perturbation_drop", args=([request_id],))
            raise RuntimeError(f"request {request_id} was aborted: a part of a perturbed response is not trained on.")
        trajectory = FinishedTrajectory.unpack(await self._pick_ups.take(request_id))
        if arguments.get("enabled", True):
            trajectory = cut_to_response(trajectory, len(output.token_ids))
            by_position = np.full(trajectory.record.num_tokens, np.nan, dtype=np.float32)
            by_position[trajectory.record.prompt_tokens :] = trajectory.log_probs
            output.extra_fields[KEY] = dataclasses.replace(trajectory, log_probs=by_position).pack()
        return output

    def _get_worker_extension_cls(self) -> str:
        return f"{__name__}.{PerturbedWorkerExtension.__name__}"


class PerturbedReplica(vLLMReplica):
    """verl's replica, which starts our server."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(PerturbedHttpServer)


class PerturbedWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension of vLLM's workers, which refreshes the perturbation after a weight sync."""

    def update_weights_from_ipc(self, *args: object, **kwargs: object) -> None:
        if self.device.type != "cpu":
            super().update_weights_from_ipc(*args, **kwargs)
            attached = getattr(self, "perturbation", None)
            if attached is not None:
                attached.weights_changed()
            return
        # On a CPU `reload_weights` below refreshes the perturbation itself.
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        received: list[tuple[str, Tensor]] = []

        def keep(weights: list[tuple[str, Tensor]], is_last: bool) -> None:
            # Copies, since the next weights come in the same bucket.
            received.extend((name, tensor.clone()) for name, tensor in weights)

        BucketedWeightReceiver(self._get_zmq_handle(), self.device, use_shm=True).receive_weights(keep)
        reload_weights(self.model_runner, received)
