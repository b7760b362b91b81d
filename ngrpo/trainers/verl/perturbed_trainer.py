# SPDX-License-Identifier: Apache-2.0
"""verl's synchronous trainer with perturbed rollouts: trainer mode ``perturbed``."""

import numpy as np
import ray
import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import RolloutReplicaRegistry

from ngrpo import patches
from ngrpo.machine.upstream.types import Upstream
from ngrpo.rollout.settings import KEY
from ngrpo.trainers.common.mismatch import check_gap, step_metrics
from ngrpo.trainers.verl import overrides, replaying_engine, rollout_server
from perturbations.base import Perturbation

_REPLAYED = f"actor/{KEY}/replayed"
"""verl's name for the engine's metric of replayed positions, a mean over micro-batches."""
_SHIFT = f"actor/{KEY}/shift_sum"
"""verl's name for the engine's metric of their summed shifts."""
_NOT_REPLAYED = (
    "did not replay: verl chose another engine than ngrpo's, which is registered for fsdp and fsdp2 on NVIDIA GPUs and"
    " on CPUs. Leave out VERL_ENGINE_DEVICE and VERL_ENGINE_VENDOR."
)


def perturbed(upstream: type) -> type:
    """The subclass of verl's ``PPOTrainerSync``."""
    return type(upstream.__name__, (PerturbedTrainer, upstream), {})


class PerturbedTrainer(Upstream):
    """What goes in front of verl's ``PPOTrainerSync``."""

    def __init__(self, config: DictConfig) -> None:
        patches.check(patches.active(["verl"]))
        self._settings = overrides.prepare(config)
        RolloutReplicaRegistry.register("vllm", lambda: rollout_server.PerturbedReplica)
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role, worker in self.role_worker_mapping.items():
            if worker.__ray_metadata__.modified_class.__ray_actor_class__ is ActorRolloutRefWorker:
                self.role_worker_mapping[role] = ray.remote(replaying_engine.PerturbedWorker)

    def _tell_workers(self, batch: KVBatchMeta) -> None:
        """Puts into a batch what its workers replay."""
        batch.extra_info[KEY] = self._settings.perturbation.spec()
        batch.extra_info[replaying_engine.CORRECT_MASK] = self._settings.correct_mask

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        self._tell_workers(batch)
        batch = super()._compute_old_log_prob(batch, metrics)
        measures = measured(batch, self._settings.perturbation)
        check_gap(measures, self._settings.gap_limit, strict=self._settings.strict)
        metrics.update(measures)
        return batch

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        self._tell_workers(batch)
        return super()._compute_ref_log_prob(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        self._tell_workers(batch)
        batch = super()._update_actor(batch, metrics)
        if _REPLAYED not in metrics:
            raise RuntimeError(f"The training step {_NOT_REPLAYED}")
        # Means over micro-batches; their quotient is a mean over positions.
        count = metrics.pop(_REPLAYED)
        shift = metrics.pop(_SHIFT)
        if count:
            metrics[f"{KEY}/shift"] = shift / count
        return batch


def measured(batch: KVBatchMeta, perturbation: Perturbation) -> dict[str, float]:
    """The step's metrics ``perturbation/…`` before the update.

    Raises ``RuntimeError`` if the old log-probabilities were not replayed, or a sample has no record.
    """
    fields = ["extra_fields", "uid", "prompts", "responses", "response_mask", replaying_engine.TOKEN_LOG_PROBS]
    try:
        data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=fields)
        replayed = data[replaying_engine.TOKEN_LOG_PROBS].unbind()
    except (KeyError, ValueError) as error:
        raise RuntimeError(f"The old log-probabilities {_NOT_REPLAYED}") from error
    trajectories = replaying_engine.trajectories(data)
    response_masks = tu.get(data, "response_mask").unbind()
    log_probs = []
    for key, trajectory, of_sequence, mask in zip(batch.keys, trajectories, replayed, response_masks):
        if trajectory is not None and not bool(mask.any()):
            raise RuntimeError(f"sample {key} has no token to train on: its response_mask is 0 throughout.")
        # Entry t of a sequence's log-probabilities is of token t + 1.
        by_position = np.concatenate([[np.nan], of_sequence.float().numpy()[:-1]])
        is_trained = np.zeros(len(by_position), dtype=bool)
        is_trained[len(is_trained) - len(mask) :] = mask.numpy().astype(bool)
        log_probs.append(np.where(is_trained, by_position, np.nan))
    return step_metrics(trajectories, log_probs, perturbation)
