# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's ``RemoteExperienceMaker``: rollouts become experiences, measured, judged, and with advantages of ours."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ngrpo.config.run import current_run
from ngrpo.methods.advantages.base import Advantage
from ngrpo.methods.credits.base import StepTokens
from ngrpo.methods.second_rounds.base import SecondRound
from ngrpo.trainers.common import importance
from ngrpo.trainers.common.mismatch import GapScale, check_gap, step_metrics
from ngrpo.trainers.common.policy_loss import behavior
from ngrpo.trainers.common.side_inputs import TwoRounds, two_rounds, unpack
from ngrpo.trainers.openrlhf.kept_groups import KeptGroups, keep
from ngrpo.trainers.openrlhf.rewards import refuse_non_finite, responses
from ngrpo.trainers.openrlhf.rollout_actor import CONTROLS
from ngrpo.workbench.scoring.answers import outcome
from perturbations.errors import present
from perturbations.replay.trajectory import FinishedTrajectory, UnperturbedAnswer

if TYPE_CHECKING:
    from openrlhf.trainer.ppo_utils.experience import Experience


def experience_maker(plain: Any) -> type:
    """A subclass of `RemoteExperienceMaker`; a run without a feature skips its line."""

    class MeasuringExperienceMaker(plain):
        """
        Attributes:
            training_step: from 0, and from a checkpoint's where one is resumed.
            step_measures: of the step at hand, which the trainer takes.
            visits: counts of outcomes, for COPO; a checkpoint holds them.
            rollout_divergence: of the latest step, which a policy noise may follow; None where it is unknown.
            rollout_entropy: of the latest step, which a sampling schedule may follow; None where it is unknown.
        """

        training_step = 0
        step_measures: Mapping[str, float] = MappingProxyType({})
        visits: Visits | None = None
        rollout_divergence: float | None = None
        rollout_entropy: float | None = None
        gap_scale: GapScale | None = None
        kept_groups: KeptGroups | None = None

        def make_experience_batch(self, rollout_samples: list[Experience]) -> list[Experience]:
            run, experiences = current_run(), super().make_experience_batch(rollout_samples)
            if run.perturbation is not None or run.sampling.correct_mask:
                refuse_non_finite(self.tokenizer, experiences)
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
            if run.advantage is None:
                experiences = super().compute_advantages_and_returns(experiences)
            else:
                with_ours = StepAdvantages(self, experiences, run.advantage)
                experiences = with_ours.through(super().compute_advantages_and_returns)
                self.note(with_ours.measures)
            if run.credit is not None:
                self.note(share_among_tokens(self, experiences))
            return experiences

        def note(self, measures: dict[str, float]) -> None:
            """Keeps measures of the step at hand."""
            self.step_measures = {**self.step_measures, **measures}

    return MeasuringExperienceMaker


def kept_by_actors(maker: Any, method: str, own: Sequence[Tensor]) -> list[Tensor]:
    """What the actors kept of each batch, besides the log-probabilities that they returned.

    Args:
        maker: OpenRLHF's experience maker.
        method: of our actors; it hands over what was kept.
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


# ---- rollout against trainer -------------------------------------------------------------------------------------


def replay_measures(maker: Any, experiences: Sequence[Experience]) -> dict[str, float]:
    """Measures the training–inference mismatch before the update, and judges it.

    Raises:
        ReplayGap: where it is too large and the run is strict.
    """
    run, args = current_run(), maker.strategy.args
    if maker.gap_scale is None:
        batch = getattr(args.rollout, "vllm_generate_batch_size", None) or args.rollout.batch_size
        older = bool(getattr(args.train, "async_enable", False)) or batch > args.rollout.batch_size
        maker.gap_scale = GapScale(args.ds.param_dtype != "fp32", older, noisy=run.policy_noise is not None)
    records, log_probs = [], []
    for experience, of_tokens in zip(experiences, token_log_probs(maker, experiences)):
        records.extend(unpack(experience.mm_train_inputs))
        # Entry t of the log-probabilities and of their mask is of token t + 1.
        trained = of_tokens.float().masked_fill(~experience.action_mask.cpu().bool(), float("nan"))
        padded = np.pad(trained.numpy(), ((0, 0), (1, 0)), constant_values=np.nan)
        lengths = experience.attention_mask.sum(dim=-1).tolist()
        log_probs.extend(row[:length] for row, length in zip(padded, lengths))
    measures = step_metrics(records, log_probs, run.perturbation)
    if not args.vllm.enable_prefix_caching:
        measures.pop("perturbation/prefix_hit_rate", None)
    if maker.gap_scale.is_needed and (gap := control_gap(maker, records)) is not None:
        measures["perturbation/gap_unperturbed_mean"] = gap
    # A sampling schedule's rollouts are drawn at other temperatures than the trainer's: a gap says nothing there.
    if run.sampling_schedule is None:
        check_gap(measures, run.gap_limit, strict=run.strict)
        maker.gap_scale.check(measures, run.gap_limit, strict=run.strict)
    return measures


def token_log_probs(maker: Any, experiences: Sequence[Experience]) -> list[Tensor]:
    """log π of the tokens in each batch; where a perturbation has a density, the actors kept them separately."""
    own = [experience.action_log_probs for experience in experiences]
    perturbation = current_run().perturbation
    if perturbation is None or not perturbation.has_density:
        return own
    return kept_by_actors(maker, "token_log_probs", own)


def control_gap(maker: Any, records: Sequence[FinishedTrajectory | None]) -> float | None:
    """Mean |log π_trainer − log π_rollout| of the tokens of the step's unperturbed responses; None without a token.

    This gap of engines and trainer is the scale of every other one.
    """
    import ray

    controls = [each.unperturbed for each in records if each is not None and each.unperturbed is not None]
    controls = [each for each in controls if len(each.log_probs)][:CONTROLS]
    if not controls:
        return None
    group = maker.actor_model_group
    method = "unperturbed_log_probs"
    log_probs = ray.get(group.async_run_method(method_name=method, **_left_padded(controls)))[0].float().numpy()
    gaps = [np.abs(row[len(row) - len(each.log_probs) :] - each.log_probs) for row, each in zip(log_probs, controls)]
    return float(np.concatenate(gaps).mean())


def _left_padded(controls: Sequence[UnperturbedAnswer]) -> dict[str, Tensor]:
    """A batch of responses that all end at the last column, where OpenRLHF looks for actions."""
    rows, longest = len(controls), max(len(each.tokens) for each in controls)
    sequences = torch.zeros(rows, longest, dtype=torch.int64)
    attention_mask = torch.zeros_like(sequences)
    action_mask = torch.zeros(rows, max(len(each.log_probs) for each in controls), dtype=torch.int64)
    for row, each in enumerate(controls):
        sequences[row, longest - len(each.tokens) :] = torch.from_numpy(each.tokens.astype(np.int64))
        attention_mask[row, longest - len(each.tokens) :] = 1
        action_mask[row, action_mask.shape[1] - len(each.log_probs) :] = 1
    return {"sequences": sequences, "action_mask": action_mask, "attention_mask": attention_mask}


def rollout_policy_measures(maker: Any, experiences: Sequence[Experience]) -> dict[str, float]:
    """Measures the policy that rolled out; empty where the rollouts' log-probabilities are not requested.

    Its entropy, at the temperatures of the rollout and in nats, is estimated without bias by the mean of −log π_rollout
    over the tokens, where all of them were drawn from it.
    """
    args, rollout = maker.strategy.args, [e.rollout_log_probs for e in experiences]
    maker.rollout_divergence = maker.rollout_entropy = None
    if any(part is None for part in rollout):
        return {}
    pairs = [(e, part) for e, part in zip(experiences, rollout) if part is not None]
    maker.rollout_entropy = -torch.cat([part[e.action_mask.bool()].float().cpu() for e, part in pairs]).mean().item()
    measures = {"sampling/entropy": maker.rollout_entropy} if current_run().sampling_schedule is not None else {}
    advantage = args.algo.advantage
    if advantage.is_correction_level == "off":
        return measures
    log_ratio = torch.cat([(e.action_log_probs - part)[e.action_mask.bool()].float().cpu() for e, part in pairs])
    weights = None
    by_token = advantage.is_correction_level == "token" and advantage.is_correction_gating == "ratio"
    if args.actor.policy_loss_type == "ppo" and by_token:  # GSPO's loss has no such weights
        low, high = (float(bound) for bound in advantage.is_correction_threshold)
        weights = importance.Weights(low, high, advantage.is_correction_mode == "clip")
    measures |= importance.measures(log_ratio, weights)
    maker.rollout_divergence = measures["importance/divergence"]
    return measures


def ramp_up_correction(maker: Any, experiences: Sequence[Experience], steps: int) -> dict[str, float]:
    """``--sampling.correction_warmup``: the loss's importance weights grow from 1 to their whole over so many steps.

    OpenRLHF 0.11.2 weighs each token's loss by w from the first step on. In step t, from 0, the weight is 1 + α (w − 1)
    here, with α = min(1, t / steps).
    """
    strength = min(1.0, maker.training_step / steps)
    if strength < 1.0:
        low, high = (float(bound) for bound in maker.strategy.args.algo.advantage.is_correction_threshold)
        for experience in experiences:
            rollout = present(experience.rollout_log_probs, "rollout_log_probs")
            experience.rollout_log_probs = importance.with_strength(
                experience.action_log_probs, rollout, strength, (low, high)
            )
    return {"importance/strength": strength}


def second_round_measures(experiences: Sequence[Experience], method: SecondRound) -> dict[str, float]:
    """What a step reports of its second round.

    Args:
        experiences: with the trainer's log-probabilities before the update.
        method: the run's.

    Returns:
        ``asked``: the share of samples whose prompt had a second round; where there are any, ``right``: the share of
        right responses in that round, and ``solved``: of its prompts with one. ``trained``: the share of samples that
        are of the second round; where there are any, ``ratio``: the mean of ρ over their tokens.
    """
    carried, ratios = [], []
    for experience in experiences:
        of_batch = two_rounds(experience.mm_train_inputs, len(experience.action_mask))
        carried.extend(of_batch)
        log_probs, second = behavior(experience.action_mask, of_batch)
        trainer = experience.action_log_probs.float()
        ratios.append((trainer - log_probs.to(trainer.device))[second].cpu())
    with_second = [each for each in carried if each is not None]
    moved = [each for each in with_second if each.log_probs is not None]
    measures = {"asked": len(with_second) / len(carried), "trained": len(moved) / len(carried)}
    if with_second:
        # The first round's responses are all wrong. A sample stands for its prompt, of which all have as many.
        right = np.asarray([(each.rewards > method.wrong).sum() for each in with_second])
        measures["right"] = float(right.mean()) / (method.prompts * method.answers)
        measures["solved"] = float((right > 0).mean())
    if moved:
        measures["ratio"] = torch.cat(ratios).clamp(-20.0, 20.0).exp().mean().item()
    return {f"second_round/{name}": value for name, value in measures.items()}


# ---- advantages and credits --------------------------------------------------------------------------------------


class Visits:
    """How often each (prompt, response) outcome has been seen over a run, by hashes of 8 bytes: COPO's N."""

    def __init__(self) -> None:
        self._seen: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """The number of different outcomes seen."""
        return len(self._seen)

    def __repr__(self) -> str:
        return f"Visits of {len(self)} outcomes"  # OpenRLHF prints what a checkpoint holds

    def visit(self, prompts: Sequence[str], responses: Sequence[str]) -> list[int]:
        """Counts a batch.

        Args:
            prompts: one per response.
            responses: the generated texts.

        Returns:
            For each response how often its outcome was seen before: in earlier batches, and by *other* responses of
            this batch. So equal responses get equal counts, in whatever order they stand.
        """
        keys = [
            hashlib.blake2b(f"{prompt}\0{outcome(response)}".encode(), digest_size=8).digest()
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        self._seen.update(keys)
        return [self._seen[key] - 1 for key in keys]


class StepAdvantages:
    """The run's advantages of one step in the place of OpenRLHF's.

    OpenRLHF 0.11.2 goes from rewards to advantages in one method: penalties, the estimator's group statistics, then for
    each micro batch `compute_reward` (clip, KL penalty, the last token) and the returns. All of that stays;
    `compute_reward` receives another number for each response.

    Attributes:
        measures: of the step, once the advantages were taken.
    """

    def __init__(self, maker: Any, experiences: list[Experience], advantage: Advantage) -> None:
        size = maker.args.rollout.n_samples_per_prompt
        count = sum(len(experience.index) for experience in experiences)
        if count % size:
            raise RuntimeError(
                f"{count} answers are not a whole number of groups of {size} (--rollout.n_samples_per_prompt):"
                " some prompt was not answered as often as it was asked."
            )
        refuse_non_finite(maker.tokenizer, experiences)
        self.measures: dict[str, float] = {}
        self._maker, self._experiences, self._size = maker, experiences, size
        self._advantage = advantage.at_step(maker.training_step)
        self._rows: Iterator[Tensor] | None = None
        self._left = len(experiences)

    def through(self, compute: Callable[[list[Experience]], list[Experience]]) -> list[Experience]:
        """OpenRLHF's own method, while `compute_reward` is given our advantages.

        Raises:
            RuntimeError: unless it asked once for each micro batch.
        """
        token = _step.set(self)
        try:
            result = compute(self._experiences)
        finally:
            _step.reset(token)
        if self._left:
            raise RuntimeError(f"OpenRLHF did not take our advantages for {self._left} micro batches of the step.")
        return result

    def next(self) -> Tensor:
        """The advantages of the next micro batch, (B,), from rewards with OpenRLHF's length penalties."""
        if self._rows is None:
            self._rows = iter(self._compute())
        self._left -= 1
        return next(self._rows)

    def _compute(self) -> tuple[Tensor, ...]:
        experiences, advantage = self._experiences, self._advantage
        # Where each response stood when it was generated: a prompt's side by side (micro batches may be mixed).
        order = torch.tensor(list(itertools.chain.from_iterable(e.index for e in experiences)))

        def grouped(values: Tensor) -> Tensor:
            result = torch.empty_like(values)
            result[order] = values
            return result.reshape(-1, self._size)

        rewards = grouped(torch.cat([e.rewards for e in experiences]))
        counts = grouped(self._visits()) if advantage.counted else None
        overlong = None
        if advantage.leaves_out_overlong:
            overlong = grouped(torch.cat([e.truncated for e in experiences]).bool())
        advantages = advantage.compute(rewards, counts, overlong)
        second_round = current_run().second_round
        if second_round is not None and second_round.group == "all":
            advantages = advantages_of_all(advantage, rewards, advantages, _in_order(experiences))
        self.measures = advantage_measures(rewards, advantages, counts)
        if overlong is not None:
            self.measures["advantage/overlong"] = overlong.float().mean().item()
        if counts is not None:
            self.measures["advantage/outcomes"] = float(len(self._maker.visits))
        return advantages.reshape(-1)[order].split([len(e.index) for e in experiences])

    def _visits(self) -> Tensor:
        maker = self._maker
        if maker.visits is None:
            maker.visits = Visits()
        prompts = [prompt for experience in self._experiences for prompt in experience.prompts]
        texts = [text for experience in self._experiences for text in responses(maker.tokenizer, experience)]
        return torch.tensor(maker.visits.visit(prompts, texts), dtype=torch.float32)


_step: ContextVar[StepAdvantages | None] = ContextVar("step_advantages", default=None)


def compute_reward(original: Callable[..., Any]) -> Callable[..., Any]:
    """OpenRLHF's `compute_reward`, given our advantages of a micro batch where a step has them."""

    def compute_reward(r: Tensor, *args: object, **kwargs: object) -> Any:
        return original(_own(r), *args, **kwargs)

    return compute_reward


def _own(estimated: Tensor) -> Tensor:  # apart from the above, which Ray may pickle: a context variable cannot be
    step = _step.get()
    return estimated if step is None else step.next()


def advantages_of_all(
    advantage: Advantage, rewards: Tensor, advantages: Tensor, carried: Sequence[TwoRounds | None]
) -> Tensor:
    """The advantages of groups with a second round, as of all G + G' responses.

    Args:
        advantage: the run's, at the step.
        rewards: of the responses that are trained, (P, G), with the penalties that OpenRLHF applied.
        advantages: of these as they are, (P, G).
        carried: of each response, P · G in the order of the rewards.

    Returns:
        (P, G).
    """
    result, size = advantages.clone(), rewards.shape[1]
    for row in range(len(rewards)):
        of_row = carried[row * size : (row + 1) * size]
        if of_row[0] is None:
            continue
        places = torch.tensor([each.place for each in of_row if each is not None])
        whole = torch.from_numpy(of_row[0].rewards.copy()).to(rewards)
        whole[places] = rewards[row]
        result[row] = advantage.compute(whole.unsqueeze(0))[0, places].to(result)
    return result


def _in_order(experiences: Sequence[Experience]) -> list[TwoRounds | None]:
    """What the samples of a step carry of two rounds, in the order in which they were generated."""
    by_place = {}
    for experience in experiences:
        by_place.update(zip(experience.index, two_rounds(experience.mm_train_inputs, len(experience.index))))
    return [by_place[place] for place in sorted(by_place)]


def advantage_measures(rewards: Tensor, advantages: Tensor, counts: Tensor | None = None) -> dict[str, float]:
    """What a step reports of its advantages, all (P, G).

    Returns:
        ``mean``, ``min``, ``max`` over all responses; ``uniform_groups``, the share of prompts whose responses all got
        the same reward, and ``uniform_mean``, their mean advantage (0 in GRPO, below 0 in NGRPO unless all are
        correct); ``count_mean`` with counts.
    """
    uniform = rewards.amax(-1) == rewards.amin(-1)
    result = {
        "mean": advantages.mean().item(),
        "min": advantages.min().item(),
        "max": advantages.max().item(),
        "uniform_groups": uniform.float().mean().item(),
    }
    if uniform.any():
        result["uniform_mean"] = advantages[uniform].mean().item()
    if counts is not None:
        result["count_mean"] = counts.mean().item()
    return {f"advantage/{name}": value for name, value in result.items()}


def share_among_tokens(maker: Any, experiences: list[Experience]) -> dict[str, float]:
    """Gives the tokens of a step the advantages of the run's credit, in place, whatever the estimator was.

    Returns:
        ``entropy``: mean over the tokens; ``trained``: the share of tokens with an advantage other than 0, of those
        that had one; ``size``: the mean size of the advantages, over that of those before.
    """
    credit = present(current_run().credit, "--credit")
    masks = [experience.action_mask.bool() for experience in experiences]
    # The actor's forward, which gives PPO's old log-probabilities, kept the entropy at each token.
    entropies = kept_by_actors(maker, "token_entropies", [e.action_log_probs for e in experiences])
    before = torch.cat([experience.advantages[mask] for experience, mask in zip(experiences, masks)])
    lengths = torch.cat([mask.sum(dim=-1) for mask in masks])
    order = torch.tensor([place for experience in experiences for place in experience.index]).to(lengths)
    answers = torch.arange(len(lengths)).to(lengths).repeat_interleave(lengths)
    tokens = StepTokens(
        before,
        torch.cat([h[mask.cpu()] for h, mask in zip(entropies, masks)]).to(before),
        torch.cat([e.action_log_probs[mask] for e, mask in zip(experiences, masks)]).to(before),
        answers,
        (order // maker.args.rollout.n_samples_per_prompt)[answers],
    )
    after = credit.formula(tokens)
    if after.shape != before.shape:
        raise RuntimeError(
            f"credit {credit.name!r}: formula returns {tuple(after.shape)} for {len(before)} tokens: one"
            " number for each is needed."
        )
    for experience, mask, part in zip(experiences, masks, after.split([int(mask.sum()) for mask in masks])):
        experience.advantages = experience.advantages.masked_scatter(mask, part.to(experience.advantages.dtype))
    had = before != 0.0
    measures = {"entropy": tokens.entropies.mean().item()}
    if had.any():
        measures["trained"] = (after[had] != 0.0).float().mean().item()
        measures["size"] = (after.abs().sum() / before.abs().sum()).item()
    return {f"credit/{name}": value for name, value in measures.items()}
