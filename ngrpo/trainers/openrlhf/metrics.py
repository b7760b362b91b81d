# SPDX-License-Identifier: Apache-2.0
"""What each training step reports of its perturbation, so that a broken replay is seen on the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ngrpo.config.run import current_run
from ngrpo.trainers.openrlhf import unperturbed
from ngrpo.trainers.openrlhf.gap import GapScale, check_gap
from ngrpo.trainers.openrlhf.importance import importance_measures, rollout_entropy
from ngrpo.trainers.openrlhf.rewards import refuse_non_finite
from ngrpo.trainers.openrlhf.side_inputs import unpack
from perturbations.base import Perturbation
from perturbations.replay.trajectory import FinishedTrajectory
from perturbations.step import Positions

if TYPE_CHECKING:
    from openrlhf.trainer.ppo_utils.experience import Experience

    from ngrpo.trainers.openrlhf.objects import ExperienceMaker

_MEANS = ("shift", "left_anchor")
# Measures that travel as a sum and a count per sample.
QUOTIENTS = {f"perturbation/{name}": (f"perturbation/{name}_sum", f"perturbation/{name}_count") for name in _MEANS}


def step_metrics(
    records: Sequence[FinishedTrajectory | None],
    log_probs: Sequence[np.ndarray],
    perturbation: Perturbation | None = None,
) -> dict[str, float]:
    """Summarises a batch of trajectories before the update.

    Args:
        records: one per sample; samples without one are left out.
        log_probs: log π of the trainer by position of the token, (T,) each, NaN where no token is trained on. What a
            record has beyond these T positions was cut off, and is not counted.
        perturbation: of the rollouts, for the planned rate.

    Returns:
        ``rate``: perturbed positions per generated token. ``planned_rate``: positions per generated token that the
        gate's draw and schedule select; what looks at logits or tokens (``until``, entropy, ``protect``) and what the
        request's sampling excludes can make ``rate`` smaller, never larger. ``anchor_agreement``: share of perturbed
        positions whose token is the ordinarily sampled one. ``gap_perturbed_*``: |log π_trainer − log π_rollout| of
        tokens predicted right after a perturbed input; ``gap_plain_*``: of all others; ``gap_before_*``: of those
        that no perturbed input of their answer comes before, which a wrong replay leaves as they are.
        ``record_bytes_per_token``: serialised size. ``dropped_edits``: see `turns.py`, where there were any.
        ``prefix_hit_rate``: share of the prompts' tokens that the engines found in their prefix caches.
        A value that has no token to speak of is left out.
    """
    generated = planned = perturbed = agreed = size = dropped = prompted = cached = 0
    after, elsewhere, before = [], [], []
    for trajectory, trainer in zip(records, log_probs):
        if trajectory is None:
            continue
        dropped += trajectory.dropped
        prompted += trajectory.prompted
        cached += trajectory.cached
        record, rollout = trajectory.record.truncate(len(trainer)), trajectory.log_probs[: len(trainer)]
        tokens = np.flatnonzero(~np.isnan(rollout) & ~np.isnan(trainer[: len(rollout)]))
        gap = np.abs(trainer[tokens] - rollout[tokens])
        follows = np.isin(tokens - 1, record.positions)
        after.append(gap[follows])
        elsewhere.append(gap[~follows])
        before.append(gap if not len(record) else gap[tokens <= record.positions[0]])
        generated += len(tokens)
        if perturbation is not None:
            at = Positions(np.full(len(tokens), record.seed, np.int64), _turn_starts(rollout)[tokens], tokens)
            planned += int(perturbation.selects(at).sum())
        counted = np.isin(record.positions, tokens)
        perturbed += int(counted.sum())
        agreed += int(record.agreed[counted].sum())
        size += len(record.to_bytes())
    if not generated:
        return {}
    metrics = {"rate": perturbed / generated, "record_bytes_per_token": size / generated}
    if perturbation is not None:
        metrics["planned_rate"] = planned / generated
    if prompted:
        metrics["prefix_hit_rate"] = cached / prompted
    if dropped:
        metrics["dropped_edits"] = float(dropped)
    if perturbed:
        metrics["anchor_agreement"] = agreed / perturbed
    for name, parts in (("gap_perturbed", after), ("gap_plain", elsewhere), ("gap_before", before)):
        gap = np.concatenate(parts)
        if len(gap):
            metrics[f"{name}_mean"], metrics[f"{name}_max"] = float(gap.mean()), float(gap.max())
    return {f"perturbation/{name}": value for name, value in metrics.items()}


def _turn_starts(log_probs: np.ndarray) -> np.ndarray:
    """For each generated token the position at which its turn began, (T,) int64; in a conversation tools speak too.

    Args:
        log_probs: of the rollout by position, (T,), NaN where no token was generated.
    """
    generated = ~np.isnan(log_probs)
    starts = generated & ~np.concatenate([[False], generated[:-1]])
    return np.maximum.accumulate(np.where(starts, np.arange(len(log_probs)), 0))


def measured_experience(original: Callable[..., Any]) -> Callable[..., Any]:
    """`RemoteExperienceMaker.make_experience_batch`: measures right after the actor's forward."""

    def make_experience_batch(self: ExperienceMaker, rollout_samples: list[Experience]) -> Any:
        experiences = original(self, rollout_samples)
        refuse_non_finite(self.tokenizer, experiences)
        records, log_probs = [], []
        for experience, of_tokens in zip(experiences, _token_log_probs(self, experiences)):
            records.extend(unpack(experience.mm_train_inputs))
            # Entry t of the log-probabilities and of their mask is of token t + 1.
            trained = of_tokens.float().masked_fill(~experience.action_mask.cpu().bool(), float("nan"))
            padded = np.pad(trained.numpy(), ((0, 0), (1, 0)), constant_values=np.nan)
            lengths = experience.attention_mask.sum(dim=-1).tolist()
            log_probs.extend(row[:length] for row, length in zip(padded, lengths))
        measures = step_metrics(records, log_probs, current_run().perturbation)
        if not self.strategy.args.vllm.enable_prefix_caching:
            measures.pop("perturbation/prefix_hit_rate", None)
        measures |= _unperturbed_gap(self, records)
        judge_gaps(self, measures)
        measures |= importance_measures(experiences, self.strategy.args)
        note_measures(self, measures)
        return experiences

    return make_experience_batch


def judge_gaps(maker: ExperienceMaker, measures: Mapping[str, float]) -> None:
    """Warns of the step's gaps where they are too large, or raises.

    Not under a sampling schedule: its rollouts are drawn at other temperatures than the trainer's, so that a gap says
    nothing of the replay.

    Args:
        maker: OpenRLHF's experience maker.
        measures: of the step, with ``gap_unperturbed_mean`` where it was measured.

    Raises:
        ReplayGap: where a gap is too large and the run is strict.
    """
    run = current_run()
    if run.sampling_schedule is not None:
        return
    check_gap(measures, run.gap_limit, strict=run.strict)
    gap_scale(maker).check(measures, run.gap_limit, strict=run.strict)


def gap_scale(maker: ExperienceMaker) -> GapScale:
    """The run's scale of gaps, kept with OpenRLHF's experience maker; a resumed run measures its own."""
    if not hasattr(maker, "gap_scale"):
        args, rollout = maker.strategy.args, maker.strategy.args.rollout
        batch = getattr(rollout, "vllm_generate_batch_size", None) or rollout.batch_size
        older = bool(getattr(args.train, "async_enable", False)) or batch > rollout.batch_size
        noisy = current_run().policy_noise is not None
        maker.gap_scale = GapScale(args.ds.param_dtype != "fp32", older, noisy)
    return maker.gap_scale


def _unperturbed_gap(maker: ExperienceMaker, records: Sequence[FinishedTrajectory | None]) -> dict[str, float]:
    """The gap of the step's unperturbed answers, where it is wanted and there are any."""
    if not gap_scale(maker).is_needed:
        return {}
    gap = unperturbed.gap_of(
        maker, [trajectory.unperturbed for trajectory in records if trajectory is not None and trajectory.unperturbed]
    )
    return {} if gap is None else {"perturbation/gap_unperturbed_mean": gap}


def measured_rollout_policy(original: Callable[..., Any]) -> Callable[..., Any]:
    """`RemoteExperienceMaker.make_experience_batch`: the policy that rolled out, beside the trainer's.

    The experience maker keeps ``rollout_divergence``, which a policy noise may follow, and ``rollout_entropy``, which a
    sampling schedule may; None where the rollouts' log-probabilities are not asked for.
    """

    def make_experience_batch(self: ExperienceMaker, rollout_samples: list[Experience]) -> Any:
        experiences = original(self, rollout_samples)
        measures = importance_measures(experiences, self.strategy.args)
        self.rollout_divergence = measures.get("importance/divergence")
        self.rollout_entropy = rollout_entropy(experiences)
        entropy = self.rollout_entropy
        if current_run().sampling_schedule is not None and entropy is not None:
            measures["sampling/entropy"] = entropy
        note_measures(self, measures)
        return experiences

    return make_experience_batch


def _token_log_probs(maker: ExperienceMaker, experiences: Sequence[Experience]) -> list[Any]:
    """log π of the tokens in each batch; where a perturbation has a density, the actor kept them beside it."""
    own = [experience.action_log_probs for experience in experiences]
    perturbation = current_run().perturbation
    if perturbation is None or not perturbation.has_density:
        return own
    return kept_by_actors(maker, "token_log_probs", own)


def kept_by_actors(maker: ExperienceMaker, method: str, own: Sequence[Any]) -> list[Any]:
    """What the actors kept beside the log-probabilities that they returned.

    Args:
        maker: OpenRLHF's experience maker.
        method: of our actors; it hands over what was kept of each batch.
        own: the log-probabilities of each batch, (B, A), as they were returned.

    Returns:
        One for each batch, of the same shape.
    """
    import ray

    args = maker.strategy.args
    copies = args.ds.ring_attn_size * args.ds.tensor_parallel_size  # actors that were given the same batches
    by_actor = ray.get(maker.actor_model_group.async_run_method(method_name=method)[::copies])
    batches = [batch for of_actor in by_actor for batch in of_actor]
    if [part.shape for part in batches] != [part.shape for part in own]:
        raise RuntimeError(
            f"{method}: the actors kept {len(batches)} batches, {len(own)} were made: their order is not that of"
            " OpenRLHF 0.11.2's async_run_method_batch."
        )
    return batches


def note_measures(maker: ExperienceMaker, measures: dict[str, float]) -> None:
    """Keeps measures of the step at hand with OpenRLHF's experience maker, for :func:`reporting_trainer`."""
    maker.step_measures = {**getattr(maker, "step_measures", {}), **measures}


def reporting_trainer(plain: type) -> type:
    """`PPOTrainer` and `TrainingActor`: the measures join each step's status, and so the log and TensorBoard.

    A subclass, since ``@ray.remote`` copies inherited methods into the class it decorates: a method replaced in
    ``BasePPOTrainer`` would not be called.
    """

    class ReportingTrainer(plain):  # type: ignore[misc, valid-type]
        def train_step(self, rollout_samples: list[Experience], global_step: int) -> Any:
            self.experience_maker.training_step = global_step  # from 0, and from a checkpoint's where one is resumed
            status, global_step = plain.train_step(self, rollout_samples, global_step)
            add_measures(status, self.experience_maker.step_measures)
            self.experience_maker.step_measures = {}
            if current_run().perturbation is not None:
                status.update(neighbor_drift(self.vllm_engines))
            return status, global_step

    return ReportingTrainer


def add_measures(status: dict[str, Any], measures: dict[str, float]) -> None:
    """Adds a step's measures to OpenRLHF's status, and turns the sums of the replay into means."""
    status.update(measures)
    for mean, (total, count) in QUOTIENTS.items():
        total, count = status.pop(total, 0.0), status.pop(count, 0.0)
        if count:
            status[mean] = total / count


def neighbor_drift(engines: Sequence[Any] | None) -> dict[str, float]:
    """Shares of neighbor sets that the step's weight sync changed, over all engines' anchors.

    Args:
        engines: handles of the rollout actors.

    Returns:
        ``perturbation/neighbors_changed`` and ``…_since_start``; empty for perturbations without neighbors.
    """
    import ray

    from perturbations.neighbors import Drift

    counts = ray.get([engine.perturbation_drift.remote() for engine in engines or ()])
    drifts = [Drift(*each) for each in counts if each is not None]
    total = sum(drifts, Drift(0, 0, 0, 0))
    return {f"perturbation/{name}": share for name, share in total.shares().items()}
