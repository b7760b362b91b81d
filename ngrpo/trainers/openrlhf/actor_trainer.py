# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's ``ActorPPOTrainer``: the training step, and the weight sync to the engines.

OpenRLHF's loss is changed in two places. ``log_probs_from_logits`` gives the old, new and reference log-probabilities,
which densities and sampling masks override. ``actor_loss_fn`` is the policy loss alone, which others wrap.
"""

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from types import MappingProxyType
from typing import Any

import torch

from ngrpo.config.run import RunConfig, current_run
from ngrpo.machine.models import lora
from ngrpo.machine.upstream.types import Experience
from ngrpo.trainers.common import log_probs, sample_records, weights_file
from ngrpo.trainers.common.policy_loss import CreditInLoss, DensityScoreLoss, RatioMeasure, TwoRoundsLoss
from ngrpo.trainers.common.score_centering import ImportanceWeight, Sampler, ScoreCentering, WeightedLoss
from ngrpo.trainers.openrlhf import lora_sync, model_actors
from ngrpo.trainers.openrlhf.experiences import marks_of
from ngrpo.trainers.openrlhf.short_steps import WholeBatches
from perturbations import UsageError
from perturbations.replay.scope import ReplayStats

_LOOK_UP = 32
"""Inputs of a step whose nearest token is looked up: over 20 steps the share is then known to 0.02."""

MEAN_METRICS = {
    f"perturbation/{name}": (f"perturbation/{name}_sum", f"perturbation/{name}_count")
    for name in ("shift", "left_anchor")
}
"""Metrics that are means over positions, each with the names of the sum and the count that travel per sample."""


def actor_trainer(plain: type) -> type:
    """The subclass of `ActorPPOTrainer`."""
    return type(plain.__name__, (PerturbedActorTrainer, plain), {})


class PerturbedActorTrainer(WholeBatches):
    """What goes in front of `ActorPPOTrainer`; a run without a feature skips its line.

    Attributes:
        policy_noise: of the next weight sync; set by the trainer.
        gradient_norms: the norms of a rollout's updates, by the actor's number of updates so far.
    """

    policy_noise = model_actors.SyncNoise(step=0, sigma=0.0)
    gradient_norms: Mapping[int, float] = MappingProxyType({})

    def ppo_train(self, *args: object, **kwargs: object) -> Any:
        updates_before = self.actor.model.global_steps
        self.seed_orders(updates_before)
        self.gradient_norms = {}
        left_out = self.leave_out_remainder()
        status = super().ppo_train(*args, **kwargs) if self.replay_buffer.items else {}
        steps = float(self.actor.model.global_steps - updates_before)
        # Micro-batches before the first update still have the norm of the last rollout's update.
        norms = [norm for update, norm in self.gradient_norms.items() if update > updates_before]
        # Each optimizer step takes --train.batch_size responses, and an epoch takes each of them once.
        responses = steps * self.args.train.batch_size / self.args.train.max_epochs
        if self.args.train.dynamic_batch_enable:  # upstream leaves out what fills no batch
            left_out = self.buffered_responses() - responses
        return {
            **status,
            "optimizer_steps": steps,
            "zero_gradients": float(norms.count(0.0)),
            "trained_responses": responses,
            "trained_groups": responses / self.args.rollout.n_samples_per_prompt,
            "left_out_responses": float(left_out),
        }

    def training_step(self, experience: Experience, kl_ctl: float, step: int, *args: object) -> dict[str, Any]:
        run = current_run()
        side_inputs = experience.mm_train_inputs
        upstream_loss = self.actor_loss_fn
        loss = upstream_loss
        centering = None
        credit = None
        ratio = None
        if run.sampling.score_centering:
            centering = ScoreCentering(
                upstream_loss,
                sampler_of(run, self.actor.temperature, upstream_loss),
                action_mask=experience.action_mask,
                attention_mask=experience.attention_mask,
            )
            loss = centering
        with ExitStack() as stack:  # the backward runs inside, so that a checkpointed forward replays again
            if run.credit is not None and run.credit.acts_in_loss:
                credit = CreditInLoss(
                    run.credit,
                    loss,
                    advantages=experience.advantages,
                    action_mask=experience.action_mask,
                    attention_mask=experience.attention_mask,
                    marks=marks_of(experience),
                )
                loss = credit
                failed = f"--credit {run.credit.name} did not come into effect"
                stack.enter_context(log_probs.override_log_probs(credit.look, failed, fix="Take that path out."))
            if run.second_round is not None and not run.second_round.refines:
                rounds_by_response = sample_records.two_rounds(side_inputs, len(experience.action_mask))
                loss = TwoRoundsLoss(run.second_round, loss, rounds_by_response, experience.action_mask)
            stats, action_densities = stack.enter_context(
                model_actors.replayed(
                    self.actor,
                    side_inputs,
                    experience.attention_mask,
                    experience.advantages,
                    # A pass over the vocabulary is worth its time once per step, not in every micro-batch.
                    look_up=_LOOK_UP if step == 0 else 0,
                    centering=centering,
                )
            )
            if run.perturbation is not None:
                if action_densities is not None:
                    loss = DensityScoreLoss(loss, action_densities)
                ratio = RatioMeasure(loss)  # outermost, so that the ratio is measured without the density's score
                loss = ratio
            self.actor_loss_fn = loss
            try:
                result = super().training_step(experience, kl_ctl, step, *args)
            finally:
                self.actor_loss_fn = upstream_loss
        metrics = result["metrics"]
        weights = result["weights"]
        if "actor_grad_norm" in metrics:
            updates = self.actor.model.global_steps
            self.gradient_norms = {**self.gradient_norms, updates: metrics["actor_grad_norm"]}
        if centering is not None:
            metrics["score_centering/removed"] = centering.removed
            weights["score_centering/removed"] = "token"
        if credit is not None:
            metrics["credit/in_loss"] = credit.share
            weights["credit/in_loss"] = "token"
        if ratio is not None:
            metrics["perturbation/ratio_mean"] = ratio.mean
            weights["perturbation/ratio_mean"] = "token"
        if stats is not None:
            sums = replay_sums(stats, len(experience.sequences))
            metrics |= sums
            weights |= dict.fromkeys(sums, "sample")
        return result

    def _init_vllm_sync_group(self, backend: str) -> None:
        if not syncs_by_file():
            super()._init_vllm_sync_group(backend)
        elif backend == "nccl":
            raise UsageError("--vllm.sync_backend nccl needs CUDA; the CPU profile uses gloo.")

    def broadcast_to_vllm(self) -> None:
        run = current_run()
        noise = nullcontext()
        if run.policy_noise is not None and self.policy_noise.sigma:
            # Parameters have noise while they are sent, and lose it again to the bit: every engine and every
            # tensor-parallel rank gets the same ones.
            parameters = lora.base_parameters(model_actors.model_of(self.actor))
            noise = run.policy_noise.added(parameters, self.policy_noise.sigma, self.policy_noise.step)
        with noise:
            if syncs_by_file():
                self.hand_over_weights()
            elif lora.has_adapters(self.actor.model.module):
                lora_sync.send_merged_weights(self)
            else:
                super().broadcast_to_vllm()

    def hand_over_weights(self) -> None:
        """A weight sync without NCCL: every rank takes part, rank 0 writes a file and calls the engines."""
        import ray

        is_rank_zero = torch.distributed.get_rank() == 0
        weights = gathered(self, keep=is_rank_zero)
        if is_rank_zero:
            if self.strategy.args.vllm.enable_prefix_caching:
                ray.get([engine.reset_prefix_cache.remote() for engine in self.vllm_engines])
            with weights_file.written(weights) as path:
                ray.get([engine.load_weights_file.remote(path) for engine in self.vllm_engines])
        torch.distributed.barrier()


def sampler_of(run: RunConfig, temperature: float, policy_loss: WeightedLoss) -> Sampler:
    """How the run draws tokens; ``policy_loss`` is OpenRLHF's, which has the importance weights."""
    return Sampler(
        temperature=temperature,
        perturbation=run.perturbation,
        schedule=run.sampling_schedule,
        corrects_mask=run.sampling.correct_mask,
        weight=ImportanceWeight.of(policy_loss),
    )


def syncs_by_file() -> bool:
    """Whether weights go to the engines through a file: there is no NCCL without CUDA."""
    return current_run().hardware == "cpu"


def replay_sums(stats: ReplayStats, batch: int) -> dict[str, torch.Tensor]:
    """The sums and counts of :data:`MEAN_METRICS` per sample, which OpenRLHF averages over samples.

    The quotient of two such averages is a mean over positions.
    """
    sums = {
        "perturbation/shift_sum": stats.shift_sum(),
        "perturbation/shift_count": stats.count(),
        "perturbation/left_anchor_sum": int(sum(stats.left_anchor)),
        "perturbation/left_anchor_count": int(sum(stats.looked_at)),
    }
    return {name: torch.tensor(value / batch) for name, value in sums.items()}


def gathered(trainer: Any, keep: bool) -> dict[str, torch.Tensor]:
    """The actor's weights as engines have them, on the rank with ``keep``; empty on other ranks, which gather too."""
    settings = trainer.strategy.args.ds
    is_split = settings.zero_stage == 3 or settings.tensor_parallel_size > 1
    # Of a multimodal model OpenRLHF 0.11.2 sends the trainable parameters alone (`broadcast_to_vllm`).
    only_changed = getattr(trainer.actor, "is_vlm", False)
    model = trainer.actor.model.module
    tensors: dict[str, torch.Tensor] = {}
    for weight in lora.changed_weights(model) if only_changed else lora.engine_weights(model):
        with lora_sync.gathered_together(trainer, weight):
            if keep:
                tensor = weight.merged()
                # A gathered parameter is split again at the end of this context, so it is copied.
                tensors[weight.name] = tensor.clone() if is_split else tensor.contiguous()
    return tensors
