# SPDX-License-Identifier: Apache-2.0
"""verl's synchronous trainer with perturbed rollouts: trainer mode ``perturbed``."""

import logging

import numpy as np
import ray
import transfer_queue as tq
from datasets import Dataset
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import RolloutReplicaRegistry

from ngrpo import patches
from ngrpo.machine.upstream import patch_check
from ngrpo.machine.upstream.types import Upstream
from ngrpo.rollout.settings import KEY
from ngrpo.trainers.common.mismatch import check_gap, step_metrics
from ngrpo.trainers.verl import overrides, replaying_engine, rollout_server
from perturbations.base import Perturbation
from perturbations.errors import UsageError

logger = logging.getLogger(__name__)

_REPLAYED = f"actor/{KEY}/replayed"
"""verl's name for the engine's metric of replayed positions, a mean over micro-batches."""
_SHIFT = f"actor/{KEY}/shift_sum"
"""verl's name for the engine's metric of their summed shifts."""
_OF_TOKENS = ("training/rollout_probs_diff_", "training/rollout_actor_probs_", "rollout_corr/")
"""verl's metrics that compare old log-probabilities with the rollout's, which of a density are no comparison."""
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
        patch_check.check(patches.active(["verl"]))
        self._settings = overrides.prepare(config)
        RolloutReplicaRegistry.register("vllm", lambda: rollout_server.PerturbedReplica)
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role, worker in self.role_worker_mapping.items():
            if worker.__ray_metadata__.modified_class.__ray_actor_class__ is ActorRolloutRefWorker:
                self.role_worker_mapping[role] = ray.remote(replaying_engine.PerturbedWorker)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        for files, dataset in (("train_files", self.train_dataset), ("val_files", self.val_dataset)):
            check_agents(getattr(dataset, "dataframe", None), files)

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
        self._leave_out_comparisons(metrics)
        metrics[f"{KEY}/lost_responses"] = float(self._lost_responses(batch))
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        batch = super()._compute_advantage(batch, metrics)
        self._leave_out_comparisons(metrics)
        return batch

    def _leave_out_comparisons(self, metrics: dict[str, float]) -> None:
        """With a density, takes out what verl computed of densities and of the rollout's token log-probabilities."""
        if self._settings.perturbation.has_density:
            for name in [name for name in metrics if name.startswith(_OF_TOKENS)]:
                del metrics[name]

    def _lost_responses(self, batch: KVBatchMeta) -> int:
        """How many of the step's responses verl left out after an error, of which it logs a line only."""
        config = self.config
        expected = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        lost = expected - sum(not tag.get("is_padding", False) for tag in batch.tags)
        if lost > 0:
            logger.warning(
                "%d of %d responses of this step are lost; the agent loop's log has the errors.", lost, expected
            )
        return max(lost, 0)

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


def check_agents(rows: Dataset | None, files: str) -> None:
    """Raises ``UsageError`` for a dataset whose column ``agent_name`` names another loop than verl's of one turn.

    ``rows``: None for a dataset of the user's own class. ``files``: verl's setting for them, such as ``train_files``.
    """
    if rows is None or "agent_name" not in rows.column_names:
        return
    others = sorted(set(rows["agent_name"]) - {None, rollout_server.SINGLE_TURN})
    if others:
        raise UsageError(
            f"data.{files}: the column agent_name has {others[0]!r}, and records cover one turn. Drop the column, or"
            f" write {rollout_server.SINGLE_TURN} into it."
        )


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
