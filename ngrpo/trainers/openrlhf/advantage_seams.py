# SPDX-License-Identifier: Apache-2.0
"""Our advantages in place of OpenRLHF's: the functions of the ``advantage`` rows of `patches.py`.

OpenRLHF 0.11.2 goes from rewards to advantages in one method: penalties, the estimator's group statistics, then for
each micro batch `compute_reward` (clip, KL penalty, the last token) and the returns. All of that stays. Only the
number that `compute_reward` receives for each answer is another one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ngrpo.config.run import current_run
from ngrpo.methods.advantages.base import Advantage
from ngrpo.trainers.openrlhf.metrics import note_measures
from ngrpo.trainers.openrlhf.rewards import refuse_non_finite, responses
from ngrpo.trainers.openrlhf.second_round_loss import advantages_of_all, in_order
from ngrpo.trainers.openrlhf.visits import Visits
from perturbations.errors import present

if TYPE_CHECKING:
    from openrlhf.trainer.ppo_utils.experience import Experience

    from ngrpo.trainers.openrlhf.objects import ExperienceMaker


class _Batch:
    """The experiences of one step, and their advantages once OpenRLHF has applied its length penalties."""

    def __init__(self, maker: ExperienceMaker, experiences: list[Experience], advantage: Advantage) -> None:
        self.metrics: dict[str, float] = {}
        self._maker, self._experiences = maker, experiences
        self._advantage = advantage.at_step(maker.training_step)
        self._rows: Iterator[Tensor] | None = None
        self._left = len(experiences)

    def next(self) -> Tensor:
        """The advantages of the next micro batch, (B,)."""
        if self._rows is None:
            self._rows = iter(self._compute())
        self._left -= 1
        return next(self._rows)

    def done(self) -> None:
        """Raises ``RuntimeError`` unless OpenRLHF asked once for each micro batch."""
        if self._left:
            raise RuntimeError(f"OpenRLHF did not take our advantages for {self._left} micro batches of the step.")

    def _compute(self) -> tuple[Tensor, ...]:
        experiences = self._experiences
        size = self._maker.args.rollout.n_samples_per_prompt
        # Where each answer stood when it was generated: a prompt's answers side by side (micro batches may be mixed).
        order = torch.tensor(list(itertools.chain.from_iterable(e.index for e in experiences)))

        def grouped(values: Tensor) -> Tensor:
            result = torch.empty_like(values)
            result[order] = values
            return result.reshape(-1, size)

        rewards = grouped(torch.cat([e.rewards for e in experiences]))
        counts = grouped(self._visits()) if self._advantage.counted else None
        overlong = None
        if self._advantage.leaves_out_overlong:
            overlong = grouped(torch.cat([e.truncated for e in experiences]).bool())
        advantages = self._advantage.compute(rewards, counts, overlong)
        if (second_round := current_run().second_round) is not None and second_round.group == "all":
            advantages = advantages_of_all(self._advantage, rewards, advantages, in_order(experiences))
        self.metrics = measures(rewards, advantages, counts)
        if overlong is not None:
            self.metrics["advantage/overlong"] = overlong.float().mean().item()
        if counts is not None:
            self.metrics["advantage/outcomes"] = float(len(self._maker.visits))
        return advantages.reshape(-1)[order].split([len(e.index) for e in experiences])

    def _visits(self) -> Tensor:
        maker = self._maker
        if not hasattr(maker, "visits"):
            maker.visits = Visits()
        prompts = [prompt for experience in self._experiences for prompt in experience.prompts]
        answers = [text for experience in self._experiences for text in responses(maker.tokenizer, experience)]
        return torch.tensor(maker.visits.visit(prompts, answers), dtype=torch.float32)


_batch: ContextVar[_Batch | None] = ContextVar("advantage_batch", default=None)


def measures(rewards: Tensor, advantages: Tensor, counts: Tensor | None = None) -> dict[str, float]:
    """What a step reports of its advantages, all (P, G).

    Returns:
        ``mean``, ``min``, ``max`` over all answers; ``uniform_groups``, the share of prompts whose answers all got
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


def computed(original: Callable[..., Any], maker: ExperienceMaker, experiences: list[Experience]) -> Any:
    """OpenRLHF's own method, while `compute_reward` is given our advantages."""
    size = maker.args.rollout.n_samples_per_prompt
    answers = sum(len(experience.index) for experience in experiences)
    if answers % size:
        raise RuntimeError(
            f"{answers} answers are not a whole number of groups of {size} (--rollout.n_samples_per_prompt):"
            " some prompt was not answered as often as it was asked."
        )
    refuse_non_finite(maker.tokenizer, experiences)
    batch = _Batch(maker, experiences, present(current_run().advantage, "--advantage"))
    token = _batch.set(batch)
    try:
        result = original(maker, experiences)
    finally:
        _batch.reset(token)
    batch.done()
    note_measures(maker, batch.metrics)
    return result


def value_of(estimated: Tensor) -> Tensor:
    """What `compute_reward` is given for a micro batch: our advantages, or the estimator's value outside a step."""
    batch = _batch.get()
    return estimated if batch is None else batch.next()


# Ray may pickle what these return by value, and a context variable cannot be: so they only call functions above.


def own_advantages(original: Callable[..., Any]) -> Callable[..., Any]:
    """`RemoteExperienceMaker.compute_advantages_and_returns`, in which `compute_reward` gets our advantages."""

    def compute_advantages_and_returns(self: ExperienceMaker, experiences: list[Experience]) -> Any:
        return computed(original, self, experiences)

    return compute_advantages_and_returns


def own_reward(original: Callable[..., Any]) -> Callable[..., Any]:
    """`compute_reward`, called once per micro batch with the estimator's value for each answer."""

    def compute_reward(r: Tensor, *args: object, **kwargs: object) -> Any:
        return original(value_of(r), *args, **kwargs)

    return compute_reward
