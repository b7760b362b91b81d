# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's ``RemoteExperienceMaker``: rollouts become experiences with our advantages, measured and judged."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ngrpo.config.run import GROUP_BASELINES, current_run
from ngrpo.machine.upstream.types import Experience
from ngrpo.methods.second_rounds.base import SecondRound
from ngrpo.trainers.common import mismatch, policy_loss, sample_records
from ngrpo.trainers.openrlhf import model_actors, rewards, rollout_actor, step_advantages
from ngrpo.trainers.openrlhf.kept_groups import KeptGroups, keep
from perturbations.errors import require
from perturbations.replay.trajectory import FinishedTrajectory

_CUT = {
    "cut_prompts": "{cut} prompts have more than {longest} tokens (--data.max_len less --rollout.max_new_tokens), and"
    " OpenRLHF left out their first tokens. Raise --data.max_len, or leave them out.",
    "cut_turns": "{cut} conversations ended with an agent's message that reached --data.max_len {longest}. Raise"
    " --data.max_len, or let the agent write less.",
}


def experience_maker(plain: Any) -> type:
    """A subclass of `RemoteExperienceMaker`; a run without a feature skips its line."""

    class MeasuringExperienceMaker(plain):
        """
        Attributes:
            training_step: from 0, or from a checkpoint's.
            step_measures: of the current step, which the trainer takes.
            visits: what an advantage keeps of prompts, COPO's counts or SPO's values; part of a checkpoint.
            rollout_divergence: of the latest step, for a policy noise; None if unknown.
            rollout_entropy: of the latest step, for a sampling schedule; None if unknown.
        """

        training_step = 0
        step_measures: Mapping[str, float] = MappingProxyType({})
        visits: step_advantages.Visits | step_advantages.Values | None = None
        rollout_divergence: float | None = None
        rollout_entropy: float | None = None
        gap_scale: mismatch.GapScale | None = None
        kept_groups: KeptGroups | None = None

        def make_experience_batch(self, rollout_samples: list[Experience]) -> list[Experience]:
            run = current_run()
            rewards.refuse_untrained(rollout_samples)
            whole = self.args.data.max_len
            room = whole - (self.args.rollout.max_new_tokens or 1)
            counted = {
                "cut_prompts": (rewards.cut_prompts(self.tokenizer, rollout_samples, room), room),
                "cut_turns": (rewards.cut_turns(rollout_samples, whole), whole),
            }
            for name, (cut, longest) in counted.items():
                if cut:
                    message = _CUT[name].format(cut=cut, longest=longest)
                    print(f"ngrpo: warning: step {self.training_step + 1}: {message}", flush=True)
                    self.note({name: float(cut)})
            experiences = super().make_experience_batch(rollout_samples)
            if run.perturbation is not None or run.has_side_records:
                self.note(replay_measures(self, experiences))  # before the update
            if run.changes_rollout_policy:
                self.note(rollout_policy_measures(self, experiences))
            if run.second_round is not None:
                self.note(second_round_measures(experiences, run.second_round))
            if run.report_groups:
                keep(self, experiences, run)
            if run.sampling.correction_warmup is not None:  # last: all others need the rollout's own log-probabilities
                self.note(ramp_up_correction(self, experiences, run.sampling.correction_warmup))
            return experiences

        def compute_advantages_and_returns(self, experiences: list[Experience]) -> list[Experience]:
            run = current_run()
            rewards.check_step(self.tokenizer, experiences)
            if run.advantage is None and self.args.algo.advantage.estimator not in GROUP_BASELINES:
                experiences = super().compute_advantages_and_returns(experiences)
                step_advantages.level_equal(experiences)
            else:
                with_ours = step_advantages.StepAdvantages(self, experiences, run.advantage)
                experiences = with_ours.through(super().compute_advantages_and_returns)
                self.note(with_ours.measures)
            if run.credit is not None:
                self.note(step_advantages.share_among_tokens(self, experiences))
            return experiences

        def note(self, measures: dict[str, float]) -> None:
            """Keeps measures of the current step."""
            self.step_measures = {**self.step_measures, **measures}

    return MeasuringExperienceMaker


def replay_measures(maker: Any, experiences: Sequence[Experience]) -> dict[str, float]:
    """Measures the training–inference mismatch before the update; ``ReplayGap`` if it is too large in a strict run."""
    perturbation, records, log_probs = current_run().perturbation, [], []
    own = [experience.action_log_probs for experience in experiences]
    if perturbation is not None and perturbation.has_density:
        own = model_actors.kept_by_actors(maker, "token_log_probs", own)
    for experience, of_tokens in zip(experiences, own):
        records.extend(sample_records.unpack(experience.mm_train_inputs))
        # Entry t of the log-probabilities and of their mask is of token t + 1.
        trained = of_tokens.float().masked_fill(~experience.action_mask.cpu().bool(), float("nan"))
        padded = np.pad(trained.numpy(), ((0, 0), (1, 0)), constant_values=np.nan)
        lengths = experience.attention_mask.sum(dim=-1).tolist()
        log_probs.extend(row[:length] for row, length in zip(padded, lengths))
    measures = mismatch.step_metrics(records, log_probs, perturbation)
    if not maker.strategy.args.vllm.enable_prefix_caching:
        measures.pop("perturbation/prefix_hit_rate", None)
    if gap_scale(maker).is_needed and (gap := control_gap(maker, records)) is not None:
        measures["perturbation/gap_unperturbed_mean"] = gap
    judge(maker, measures)
    return measures


def gap_scale(maker: Any) -> mismatch.GapScale:
    """The run's scale of gaps; a resumed run measures its own."""
    if maker.gap_scale is None:
        args, rollout = maker.strategy.args, maker.strategy.args.rollout
        batch = getattr(rollout, "vllm_generate_batch_size", None) or rollout.batch_size
        older = bool(getattr(args.train, "async_enable", False)) or batch > rollout.batch_size
        noisy = current_run().policy_noise is not None
        maker.gap_scale = mismatch.GapScale(args.ds.param_dtype != "fp32", older, noisy=noisy)
    return maker.gap_scale


def control_gap(maker: Any, records: Sequence[FinishedTrajectory | None]) -> float | None:
    """Mean |log π_trainer − log π_rollout| of the tokens of the step's unperturbed responses; None without a token."""
    import ray

    controls = [each.unperturbed for each in records if each is not None and each.unperturbed is not None]
    controls = [each for each in controls if len(each.log_probs)][: rollout_actor.CONTROLS]
    if not controls:
        return None
    rows = {
        "sequences": [torch.tensor(each.tokens, dtype=torch.int64) for each in controls],
        "action_mask": [torch.ones(len(each.log_probs), dtype=torch.int64) for each in controls],
        "attention_mask": [torch.ones(len(each.tokens), dtype=torch.int64) for each in controls],
    }
    # All responses end at the last column, where OpenRLHF looks for actions.
    batch = {name: pad_sequence(parts, batch_first=True, padding_side="left") for name, parts in rows.items()}
    experts = [each.experts for each in controls]
    given = maker.actor_model_group.async_run_method(method_name="unperturbed_log_probs", **batch, experts=experts)
    log_probs = ray.get(given)[0].float().numpy()
    gaps = [np.abs(row[len(row) - len(each.log_probs) :] - each.log_probs) for row, each in zip(log_probs, controls)]
    return float(np.concatenate(gaps).mean())


def judge(maker: Any, measures: Mapping[str, float]) -> None:
    """Warns of gaps that are too large; raises ``ReplayGap`` in a strict run.

    Not under a sampling schedule: its rollouts are drawn at other temperatures than the trainer's.
    """
    run = current_run()
    if run.sampling_schedule is None:
        mismatch.check_gap(measures, run.gap_limit, strict=run.strict)
        gap_scale(maker).check(measures, run.gap_limit, strict=run.strict)


def rollout_policy_measures(maker: Any, experiences: Sequence[Experience]) -> dict[str, float]:
    """Measures the rollout policy; empty without the rollouts' log-probabilities.

    The mean of −log π_rollout over all drawn tokens estimates its entropy at the rollout's temperatures without bias.
    """
    args = maker.strategy.args
    maker.rollout_divergence = maker.rollout_entropy = None
    pairs = [(e, e.rollout_log_probs) for e in experiences if e.rollout_log_probs is not None]
    if len(pairs) < len(experiences):
        return {}
    maker.rollout_entropy = -torch.cat([part[e.action_mask.bool()].float().cpu() for e, part in pairs]).mean().item()
    measures = {"sampling/entropy": maker.rollout_entropy} if current_run().sampling_schedule is not None else {}
    advantage = args.algo.advantage
    if advantage.is_correction_level == "off":
        return measures
    log_ratio = torch.cat([(e.action_log_probs - part)[e.action_mask.bool()].float().cpu() for e, part in pairs])
    bounds = None
    by_token = advantage.is_correction_level == "token" and advantage.is_correction_gating == "ratio"
    if args.actor.policy_loss_type == "ppo" and by_token:  # GSPO's loss has no such weights
        low, high = advantage.is_correction_threshold
        bounds = float(low), float(high)
    measures |= mismatch.importance_measures(log_ratio, bounds, clip=advantage.is_correction_mode == "clip")
    maker.rollout_divergence = measures["importance/divergence"]
    return measures


def ramp_up_correction(maker: Any, experiences: Sequence[Experience], steps: int) -> dict[str, float]:
    """``--sampling.correction_warmup``: in step t, from 0, importance weights are 1 + min(1, t / steps) (w − 1)."""
    strength = min(1.0, maker.training_step / steps)
    if strength < 1.0:
        low, high = (float(bound) for bound in maker.strategy.args.algo.advantage.is_correction_threshold)
        for experience in experiences:
            rollout = require(experience.rollout_log_probs, "rollout_log_probs")
            weighted = mismatch.with_strength(experience.action_log_probs, rollout, strength, (low, high))
            experience.rollout_log_probs = weighted
    return {"importance/strength": strength}


def second_round_measures(experiences: Sequence[Experience], method: SecondRound) -> dict[str, float]:
    """The metrics ``second_round/…`` of a step (docs/metrics.md), before the update.

    ``asked`` and ``trained``: shares of samples to prompts with a second round, and from that round. ``right``: share
    of right responses in that round; ``solved``: of its prompts with one; ``ratio``: mean ρ over trained tokens.
    Refinements have no ratio of their own; ``drafts``, ``best_draft``: mean rewards of the first round's responses, and
    of the best ones.
    """
    carried, ratios = [], []
    for experience in experiences:
        of_batch = sample_records.two_rounds(experience.mm_train_inputs, len(experience.action_mask))
        carried.extend(of_batch)
        log_probs, second = policy_loss.behavior(experience.action_mask, of_batch)
        trainer = experience.action_log_probs.float()
        ratios.append((trainer - log_probs.to(trainer.device))[second].cpu())
    with_second = [each for each in carried if each is not None]
    moved = with_second if method.refines else [each for each in with_second if each.log_probs is not None]
    measures = {"asked": len(with_second) / len(carried), "trained": len(moved) / len(carried)}
    if with_second:
        # Samples count for prompts, which all have as many.
        of_both = np.stack([each.rewards for each in with_second])
        later = of_both.shape[1] // 2 if method.refines else method.prompts * method.answers
        right = (of_both[:, -later:] > method.wrong).sum(-1)
        measures |= {"right": float(right.mean()) / later, "solved": float((right > 0).mean())}
        if method.refines:
            drafts = of_both[:, :-later]
            measures |= {"drafts": float(drafts.mean()), "best_draft": float(drafts.max(-1).mean())}
    if moved and not method.refines:
        measures["ratio"] = torch.cat(ratios).clamp(-20.0, 20.0).exp().mean().item()
    return {f"second_round/{name}": value for name, value in measures.items()}
