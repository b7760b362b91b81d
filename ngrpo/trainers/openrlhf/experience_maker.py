# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's ``RemoteExperienceMaker``: rollouts become experiences with our advantages, measured and judged."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ngrpo.config.run import GROUP_BASELINES, current_run
from ngrpo.machine.upstream.rollout_sizes import prompts_drawn_at_once
from ngrpo.machine.upstream.types import Experience, Upstream
from ngrpo.methods.second_rounds.base import SecondRound
from ngrpo.trainers.common import mismatch, policy_loss, sample_records, staleness
from ngrpo.trainers.openrlhf import (
    fresh_rollouts,
    kept_groups,
    model_actors,
    rewards,
    rollout_actor,
    step_advantages,
    step_credits,
)
from ngrpo.trainers.openrlhf.kept_groups import KeptGroups
from perturbations.errors import require
from perturbations.replay.trajectory import FinishedTrajectory, UnperturbedResponse


def experience_maker(plain: type) -> type:
    """The subclass of `RemoteExperienceMaker`."""
    return type(plain.__name__, (MeasuringExperienceMaker, plain), {})


class MeasuringExperienceMaker(Upstream):
    """What goes in front of `RemoteExperienceMaker`; a run without a feature skips its line.

    Attributes:
        training_step: from 0, or from a checkpoint's.
        weight_version: of the trainer's weights: the number of weight syncs that it has made.
        step_measures: of the current step, which the trainer takes.
        prompt_memory: what an advantage keeps of prompts, COPO's counts or SPO's values; part of a checkpoint.
        rollout_divergence: of the latest step, for a policy noise; None if unknown.
        rollout_entropy: of the latest step, for a sampling schedule; None if unknown.
        gap_scale: the run's mismatch of unperturbed responses; None before the first step.
        kept_groups: the groups that the run keeps for its report; None before the first step.
        has_warned_of_clipped: whether the run has said that ``--reward.clip_range`` cuts advantages.
    """

    training_step = 0
    weight_version = 0
    step_measures: Mapping[str, float] = MappingProxyType({})
    prompt_memory: step_advantages.Visits | step_advantages.Values | None = None
    rollout_divergence: float | None = None
    rollout_entropy: float | None = None
    gap_scale: mismatch.GapScale | None = None
    kept_groups: KeptGroups | None = None
    has_warned_of_clipped = False

    def make_experience_batch(self, rollout_samples: list[Experience]) -> list[Experience]:
        run = current_run()
        rewards.refuse_untrained(rollout_samples)
        self.warn_of_cuts(rollout_samples)
        self.note(rewards.take_partial_metrics(rollout_samples))
        ages = None
        if run.has_weight_versions:
            ages = staleness.ages(fresh_rollouts.take_versions(rollout_samples), self.weight_version)
        # OpenRLHF's response lengths count what an agent's environment writes between two turns, too.
        self.note({"generated_tokens": float(sum(sample.action_mask.sum() for sample in rollout_samples))})
        experiences = super().make_experience_batch(rollout_samples)
        gaps = None
        if run.perturbation is not None or run.has_side_records:
            trajectories, log_probs = trajectories_and_log_probs(self, experiences)
            self.note(mismatch_measures(self, trajectories, log_probs))  # before the update
            if ages is not None:
                gaps = mismatch.gaps_of_samples(trajectories, log_probs)
        if ages is not None:
            self.note(staleness_measures(experiences, ages, gaps))
        if run.rollout_policy_differs:
            self.note(rollout_policy_measures(self, experiences))
        if run.second_round is not None:
            self.note(second_round_measures(experiences, run.second_round))
        if run.report_groups:
            kept_groups.keep(self, experiences, run)
        if run.sampling.correction_warmup is not None:
            # This comes last: the lines above need the rollout's own log-probabilities, which it replaces.
            self.note(ramp_up_correction(self, experiences, run.sampling.correction_warmup))
        return experiences

    def compute_advantages_and_returns(self, experiences: list[Experience]) -> list[Experience]:
        run = current_run()
        rewards.check_step(self.tokenizer, experiences)
        with step_advantages.noting_clipped() as clipped:
            if run.advantage is None and self.args.algo.advantage.estimator not in GROUP_BASELINES:
                experiences = super().compute_advantages_and_returns(experiences)
                step_advantages.level_equal(experiences)
            else:
                ours = step_advantages.compute(self, experiences, run.advantage)
                with step_advantages.replacing_estimates(ours.replacements()):
                    experiences = super().compute_advantages_and_returns(experiences)
                self.note(ours.measures)
        self.warn_of_clipped(clipped)
        if run.credit is not None:
            self.note(step_credits.share_among_tokens(self, experiences))
        return experiences

    def warn_of_cuts(self, samples: Sequence[Experience]) -> None:
        """Warns of prompts and of agents' messages that were cut in this step, and counts them in its measures."""
        longest = self.args.data.max_len
        longest_prompt = longest - (self.args.rollout.max_new_tokens or 1)
        step = f"ngrpo: warning: step {self.training_step + 1}"
        prompts = rewards.cut_prompts(self.tokenizer, samples, longest_prompt)
        if prompts:
            print(
                f"{step}: {prompts} prompts have more than {longest_prompt} tokens (--data.max_len less"
                " --rollout.max_new_tokens), and OpenRLHF left out their first tokens. Raise --data.max_len, or leave"
                " them out.",
                flush=True,
            )
            self.note({"cut_prompts": float(prompts)})
        turns = rewards.cut_turns(samples, longest)
        if turns:
            print(
                f"{step}: {turns} conversations ended with an agent's message that reached --data.max_len {longest}."
                " Raise --data.max_len, or let the agent write less.",
                flush=True,
            )
            self.note({"cut_turns": float(turns)})

    def warn_of_clipped(self, clipped: Sequence[Tensor]) -> None:
        """Counts what ``--reward.clip_range`` has cut in this step, a row (n,) a micro-batch; warns once in a run."""
        values = [value for row in clipped for value in row.tolist()]
        if not values:
            return
        self.note({"advantage/clipped": float(len(values))})
        if self.has_warned_of_clipped:
            return
        self.has_warned_of_clipped = True
        low, high = self.args.reward.clip_range
        farthest = max(values, key=abs)
        print(
            f"ngrpo: warning: step {self.training_step + 1}: {len(values)} advantages (with gae, rewards) lie beyond"
            f" --reward.clip_range {low:g} {high:g} and are cut to it, such as {farthest:g}, so that unequal"
            " rewards train alike. Scale the rewards down, or give a wider range. Later steps log advantage/clipped.",
            flush=True,
        )

    def note(self, measures: dict[str, float]) -> None:
        """Adds measures to those of the current step."""
        self.step_measures = {**self.step_measures, **measures}


# ---- the training–inference mismatch -------------------------------------------------------------------------------


def trajectories_and_log_probs(
    maker: MeasuringExperienceMaker, experiences: Sequence[Experience]
) -> tuple[list[FinishedTrajectory | None], list[np.ndarray]]:
    """Each sample's trajectory, and the trainer's log-probabilities of its tokens, as in :func:`log_probs_by_position`.

    Both are in the order of the micro-batches.
    """
    perturbation = current_run().perturbation
    token_log_probs = [experience.action_log_probs for experience in experiences]
    if perturbation is not None and perturbation.has_density:
        # The experiences have log-probabilities of actions; the mismatch is that of the tokens.
        token_log_probs = model_actors.kept_by_actors(maker, "token_log_probs", token_log_probs)
    trajectories: list[FinishedTrajectory | None] = []
    log_probs: list[np.ndarray] = []
    for experience, batch_log_probs in zip(experiences, token_log_probs):
        trajectories.extend(sample_records.unpack(experience.mm_train_inputs))
        log_probs.extend(log_probs_by_position(experience, batch_log_probs))
    return trajectories, log_probs


def mismatch_measures(
    maker: MeasuringExperienceMaker, trajectories: Sequence[FinishedTrajectory | None], log_probs: Sequence[np.ndarray]
) -> dict[str, float]:
    """Measures the training–inference mismatch before the update; raises ``MismatchTooLarge`` in a strict run.

    The samples are those of :func:`trajectories_and_log_probs`.
    """
    measures = mismatch.step_metrics(trajectories, log_probs, current_run().perturbation)
    if not maker.strategy.args.vllm.enable_prefix_caching:
        measures.pop("perturbation/prefix_hit_rate", None)
    if gap_scale(maker).is_needed:
        gap = control_gap(maker, trajectories)
        if gap is not None:
            measures["perturbation/gap_unperturbed_mean"] = gap
    judge(maker, measures)
    return measures


def staleness_measures(
    experiences: Sequence[Experience], ages: np.ndarray, gaps: Sequence[np.ndarray] | None
) -> dict[str, float]:
    """Measures how old the weights are that a step's tokens were drawn with, and the mismatch by their age.

    Args:
        experiences: the micro-batches of the step.
        ages: of the step's samples, in the order of the rollout, (N,).
        gaps: of each sample's trained tokens, in the order of the micro-batches; None in a run without records, which
            has them where OpenRLHF keeps the rollout's log-probabilities.
    """
    order: list[int] = []
    token_counts: list[int] = []
    openrlhf_gaps: list[np.ndarray] = []
    for experience in experiences:
        order.extend(experience.index)
        token_counts.extend(experience.action_mask.bool().sum(dim=-1).tolist())
        if experience.rollout_log_probs is not None:
            differences = (experience.action_log_probs - experience.rollout_log_probs).float().abs()
            compared = drawn_as_trained(experience)
            openrlhf_gaps.extend(row[mask].cpu().numpy() for row, mask in zip(differences, compared))
    if gaps is None and len(openrlhf_gaps) == len(order):
        gaps = openrlhf_gaps
    return staleness.measures(ages[order], np.array(token_counts), gaps)


def log_probs_by_position(experience: Experience, log_probs: Tensor) -> list[np.ndarray]:
    """log π (B, A) of a micro-batch as an array (T,) of each sample, by position; NaN at untrained tokens."""
    trained = log_probs.float().masked_fill(~experience.action_mask.cpu().bool(), float("nan"))
    # Entry t of the log-probabilities and of their mask is of token t + 1, so position 0 has none.
    padded = np.pad(trained.numpy(), ((0, 0), (1, 0)), constant_values=np.nan)
    lengths = experience.attention_mask.sum(dim=-1).tolist()
    return [row[:length] for row, length in zip(padded, lengths)]


def gap_scale(maker: MeasuringExperienceMaker) -> mismatch.GapScale:
    """The run's scale of mismatches; a resumed run measures its own."""
    if maker.gap_scale is None:
        args = maker.strategy.args
        rollout = args.rollout
        generate_batch_size = getattr(rollout, "vllm_generate_batch_size", None)
        drawn_at_once = prompts_drawn_at_once(rollout.batch_size, generate_batch_size)
        is_asynchronous = bool(getattr(args.train, "async_enable", False))
        maker.gap_scale = mismatch.GapScale(
            half_precision=args.ds.param_dtype != "fp32",
            drifts=is_asynchronous or drawn_at_once > rollout.batch_size,
            noisy=current_run().policy_noise is not None,
        )
    return maker.gap_scale


def control_gap(maker: MeasuringExperienceMaker, trajectories: Sequence[FinishedTrajectory | None]) -> float | None:
    """Mean |log π_trainer − log π_rollout| of the tokens of the step's unperturbed responses; None without a token."""
    import ray

    controls: list[UnperturbedResponse] = []
    for trajectory in trajectories:
        if trajectory is not None and trajectory.unperturbed is not None and len(trajectory.unperturbed.log_probs):
            controls.append(trajectory.unperturbed)
    controls = controls[: rollout_actor.CONTROLS]
    if not controls:
        return None
    columns = {
        "sequences": [torch.tensor(control.tokens, dtype=torch.int64) for control in controls],
        "action_mask": [torch.ones(len(control.log_probs), dtype=torch.int64) for control in controls],
        "attention_mask": [torch.ones(len(control.tokens), dtype=torch.int64) for control in controls],
    }
    # All responses end at the last column, where OpenRLHF looks for actions.
    batch = {name: pad_sequence(rows, batch_first=True, padding_side="left") for name, rows in columns.items()}
    experts = [control.experts for control in controls]
    group = maker.actor_model_group
    references = group.async_run_method(method_name="unperturbed_log_probs", **batch, experts=experts)
    log_probs = ray.get(references)[0].float().numpy()
    gaps = []
    for row, control in zip(log_probs, controls):
        log_probs_of_response = row[len(row) - len(control.log_probs) :]
        gaps.append(np.abs(log_probs_of_response - control.log_probs))
    return float(np.concatenate(gaps).mean())


def judge(maker: MeasuringExperienceMaker, measures: Mapping[str, float]) -> None:
    """Warns of mismatches that are too large; raises ``MismatchTooLarge`` in a strict run.

    Not under a sampling schedule: its rollouts are drawn at other temperatures than the trainer's.
    """
    run = current_run()
    if run.sampling_schedule is None:
        mismatch.check_gap(measures, run.gap_limit, strict=run.strict)
        gap_scale(maker).check(measures, run.gap_limit, strict=run.strict)


# ---- the rollout policy --------------------------------------------------------------------------------------------


def rollout_policy_measures(maker: MeasuringExperienceMaker, experiences: Sequence[Experience]) -> dict[str, float]:
    """Measures the rollout policy; empty without the rollouts' log-probabilities of responses to the trained prompts.

    The mean of −log π_rollout over all drawn tokens estimates its entropy at the rollout's temperatures without bias.
    """
    args = maker.strategy.args
    maker.rollout_divergence = None
    maker.rollout_entropy = None
    rollout_rows: list[Tensor] = []
    trainer_rows: list[Tensor] = []
    for experience in experiences:
        if experience.rollout_log_probs is None:
            return {}
        compared = drawn_as_trained(experience)
        rollout_rows.append(experience.rollout_log_probs[compared])
        trainer_rows.append(experience.action_log_probs[compared])
    rollout_log_probs = torch.cat(rollout_rows).float().cpu()  # (N,)
    trainer_log_probs = torch.cat(trainer_rows).float().cpu()
    if not len(rollout_log_probs):
        return {}
    maker.rollout_entropy = -rollout_log_probs.mean().item()
    measures = {}
    if current_run().sampling_schedule is not None:
        measures["sampling/entropy"] = maker.rollout_entropy

    advantage = args.algo.advantage
    if advantage.is_correction_level == "off":
        return measures
    log_ratio = trainer_log_probs - rollout_log_probs
    bounds = None
    is_by_token = advantage.is_correction_level == "token" and advantage.is_correction_gating == "ratio"
    if args.actor.policy_loss_type == "ppo" and is_by_token:  # GSPO's loss has no such weights
        low, high = advantage.is_correction_threshold
        bounds = (float(low), float(high))
    measures |= mismatch.importance_measures(log_ratio, bounds, clip=advantage.is_correction_mode == "clip")
    maker.rollout_divergence = measures["importance/divergence"]
    return measures


def drawn_as_trained(experience: Experience) -> Tensor:
    """The trained tokens that were drawn given the prompt that they are trained with, (B, A) bool.

    A second round's responses to another prompt are not: their log-probabilities differ by the prompt.
    """
    rounds_by_response = sample_records.two_rounds(experience.mm_train_inputs, len(experience.action_mask))
    _, is_second = policy_loss.second_round_log_probs(experience.action_mask, rounds_by_response)
    return experience.action_mask.bool() & ~is_second


def ramp_up_correction(
    maker: MeasuringExperienceMaker, experiences: Sequence[Experience], steps: int
) -> dict[str, float]:
    """``--sampling.correction_warmup``: in step t, from 0, importance weights are 1 + min(1, t / steps) (w − 1)."""
    strength = min(1.0, maker.training_step / steps)
    if strength < 1.0:
        low, high = maker.strategy.args.algo.advantage.is_correction_threshold
        for experience in experiences:
            experience.rollout_log_probs = mismatch.with_strength(
                experience.action_log_probs,
                require(experience.rollout_log_probs, "rollout_log_probs"),
                strength,
                (float(low), float(high)),
            )
    return {"importance/strength": strength}


# ---- the second round ----------------------------------------------------------------------------------------------


def second_round_measures(experiences: Sequence[Experience], method: SecondRound) -> dict[str, float]:
    """The metrics ``second_round/…`` of a step (docs/metrics.md), before the update.

    ``asked``: the share of samples whose prompt had a second round. ``trained``: the share of samples that come from
    one. ``right``: the share of right responses among those of the second rounds. ``solved``: the share of prompts with
    a second round that got a right response in it. ``ratio``: the mean of ρ over the trained tokens that come from a
    second round; refinements have no such ratio. For them, ``drafts`` is the mean reward of the first round's
    responses, and ``best_draft`` that of each prompt's best one.
    """
    rounds_by_response: list[sample_records.TwoRounds | None] = []
    log_ratios: list[Tensor] = []
    for experience in experiences:
        rounds_of_batch = sample_records.two_rounds(experience.mm_train_inputs, len(experience.action_mask))
        rounds_by_response.extend(rounds_of_batch)
        behavior_log_probs, is_second = policy_loss.second_round_log_probs(experience.action_mask, rounds_of_batch)
        log_probs = experience.action_log_probs.float()
        log_ratio = log_probs - behavior_log_probs.to(log_probs.device)
        log_ratios.append(log_ratio[is_second].cpu())
    with_second_round = [rounds for rounds in rounds_by_response if rounds is not None]
    from_second_round = with_second_round
    if not method.refines:
        from_second_round = [rounds for rounds in with_second_round if rounds.log_probs is not None]
    measures = {
        "asked": len(with_second_round) / len(rounds_by_response),
        "trained": len(from_second_round) / len(rounds_by_response),
    }
    if with_second_round:
        # A mean over samples is one over prompts, since all prompts have as many samples.
        all_rewards = np.stack([rounds.rewards for rounds in with_second_round])
        # Refinements are as many as drafts.
        second_count = all_rewards.shape[1] // 2 if method.refines else method.prompts * method.answers
        right = (all_rewards[:, -second_count:] > method.wrong).sum(-1)
        measures["right"] = float(right.mean()) / second_count
        measures["solved"] = float((right > 0).mean())
        if method.refines:
            drafts = all_rewards[:, :-second_count]
            measures["drafts"] = float(drafts.mean())
            measures["best_draft"] = float(drafts.max(-1).mean())
    if from_second_round and not method.refines:
        measures["ratio"] = torch.cat(log_ratios).clamp(-20.0, 20.0).exp().mean().item()
    return {f"second_round/{name}": value for name, value in measures.items()}
