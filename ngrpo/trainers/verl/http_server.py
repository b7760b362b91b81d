# SPDX-License-Identifier: Apache-2.0
"""verl's vLLM server with a perturbed engine: each answer comes with its record; weight syncs refresh the engine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from torch import Tensor
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from ngrpo.rollout import settings
from ngrpo.rollout.async_scheduling import cut_to_answer
from ngrpo.rollout.records import confirm
from ngrpo.trainers.common.engine_records import PickUps
from ngrpo.trainers.common.weights_file import repack_tied_heads
from perturbations import registry, seeds
from perturbations.replay.trajectory import FinishedTrajectory

if TYPE_CHECKING:
    from argparse import Namespace


class PerturbedHttpServer(vLLMHttpServer):
    """A server whose engine arguments may name a perturbation; one without them is verl's own."""

    _pick_ups: PickUps | None = None

    async def run_server(self, args: Namespace) -> None:
        """Starts the engine; every worker confirms the perturbation and proves its overrides before it is asked.

        Raises:
            RuntimeError: where a worker runs unperturbed.
        """
        await super().run_server(args)
        spec = (args.additional_config or {}).get(settings.KEY)
        if spec is None:
            return
        await confirm(self.engine, settings.fingerprint(registry.create(**spec), None))
        await self.engine.collective_rpc("perturbation_probe")
        self._pick_ups = PickUps(self.engine)

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, *args: object, **kwargs: object
    ) -> TokenOutput:
        """As verl's; the record is in ``extra_fields`` of an answer that was to be perturbed.

        Raises:
            RuntimeError: for an answer that was aborted: what was fed is known up to an unknown token.
        """
        if self._pick_ups is None:
            return await super().generate(prompt_ids, sampling_params, request_id, *args, **kwargs)
        own_arguments = dict((sampling_params.get("extra_args") or {}).get(settings.KEY) or {})
        # Rows of a dataset need not be numbered, so that the prompt itself is in the seed.
        own_arguments["seed"] = seeds.of_row_and_prompt(prompt_ids, own_arguments.get("seed", 0))
        arguments = {**(sampling_params.get("extra_args") or {}), settings.KEY: own_arguments}
        output = await super().generate(
            prompt_ids, {**sampling_params, "extra_args": arguments}, request_id, *args, **kwargs
        )
        if output.stop_reason == "aborted":
            await self.engine.collective_rpc("perturbation_drop", args=([request_id],))
            raise RuntimeError(f"request {request_id} was aborted: a part of a perturbed answer is not trained on.")
        trajectory = FinishedTrajectory.unpack(await self._pick_ups.take(request_id))
        if own_arguments.get("enabled", True):
            trajectory = cut_to_answer(trajectory, len(output.token_ids))
            of_tokens = np.full(trajectory.record.num_tokens, np.nan, dtype=np.float32)
            of_tokens[trajectory.record.prompt_tokens :] = trajectory.log_probs
            output.extra_fields[settings.KEY] = dataclasses.replace(trajectory, log_probs=of_tokens).pack()
        return output

    def _get_worker_extension_cls(self) -> str:
        return f"{__name__}.{PerturbedWorkerExtension.__name__}"


class PerturbedReplica(vLLMReplica):
    """verl's replica, which starts our server."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(PerturbedHttpServer)


class PerturbedWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension of vLLM's workers; a weight sync ends with what the perturbation needs of the new weights."""

    def update_weights_from_ipc(self, *args: object, **kwargs: object) -> None:
        if self.device.type == "cpu":
            self._reload_weights()
            return  # reloading refreshes the perturbation by itself
        super().update_weights_from_ipc(*args, **kwargs)
        attached = getattr(self, "perturbation", None)
        if attached is not None:
            attached.weights_changed()

    def _reload_weights(self) -> None:
        """On a CPU vLLM repacks linear weights after loading, which only ``reload_weights`` does again (vLLM 0.29)."""
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        received: list[tuple[str, Tensor]] = []

        def keep(weights: list[tuple[str, Tensor]], is_last: bool) -> None:
            received.extend((name, tensor.clone()) for name, tensor in weights)  # the bucket is used again

        BucketedWeightReceiver(self._get_zmq_handle(), self.device, use_shm=True).receive_weights(keep)
        self.model_runner.reload_weights(weights_iterator=iter(received))
        repack_tied_heads(self.model_runner.get_model())
