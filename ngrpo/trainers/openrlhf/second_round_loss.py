# SPDX-License-Identifier: Apache-2.0
"""``--second_round``: what is trained. Rows of `ngrpo.patches`, and what the advantages' row asks.

An answer of the second round is trained as one to the prompt of the data, which it was not drawn from. So its ratio has
log π_old given the prompt that was asked, as the engine drew it, in the place of the old log-probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ngrpo.config.run import current_run
from ngrpo.methods.advantages.base import Advantage
from ngrpo.methods.second_rounds.base import SecondRound
from ngrpo.trainers.openrlhf.loss import policy_loss
from ngrpo.trainers.openrlhf.metrics import note_measures
from ngrpo.trainers.openrlhf.second_round import TwoRounds, unpack
from perturbations.errors import present

if TYPE_CHECKING:
    from openrlhf.trainer.ppo_utils.experience import Experience

    from ngrpo.trainers.openrlhf.objects import ActorTrainer, ExperienceMaker


def advantages_of_all(
    advantage: Advantage, rewards: Tensor, advantages: Tensor, carried: Sequence[TwoRounds | None]
) -> Tensor:
    """The advantages of groups with a second round, as of all G + G' answers.

    Args:
        advantage: the run's, at the step.
        rewards: of the answers that are trained, (P, G), with the penalties that OpenRLHF applied.
        advantages: of these as they are, (P, G).
        carried: of each answer, P · G in the order of the rewards.

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


def in_order(experiences: Sequence[Experience]) -> list[TwoRounds | None]:
    """What the samples of a step carry, in the order in which they were generated."""
    by_place = {}
    for experience in experiences:
        by_place.update(zip(experience.index, unpack(experience.mm_train_inputs, len(experience.index))))
    return [by_place[place] for place in sorted(by_place)]


def behavior(action_mask: Tensor, carried: Sequence[TwoRounds | None]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of answers given the prompts that were asked in the second round.

    Args:
        action_mask: (B, A), 1 at generated tokens.
        carried: of each sample.

    Returns:
        log π_old, 0 where it is not of such an answer, (B, A) float32; and where it is, (B, A) bool.

    Raises:
        RuntimeError: where an answer is longer than what it carries: its tokens would be weighed as others.
    """
    mask = action_mask.bool().cpu()
    log_probs, there = torch.zeros(mask.shape), torch.zeros(mask.shape, dtype=torch.bool)
    for row, each in enumerate(carried):
        if each is None or each.log_probs is None:
            continue
        count = int(mask[row].sum())
        if count > len(each.log_probs):
            raise RuntimeError(f"--second_round: an answer of {count} tokens has {len(each.log_probs)} probabilities.")
        log_probs[row, mask[row]] = torch.from_numpy(each.log_probs[:count])  # an answer may have been cut at its end
        there[row] = mask[row]
    return log_probs.to(action_mask.device), there.to(action_mask.device)


class TwoRoundsLoss:
    """The policy loss of one training step, in which answers of the second round have a ratio of their own."""

    def __init__(self, method: SecondRound, loss_fn: Callable[..., Any], experience: Experience) -> None:
        self._method, self._loss_fn = method, loss_fn
        carried = unpack(experience.mm_train_inputs, len(experience.action_mask))
        self._behavior, self._second = behavior(experience.action_mask, carried)

    def __call__(
        self,
        log_probs: Float[Tensor, "batch actions"],
        old_log_probs: Float[Tensor, "batch actions"],
        advantages: Float[Tensor, "batch actions"],
        rollout_log_probs: Float[Tensor, "batch actions"] | None = None,
        **kwargs: object,
    ) -> Any:
        """As OpenRLHF's ``PolicyLoss``, all (B, A).

        With shaping there is no clip, whatever the advantage's sign: A · sg(r) times a ratio of value 1 has the value
        and the gradient of A · r. The importance weight of another policy in the rollout is in ρ, and not taken twice.
        """
        second, log_ratio = self._second, self._method.log_ratio(log_probs, self._behavior.to(log_probs))
        if self._method.shaping is not None:
            weighed = advantages * log_ratio.detach().exp().to(advantages)
            advantages = torch.where(second, weighed, advantages)
            log_ratio = log_ratio - log_ratio.detach()
        log_probs = torch.where(second, old_log_probs + log_ratio, log_probs)
        if rollout_log_probs is not None:
            rollout_log_probs = torch.where(second, old_log_probs, rollout_log_probs)
        return self._loss_fn(log_probs, old_log_probs, advantages, rollout_log_probs=rollout_log_probs, **kwargs)


def training_step_of_two_rounds(original: Callable[..., Any]) -> Callable[..., Any]:
    """`ActorPPOTrainer.training_step`, whose loss tells the rounds apart."""

    def training_step(self: ActorTrainer, experience: Experience, *args: object, **kwargs: Any) -> dict[str, Any]:
        with policy_loss(
            self,
            lambda loss_fn: TwoRoundsLoss(present(current_run().second_round, "--second_round"), loss_fn, experience),
        ):
            return original(self, experience, *args, **kwargs)

    return training_step


def measured_two_rounds(original: Callable[..., Any]) -> Callable[..., Any]:
    """`RemoteExperienceMaker.make_experience_batch`: what the second round brought."""

    def make_experience_batch(self: ExperienceMaker, rollout_samples: list[Experience]) -> Any:
        experiences = original(self, rollout_samples)
        note_measures(self, measures(experiences, present(current_run().second_round, "--second_round")))
        return experiences

    return make_experience_batch


def measures(experiences: Sequence[Experience], method: SecondRound) -> dict[str, float]:
    """What a step reports of its second round.

    Args:
        experiences: with the trainer's log-probabilities before the update.
        method: the run's.

    Returns:
        ``asked``: the share of samples whose prompt had a second round; where there are any, ``right``: the share of
        right answers in that round, and ``solved``: of its prompts with one. ``trained``: the share of samples that
        are of the second round; where there are any, ``ratio``: the mean of ρ over their tokens.
    """
    carried, ratios = [], []
    for experience in experiences:
        of_batch = unpack(experience.mm_train_inputs, len(experience.action_mask))
        carried.extend(of_batch)
        behavior_log_probs, second = behavior(experience.action_mask, of_batch)
        ratios.append(
            (experience.action_log_probs.float() - behavior_log_probs.to(experience.action_log_probs.device))[second]
        )
    with_second = [each for each in carried if each is not None]
    moved = [each for each in with_second if each.log_probs is not None]
    figures = {"asked": len(with_second) / len(carried), "trained": len(moved) / len(carried)}
    if with_second:
        # The first round's answers are all wrong. A sample stands for its prompt, of which all have as many.
        size = method.prompts * method.answers
        right = np.asarray([(each.rewards > method.wrong).sum() for each in with_second])
        figures |= {"right": float(right.mean()) / size, "solved": float((right > 0).mean())}
    ratio = torch.cat([part.cpu() for part in ratios]) if ratios else torch.zeros(0)
    if len(ratio):
        figures["ratio"] = ratio.clamp(-20.0, 20.0).exp().mean().item()
    return {f"second_round/{name}": value for name, value in figures.items()}
