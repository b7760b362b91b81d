# SPDX-License-Identifier: Apache-2.0
"""A step's advantages: the run's own replace OpenRLHF's, and a credit shares them among tokens."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ngrpo.config.run import current_run
from ngrpo.machine.upstream.types import Experience
from ngrpo.methods.advantages.base import Advantage, normalised
from ngrpo.methods.advantages.verified import NovelRepresentation, SingleStream
from ngrpo.methods.credits.base import StepTokens, check_shapes
from ngrpo.methods.scoring.answers import outcome
from ngrpo.trainers.common.sample_records import TwoRounds, two_rounds
from ngrpo.trainers.openrlhf.model_actors import kept_by_actors
from ngrpo.trainers.openrlhf.rewards import responses
from perturbations.errors import require
from perturbations.seeds import trajectory_seed


class Visits:
    """How often each (prompt, outcome) has been seen in a run, by hashes of 8 bytes: COPO's N."""

    def __init__(self) -> None:
        self._seen: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """The number of different outcomes."""
        return len(self._seen)

    def __repr__(self) -> str:
        return f"Visits of {len(self)} outcomes"  # OpenRLHF prints what a checkpoint holds

    def visit(self, prompts: Sequence[str], responses: Sequence[str]) -> list[int]:
        """Counts a batch; returns how often each response's outcome was seen before it, and in *other* responses of it.

        So equal responses have equal counts, in any order.
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

    def visit(self, prompts: Sequence[str], rewards: Sequence[float], rho: float) -> list[float]:
        """The value of each response's prompt before this step, v̂ = α / (α + β); then the step's rewards enter.

        α ← ρ α + Σ r and β ← ρ β + Σ (1 − r), Eq. 5, once a step for all responses to a prompt. A prompt's first
        responses start it (Algorithm 2): v̂ is their mean, α + β = 1 / (1 − ρ). A prompt's only response is compared
        with the step's mean instead: its own would leave nothing to learn.
        """
        mean = sum(rewards) / len(rewards)
        keys = [_key(prompt) for prompt in prompts]
        by_prompt: dict[bytes, list[float]] = {}
        for key, reward in zip(keys, rewards, strict=True):
            by_prompt.setdefault(key, []).append(reward)
        values = {}
        for key, own in by_prompt.items():
            if key not in self._evidence:
                values[key] = sum(own) / len(own) if len(own) > 1 else mean
                self._evidence[key] = (values[key] / (1.0 - rho), (1.0 - values[key]) / (1.0 - rho))
                if len(own) > 1:
                    continue
            right, wrong = self._evidence[key]
            values[key] = right / (right + wrong)
            self._evidence[key] = (rho * right + sum(own), rho * wrong + len(own) - sum(own))
        return [values[key] for key in keys]


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


class StepAdvantages:
    """Inserts the run's advantages of one step, or exact zeros into OpenRLHF's.

    In a group of equal rewards every estimator with a group baseline means 0. OpenRLHF 0.11.2 divides the rest of
    rounding by a deviation of 1e-9, which gave every response -10.

    OpenRLHF goes from rewards to advantages in one method: penalties, the estimator's group statistics, then for each
    micro-batch `compute_reward` (clip, KL penalty, last token) and the returns. Only the numbers that `compute_reward`
    receives change.
    """

    def __init__(self, maker: Any, experiences: list[Experience], advantage: Advantage | None) -> None:
        size = maker.args.rollout.n_samples_per_prompt
        count = sum(len(experience.index) for experience in experiences)
        if count % size:
            groups = f"groups of {size} (--rollout.n_samples_per_prompt)"
            raise RuntimeError(f"{count} responses are not a whole number of {groups}: a prompt has too few.")
        self.measures: dict[str, float] = {}
        self._maker, self._experiences, self._size = maker, experiences, size
        self._advantage = advantage and advantage.at_step(maker.training_step)
        self._rows: Iterator[Tensor] | None = None
        self._left = len(experiences)

    def through(self, compute: Callable[[list[Experience]], list[Experience]]) -> list[Experience]:
        """Calls OpenRLHF's own method with our advantages; RuntimeError unless it took one row for each micro-batch."""
        token = _step.set(self)
        try:
            result = compute(self._experiences)
        finally:
            _step.reset(token)
        if self._left:
            raise RuntimeError(f"OpenRLHF did not take our advantages for {self._left} micro-batches of the step.")
        return result

    def next(self, estimated: Tensor) -> Tensor:
        """The advantages of the next micro-batch, (B,), given OpenRLHF's."""
        if self._rows is None:
            self._rows = iter(self._compute())
        self._left -= 1
        row = next(self._rows)
        return row if self._advantage is not None else estimated.masked_fill(row, 0.0)

    def _compute(self) -> tuple[Tensor, ...]:
        experiences, advantage = self._experiences, self._advantage
        # The order of generation, a prompt's responses side by side: micro-batches may be mixed.
        order = torch.tensor(list(itertools.chain.from_iterable(e.index for e in experiences)))

        def grouped(values: Tensor) -> Tensor:
            result = torch.empty_like(values)
            result[order] = values
            return result.reshape(-1, self._size, *values.shape[1:])

        def split(groups: Tensor) -> tuple[Tensor, ...]:
            return groups.reshape(-1)[order].split([len(e.index) for e in experiences])

        rewards = grouped(torch.cat([e.rewards for e in experiences]))
        if advantage is None:
            return split((rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)).expand_as(rewards))
        further = grouped(_FURTHER[advantage.needs](self._maker, experiences, advantage)) if advantage.needs else None
        overlong = None
        if advantage.leaves_out_overlong:
            overlong = grouped(torch.cat([e.truncated for e in experiences]).bool())
        advantages = advantage.compute(rewards, further, overlong)
        if advantage.normalized_over_step:
            advantages = normalised(advantages.reshape(1, -1)).view_as(advantages)
        second_round = current_run().second_round
        if second_round is not None and second_round.group == "all":
            carried = [each for e in experiences for each in two_rounds(e.mm_train_inputs, len(e.index))]
            in_order = [carried[i] for i in order.argsort().tolist()]
            advantages = advantages_of_all(advantage, rewards, advantages, in_order)
        counted = advantage.needs == "counts"
        self.measures = advantage_measures(rewards, advantages, further if counted else None)
        if overlong is not None:
            self.measures["advantage/overlong"] = overlong.float().mean().item()
        if counted:
            self.measures["advantage/outcomes"] = float(len(self._maker.visits))
        return split(advantages)


def _counts(maker: Any, experiences: Sequence[Experience], _: Advantage) -> Tensor:
    if not isinstance(maker.visits, Visits):
        maker.visits = Visits()
    prompts = [prompt for experience in experiences for prompt in experience.prompts]
    texts = [text for experience in experiences for text in responses(maker.tokenizer, experience)]
    return torch.tensor(maker.visits.visit(prompts, texts), dtype=torch.float32)


def _log_probs(maker: Any, experiences: Sequence[Experience], _: Advantage) -> Tensor:
    masks = [experience.action_mask.bool() for experience in experiences]
    totals = [e.action_log_probs.float().masked_fill(~mask, 0.0).sum(-1) for e, mask in zip(experiences, masks)]
    return torch.stack([torch.cat(totals), torch.cat([mask.sum(-1) for mask in masks])], dim=-1)


def _values(maker: Any, experiences: Sequence[Experience], advantage: SingleStream) -> Tensor:
    if not isinstance(maker.visits, Values):
        maker.visits = Values()
    prompts = [prompt for experience in experiences for prompt in experience.prompts]
    rewards = torch.cat([experience.rewards for experience in experiences])
    return torch.tensor(maker.visits.visit(prompts, rewards.tolist(), advantage.rho)).to(rewards)


def _hidden(maker: Any, experiences: Sequence[Experience], advantage: NovelRepresentation) -> Tensor:
    """Projected by a sparse random matrix of the step: ±√(√D / dim) with probability 1 / (2 √D) each, else 0."""
    means = torch.cat(kept_by_actors(maker, "mean_hidden", [experience.rewards for experience in experiences]))
    size = means.shape[1]
    draws = torch.Generator().manual_seed(trajectory_seed(maker.args.train.seed, maker.training_step))
    uniform = torch.rand(size, advantage.dim, generator=draws)
    signs = (uniform < 0.5 / size**0.5).float() - (uniform > 1.0 - 0.5 / size**0.5).float()
    return means @ (signs * (size**0.5 / advantage.dim) ** 0.5)


# What else advantages need (FURTHER), of a step's responses in the order of its experiences.
_FURTHER: dict[str, Callable[[Any, Sequence[Experience], Any], Tensor]] = {
    "counts": _counts,
    "log_probs": _log_probs,
    "hidden": _hidden,
    "values": _values,
}

_step: ContextVar[StepAdvantages | None] = ContextVar("step_advantages", default=None)


def compute_reward(original: Callable[..., Any]) -> Callable[..., Any]:
    """OpenRLHF's `compute_reward`, with our advantages of a micro-batch in a step that has them."""

    def compute_reward(r: Tensor, *args: object, **kwargs: object) -> Any:
        return original(_own(r), *args, **kwargs)

    return compute_reward


def _own(estimated: Tensor) -> Tensor:  # apart from the above, which Ray may pickle: a context variable cannot be
    step = _step.get()
    return estimated if step is None else step.next(estimated)


def level_equal(experiences: Sequence[Experience]) -> None:
    """Makes a step's advantages exactly 0, in-place, where all trained tokens have the same one.

    OpenRLHF's estimators without a group baseline subtract a mean over the batch. `gae` and `reinforce` then divide its
    rounding error by a deviation of 1e-4.
    """
    values = torch.cat([experience.advantages[experience.action_mask.bool()] for experience in experiences])
    if values.amin() == values.amax():
        for experience in experiences:
            experience.advantages = torch.zeros_like(experience.advantages)


def advantages_of_all(
    advantage: Advantage, rewards: Tensor, advantages: Tensor, carried: Sequence[TwoRounds | None]
) -> Tensor:
    """Advantages (P, G) in which a group with a second round is compared with all of its G + G' responses.

    ``rewards`` and ``advantages`` are of the trained responses, (P, G), ``carried`` in the same order.
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


def share_among_tokens(maker: Any, experiences: list[Experience]) -> dict[str, float]:
    """Replaces the tokens' advantages by the run's credit, in-place, for any estimator.

    Returns the metrics ``credit/…`` (docs/metrics.md): over tokens with an advantage other than 0, the share that
    keeps one, and the mean size over the one before.
    """
    credit = require(current_run().credit, "--credit")
    masks = [experience.action_mask.bool() for experience in experiences]
    # The actor's forward, which gives PPO's old log-probabilities, kept the entropy at each token.
    entropies = kept_by_actors(maker, "token_entropies", [e.action_log_probs for e in experiences])
    before = torch.cat([experience.advantages[mask] for experience, mask in zip(experiences, masks)])
    lengths = torch.cat([mask.sum(dim=-1) for mask in masks])
    order = torch.tensor([place for experience in experiences for place in experience.index]).to(lengths)
    answers = torch.arange(len(lengths)).to(lengths).repeat_interleave(lengths)
    seeds = [trajectory_seed(maker.args.train.seed, maker.training_step, place) for place in order.tolist()]
    tokens = StepTokens(
        before,
        torch.cat([h[mask.cpu()] for h, mask in zip(entropies, masks)]).to(before),
        torch.cat([e.action_log_probs[mask] for e, mask in zip(experiences, masks)]).to(before),
        answers,
        (order // maker.args.rollout.n_samples_per_prompt)[answers],
        torch.tensor(seeds, dtype=torch.int64).to(answers)[answers],
    )
    after, marks = credit.formula(tokens), credit.marks(tokens)
    check_shapes(credit, "formula", len(before), after)
    sizes = [int(mask.sum()) for mask in masks]
    for experience, mask, part in zip(experiences, masks, after.split(sizes)):
        experience.advantages = experience.advantages.masked_scatter(mask, part.to(experience.advantages.dtype))
    if marks is not None:
        check_shapes(credit, "marks", len(before), marks)
        for experience, mask, part in zip(experiences, masks, marks.split(sizes)):
            experience.kl = torch.zeros_like(mask).masked_scatter(mask, part.bool())
    had = before != 0.0
    measures = {"entropy": tokens.entropies.mean().item()}
    if had.any():
        measures["trained"] = (after[had] != 0.0).float().mean().item()
        measures["size"] = (after.abs().sum() / before.abs().sum()).item()
    return {f"credit/{name}": value for name, value in measures.items()}
