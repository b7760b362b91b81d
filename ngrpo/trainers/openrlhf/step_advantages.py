# SPDX-License-Identifier: Apache-2.0
"""A step's advantages: the run's own replace the estimates of OpenRLHF."""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ngrpo.config.run import current_run
from ngrpo.machine.upstream.types import Experience
from ngrpo.methods.advantages.base import Advantage, normalised
from ngrpo.methods.advantages.verified import NovelRepresentation, SingleStream
from ngrpo.methods.scoring.answers import outcome
from ngrpo.trainers.common.sample_records import TwoRounds, two_rounds
from ngrpo.trainers.openrlhf.experiences import masked
from ngrpo.trainers.openrlhf.model_actors import kept_by_actors
from ngrpo.trainers.openrlhf.rewards import responses
from perturbations.errors import require
from perturbations.seeds import trajectory_seed

Replacement = Callable[[Tensor], Tensor]
"""What a micro-batch's advantages (B,) are, given OpenRLHF's estimates of them (B,)."""

# ---- what a run remembers of its prompts ---------------------------------------------------------------------------


class Visits:
    """How often each (prompt, outcome) has been seen in a run, by hashes of 8 bytes: COPO's N."""

    def __init__(self) -> None:
        self._seen: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """The number of different outcomes."""
        return len(self._seen)

    def __repr__(self) -> str:
        """A short text, since OpenRLHF prints what a checkpoint holds."""
        return f"Visits of {len(self)} outcomes"

    def count(self, prompts: Sequence[str], responses: Sequence[str]) -> list[int]:
        """Counts the responses of a step; returns each response's count without itself.

        That is: earlier occurrences of its outcome in the run, plus those in the other responses of this step. So equal
        responses have equal counts, in any order.
        """
        keys = [_key(f"{prompt}\0{outcome(response)}") for prompt, response in zip(prompts, responses, strict=True)]
        self._seen.update(keys)
        return [self._seen[key] - 1 for key in keys]


class Values:
    """SPO's value tracker: a Beta distribution of each prompt's reward, by hashes of 8 bytes."""

    def __init__(self) -> None:
        self._evidence: dict[bytes, tuple[float, float]] = {}

    def __len__(self) -> int:
        """The number of different prompts."""
        return len(self._evidence)

    def __repr__(self) -> str:
        return f"Values of {len(self)} prompts"

    def take_and_update(self, prompts: Sequence[str], rewards: Sequence[float], rho: float) -> list[float]:
        """The value of each response's prompt before this step, v̂ = α / (α + β); then the step's rewards enter.

        α ← ρ α + Σ r and β ← ρ β + Σ (1 − r), Eq. 5, once a step for all responses to a prompt. A prompt's first
        responses start it (Algorithm 2): v̂ is their mean, α + β = 1 / (1 − ρ). A prompt's only response is compared
        with the step's mean instead: its own would leave nothing to learn.
        """
        step_mean = sum(rewards) / len(rewards)
        keys = [_key(prompt) for prompt in prompts]
        rewards_of: dict[bytes, list[float]] = {}
        for key, reward in zip(keys, rewards, strict=True):
            rewards_of.setdefault(key, []).append(reward)
        values = {}
        for key, prompt_rewards in rewards_of.items():
            count = len(prompt_rewards)
            if key not in self._evidence:
                start = sum(prompt_rewards) / count if count > 1 else step_mean
                self._evidence[key] = (start / (1.0 - rho), (1.0 - start) / (1.0 - rho))
                if count > 1:
                    # These rewards made the start, so they do not enter a second time.
                    values[key] = start
                    continue
            right, wrong = self._evidence[key]
            values[key] = right / (right + wrong)
            right = rho * right + sum(prompt_rewards)
            wrong = rho * wrong + count - sum(prompt_rewards)
            self._evidence[key] = (right, wrong)
        return [values[key] for key in keys]


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


# ---- the advantages of a step --------------------------------------------------------------------------------------


class GroupOrder:
    """Where the responses of a step are: OpenRLHF deals them to micro-batches in any order, advantages need groups.

    P is the number of prompts in the step, G of responses to each; a group is a row of (P, G).
    """

    def __init__(self, experiences: Sequence[Experience], group_size: int) -> None:
        """RuntimeError unless each prompt has ``group_size`` responses."""
        self._batch_sizes = [len(experience.index) for experience in experiences]
        count = sum(self._batch_sizes)
        if count % group_size:
            raise RuntimeError(
                f"{count} responses are not a whole number of groups of {group_size} (--rollout.n_samples_per_prompt):"
                " a prompt has too few."
            )
        # The number of each response in the order of generation, in which a prompt's responses are side by side.
        self._numbers = torch.tensor([number for experience in experiences for number in experience.index])
        self._group_size = group_size

    def grouped(self, values: Tensor) -> Tensor:
        """Values in the order of micro-batches, (P · G, …), as groups, (P, G, …)."""
        in_order = torch.empty_like(values)
        in_order[self._numbers] = values
        return in_order.reshape(-1, self._group_size, *values.shape[1:])

    def batches(self, groups: Tensor) -> tuple[Tensor, ...]:
        """Groups (P, G) as one row for each micro-batch, (B,)."""
        return groups.reshape(-1)[self._numbers].split(self._batch_sizes)

    def in_order(self, rows: Sequence[Any]) -> list[Any]:
        """A list in the order of micro-batches, in the order of generation."""
        return [rows[place] for place in self._numbers.argsort().tolist()]


@dataclass(frozen=True)
class StepAdvantages:
    """What replaces OpenRLHF's estimates of a step.

    Exactly one of ``advantages`` and ``zeroed`` is set; each has a row (B,) for each micro-batch.

    Attributes:
        advantages: the run's, which replace the estimates.
        zeroed: in a run without an advantage, the responses whose estimate becomes 0, in bool.
        measures: the step's metrics ``advantage/…``.
    """

    advantages: tuple[Tensor, ...] | None = None
    zeroed: tuple[Tensor, ...] | None = None
    measures: dict[str, float] = field(default_factory=dict)

    def replacements(self) -> list[Replacement]:
        """What makes a micro-batch's advantages of its estimates, for each micro-batch."""
        if self.zeroed is not None:
            return [partial(_with_zeros, is_zero=row) for row in self.zeroed]
        return [partial(_in_place_of, row=row) for row in require(self.advantages, "a step's advantages")]


def _in_place_of(estimated: Tensor, row: Tensor) -> Tensor:
    _check_order(estimated, row)
    return row


def _with_zeros(estimated: Tensor, is_zero: Tensor) -> Tensor:
    _check_order(estimated, is_zero)
    return estimated.masked_fill(is_zero, 0.0)


def _check_order(estimated: Tensor, row: Tensor) -> None:
    """Raises RuntimeError where a row is of another micro-batch than the estimates."""
    if row.shape != estimated.shape:
        raise RuntimeError(
            f"OpenRLHF has {tuple(estimated.shape)} estimates of a micro-batch, the run's advantages are"
            f" {tuple(row.shape)}: the micro-batches are not in the order of the experiences."
        )


def compute(maker: Any, experiences: list[Experience], advantage: Advantage | None) -> StepAdvantages:
    """The advantages of a step, before OpenRLHF's `compute_advantages_and_returns`.

    In a run without an advantage a group with equal rewards gets 0. Every estimator with a group baseline means that,
    but OpenRLHF 0.11.2 returns -10: it divides the mean's rounding error by a deviation of 1e-9, and clips.

    Raises:
        RuntimeError: if a prompt has fewer responses than ``--rollout.n_samples_per_prompt``.
    """
    order = GroupOrder(experiences, maker.args.rollout.n_samples_per_prompt)
    experiences = with_length_penalties(experiences, maker.args)
    rewards = order.grouped(torch.cat([experience.rewards for experience in experiences]))
    if advantage is None:
        is_uniform = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
        return StepAdvantages(zeroed=order.batches(is_uniform.expand_as(rewards)))

    advantage = advantage.at_step(maker.training_step)
    further = None
    if advantage.needs:
        further = order.grouped(_FURTHER[advantage.needs](maker, experiences, advantage))
    overlong = None
    if advantage.leaves_out_overlong:
        overlong = order.grouped(torch.cat([experience.truncated for experience in experiences]).bool())
    advantages = advantage.compute(rewards, further, overlong)
    second_round = current_run().second_round
    if second_round is not None and second_round.group == "all":
        rounds_by_response: list[TwoRounds | None] = []
        for experience in experiences:
            rounds_by_response.extend(two_rounds(experience.mm_train_inputs, len(experience.index)))
        advantages = advantages_of_all(advantage, rewards, advantages, order.in_order(rounds_by_response))
    if advantage.normalized_over_step:
        advantages = normalised(advantages.reshape(1, -1)).view_as(advantages)

    has_counts = advantage.needs == "counts"
    measures = advantage_measures(rewards, advantages, counts=further if has_counts else None)
    if overlong is not None:
        measures["advantage/overlong"] = overlong.float().mean().item()
    if has_counts:
        measures["advantage/outcomes"] = float(len(maker.prompt_memory))
    return StepAdvantages(advantages=order.batches(advantages), measures=measures)


def with_length_penalties(experiences: Sequence[Experience], args: Any) -> list[Experience]:
    """Shallow copies of a step's micro-batches with the rewards that OpenRLHF's estimator sees.

    `compute_advantages_and_returns` of OpenRLHF 0.11.2 begins with two changes of the rewards in-place: at least
    float32, then length penalties (--reward.overlong_buffer_len, --reward.stop_properly_penalty_coef). It makes them
    itself later, so the experiences stay as they are.
    """
    copies = []
    for experience in experiences:
        copied = copy(experience)
        at_least_float32 = torch.promote_types(experience.rewards.dtype, torch.float32)
        copied.rewards = experience.rewards.to(at_least_float32, copy=True)
        copies.append(copied)
    options = getattr(args, "reward", None)
    has_overlong_penalty = getattr(options, "overlong_buffer_len", None) is not None
    has_stop_penalty = getattr(options, "stop_properly_penalty_coef", None) is not None
    if has_overlong_penalty or has_stop_penalty:
        from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties

        for copied in copies:
            copied.info = dict(copied.info)  # the penalties also go into info["reward"]
        apply_length_penalties(copies, args)
    return copies


# ---- what else an advantage reads (`Advantage.needs`), for a step's responses in the order of its experiences --------


def _counts(maker: Any, experiences: Sequence[Experience], _: Advantage) -> Tensor:
    """COPO's counts, (N,) float32."""
    if not isinstance(maker.prompt_memory, Visits):
        maker.prompt_memory = Visits()
    prompts = [prompt for experience in experiences for prompt in experience.prompts]
    texts = [text for experience in experiences for text in responses(maker.tokenizer, experience)]
    return torch.tensor(maker.prompt_memory.count(prompts, texts), dtype=torch.float32)


def _log_probs(maker: Any, experiences: Sequence[Experience], _: Advantage) -> Tensor:
    """log π summed over a response's trained tokens, and the number of these tokens, (N, 2)."""
    totals = []
    counts = []
    for experience in experiences:
        mask = experience.action_mask.bool()
        totals.append(experience.action_log_probs.float().masked_fill(~mask, 0.0).sum(-1))
        counts.append(mask.sum(-1))
    return torch.stack([torch.cat(totals), torch.cat(counts)], dim=-1)


def _values(maker: Any, experiences: Sequence[Experience], advantage: SingleStream) -> Tensor:
    """SPO's value of each response's prompt before the step, (N,)."""
    if not isinstance(maker.prompt_memory, Values):
        maker.prompt_memory = Values()
    prompts = [prompt for experience in experiences for prompt in experience.prompts]
    rewards = torch.cat([experience.rewards for experience in experiences])
    return torch.tensor(maker.prompt_memory.take_and_update(prompts, rewards.tolist(), advantage.rho)).to(rewards)


def _hidden(maker: Any, experiences: Sequence[Experience], advantage: NovelRepresentation) -> Tensor:
    """Mean hidden states (N, D) projected to (N, dim) by a sparse random matrix of the step.

    Its entries are ±√(√D / dim) with probability 1 / (2 √D) each, else 0.
    """
    means = torch.cat(kept_by_actors(maker, "mean_hidden", [experience.rewards for experience in experiences]))
    size = means.shape[1]
    generator = torch.Generator().manual_seed(trajectory_seed(maker.args.train.seed, maker.training_step))
    uniform = torch.rand(size, advantage.dim, generator=generator)
    is_positive = uniform < 0.5 / size**0.5
    is_negative = uniform > 1.0 - 0.5 / size**0.5
    signs = is_positive.float() - is_negative.float()
    return means @ (signs * (size**0.5 / advantage.dim) ** 0.5)


_FURTHER: dict[str, Callable[[Any, Sequence[Experience], Any], Tensor]] = {
    "counts": _counts,
    "log_probs": _log_probs,
    "hidden": _hidden,
    "values": _values,
}

# ---- into OpenRLHF -------------------------------------------------------------------------------------------------

_pending: ContextVar[deque[Replacement] | None] = ContextVar("pending_advantages", default=None)


@contextmanager
def replacing_estimates(replacements: Sequence[Replacement]) -> Iterator[None]:
    """In this context each call of OpenRLHF's `compute_reward` gets what the next replacement makes of its estimates.

    The estimates are local variables of `compute_advantages_and_returns`: penalties and group statistics make them, and
    a loop over the micro-batches hands each row (B,) to `compute_reward` (clip, KL penalty, last token), in the order
    of the experiences. So `compute_reward` is the only place where the rows can be replaced.

    Args:
        replacements: of :meth:`StepAdvantages.replacements`, in the order of the experiences.

    Raises:
        RuntimeError: unless `compute_reward` was called once for each of them.
    """
    pending = deque(replacements)
    token = _pending.set(pending)
    try:
        yield
    finally:
        _pending.reset(token)
    if pending:
        raise RuntimeError(f"OpenRLHF did not take our advantages for {len(pending)} micro-batches of the step.")


_clipped: ContextVar[list[Tensor] | None] = ContextVar("clipped_advantages", default=None)


@contextmanager
def noting_clipped() -> Iterator[list[Tensor]]:
    """Collects the estimates that OpenRLHF's `compute_reward` clips in this context: a row (n,) for each call."""
    clipped: list[Tensor] = []
    token = _clipped.set(clipped)
    try:
        yield clipped
    finally:
        _clipped.reset(token)


def compute_reward(original: Callable[..., Any]) -> Callable[..., Any]:
    """OpenRLHF's `compute_reward`: in the context of :func:`replacing_estimates` it is given our rows, one per call."""

    def compute_reward(r: Tensor, *args: object, **kwargs: Any) -> Any:
        estimates = _replaced(r)
        _note_clipped(estimates, kwargs.get("reward_clip_range"))
        return original(estimates, *args, **kwargs)

    return compute_reward


def _note_clipped(estimates: Tensor, clip_range: tuple[float, float] | None) -> None:
    """Adds the estimates beyond the range, which is OpenRLHF's ``--reward.clip_range``, to those of the context."""
    clipped = _clipped.get()
    if clipped is not None and clip_range:
        low, high = clip_range
        clipped.append(estimates[(estimates < low) | (estimates > high)])


def _replaced(estimated: Tensor) -> Tensor:
    """What the next replacement makes of a micro-batch's estimates (B,).

    A function of the module, since Ray pickles the closure above by value, and a context variable cannot be pickled.
    """
    pending = _pending.get()
    if pending is None:
        return estimated
    if not pending:
        raise RuntimeError("OpenRLHF computes rewards for more micro-batches than the step has.")
    return pending.popleft()(estimated)


def level_equal(experiences: Sequence[Experience]) -> None:
    """Makes a step's advantages exactly 0, in-place, where all trained tokens have the same one.

    OpenRLHF's estimators without a group baseline subtract a mean over the batch. `gae` and `reinforce` then divide its
    rounding error by a deviation of 1e-4.
    """
    values = masked(experiences, [experience.advantages for experience in experiences])
    if values.amin() == values.amax():
        for experience in experiences:
            experience.advantages = torch.zeros_like(experience.advantages)


# ---- groups with a second round, and metrics -----------------------------------------------------------------------


def advantages_of_all(
    advantage: Advantage, rewards: Tensor, advantages: Tensor, rounds_by_response: Sequence[TwoRounds | None]
) -> Tensor:
    """Advantages (P, G) in which a group with a second round is compared with all of its G + G' responses.

    Args:
        advantage: of the run, at its step.
        rewards: of the trained responses, (P, G), after penalties.
        advantages: of the trained responses among themselves, (P, G).
        rounds_by_response: the two rounds of each trained response's prompt, in the order of generation; None in a
            group without a second round.
    """
    result = advantages.clone()
    group_size = rewards.shape[1]
    for group, own_rewards in enumerate(rewards):
        rounds_of_group = rounds_by_response[group * group_size : (group + 1) * group_size]
        if rounds_of_group[0] is None:
            continue
        places = torch.tensor([rounds.place for rounds in rounds_of_group if rounds is not None])
        all_rewards = torch.from_numpy(rounds_of_group[0].rewards.copy()).to(rewards)
        all_rewards[places] = own_rewards
        result[group] = advantage.compute(all_rewards.unsqueeze(0))[0, places].to(result)
    return result


def advantage_measures(rewards: Tensor, advantages: Tensor, counts: Tensor | None = None) -> dict[str, float]:
    """The metrics ``advantage/…`` of a step (docs/metrics.md) from rewards, advantages and counts, (P, G) each."""
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
