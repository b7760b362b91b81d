# SPDX-License-Identifier: Apache-2.0
"""Policy losses around a trainer's own: each changes the arguments of the loss that it calls.

A term that a credit or a density adds to a token's score enters as term − stop_gradient(term): its value is 0, so ratio
and clip are the token's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ngrpo.methods.credits.base import Credit, LossTokens, check_shapes
from ngrpo.methods.second_rounds.base import SecondRound
from ngrpo.trainers.common.log_probs import Densities
from ngrpo.trainers.common.sample_records import TwoRounds
from perturbations.replay.scope import flat_rows

Loss = Callable[..., Any]
Actions = Float[Tensor, "batch actions"]


class RatioMeasure:
    """Measures the mean PPO ratio π_new / π_old of a call in ``mean``, and adds the score of ``densities``.

    The log-ratio is clamped to ±20, as in OpenRLHF's loss, so that the mean is finite.
    """

    def __init__(self, loss: Loss, densities: Densities | None = None) -> None:
        self._loss, self._densities = loss, densities
        self.mean = torch.tensor(1.0)

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, *args: object, action_mask: Tensor, **kwargs: Any
    ) -> Any:
        with torch.no_grad():
            ratio = (log_probs - old_log_probs).float().clamp(-20.0, 20.0).exp()
            self.mean = (ratio * action_mask).sum() / action_mask.sum().clamp_min(1)
        if self._densities is not None:
            log_probs = self._densities.for_policy_loss(log_probs)
        return self._loss(log_probs, old_log_probs, *args, action_mask=action_mask, **kwargs)


def rows_of_tokens(action_mask: Tensor, attention_mask: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Rows of a forward's flattened logits that generated tokens were drawn from, and their samples, (N,) int64 each.

    Args:
        action_mask: (B, A), 1 at generated tokens among the last A of each row.
        attention_mask: (B, T).
        shape: the logits' without V, (B, T) of a padded batch or (1, total) of a packed one; ValueError for others.
    """
    sample, column = action_mask.bool().nonzero(as_tuple=True)
    first = attention_mask.int().argmax(dim=-1)
    # The row before a token chose it.
    position = attention_mask.shape[1] - 1 - action_mask.shape[1] + column - first[sample]
    return flat_rows(sample, position, shape, attention_mask)[0], sample


class CreditInLoss:
    """A credit that depends on the policy of each update: it sees the forward's logits, then changes the loss.

    ``masks`` are the masks of actions (B, A) and attention (B, T), ``marks`` (B, A) :meth:`Credit.marks` of this batch;
    ``share`` is the share of tokens that it changed or marked.
    """

    def __init__(
        self, credit: Credit, loss: Loss, advantages: Tensor, masks: tuple[Tensor, Tensor], marks: Tensor | None = None
    ) -> None:
        self._credit, self._loss, self._marks = credit, loss, marks
        self._advantages, self._masks = advantages, masks
        self._found: tuple[Tensor, Tensor, LossTokens] | None = None
        self.share = torch.tensor(0.0)

    def look(self, logits: Tensor, labels: Tensor, log_probs: Tensor) -> Tensor:
        """Calls the credit; an override that leaves the log-probabilities as they are."""
        mask, attention_mask = (part.to(logits.device) for part in self._masks)
        mask = mask.bool()
        rows, responses = rows_of_tokens(mask, attention_mask, tuple(labels.shape))
        advantages = self._advantages.to(logits.device)
        own = advantages[mask].float()
        tokens = LossTokens(logits, rows, labels.flatten()[rows], log_probs.flatten()[rows], own, responses)
        changed, term = self._credit.in_loss(tokens) or (own, torch.zeros_like(own))
        check_shapes(self._credit, "in_loss", len(own), changed, term)
        touched = (changed != own) | (term.detach() != 0.0)
        if self._marks is not None:
            touched = touched | self._marks.to(mask.device)[mask]
        self.share = touched.float().mean() if len(own) else self.share
        full = advantages.masked_scatter(mask, changed.to(advantages.dtype))
        scores = torch.zeros_like(advantages, dtype=term.dtype).masked_scatter(mask, term - term.detach())
        self._found = full, scores, tokens
        return log_probs

    def __call__(self, log_probs: Actions, old_log_probs: Actions, advantages: Actions, **kwargs: object) -> Any:
        if self._found is None:
            forward = "a forward with visible logits (openrlhf.models.actor.log_probs_from_logits of 0.11.2)"
            why = f"the policy loss came without {forward}, as with a fused loss"
            raise RuntimeError(f"--credit {self._credit.name} did not come into effect: {why}. Take that path out.")
        changed, scores, tokens = self._found
        self._found = None
        result = self._loss(log_probs + scores.to(log_probs.dtype), old_log_probs, changed, **kwargs)
        if self._marks is None:
            return result
        mask, marks = (part.to(log_probs.device).bool() for part in (self._masks[0], self._marks))
        marked = marks[mask].nonzero().flatten()
        penalty = self._credit.marked_loss(tokens, marked, (log_probs - old_log_probs)[marks])
        check_shapes(self._credit, "marked_loss", len(marked), penalty)
        # A ratio of value 1 is not clipped: with A = 1 the loss averages −1 · ratio over tokens in its own way.
        scores = torch.zeros_like(log_probs).masked_scatter(marks, (penalty - penalty.detach()).to(log_probs.dtype))
        alone, *_ = self._loss(old_log_probs - scores, old_log_probs, torch.ones_like(changed), **kwargs)
        total, *measures = result
        return total + (alone - alone.detach()), *measures


def behavior(action_mask: Tensor, carried: Sequence[TwoRounds | None]) -> tuple[Tensor, Tensor]:
    """log π_old of second-round responses given the prompts they were drawn from, (B, A), 0 elsewhere; and where they
    are.

    RuntimeError if a response is longer than the log-probabilities that it carries.
    """
    mask = action_mask.bool().cpu()
    log_probs, there = torch.zeros(mask.shape), torch.zeros(mask.shape, dtype=torch.bool)
    for row, each in enumerate(carried):
        if each is None or each.log_probs is None:
            continue
        count = int(mask[row].sum())
        if count > len(each.log_probs):
            raise RuntimeError(f"--second_round: a response of {count} tokens has {len(each.log_probs)} probabilities.")
        log_probs[row, mask[row]] = torch.from_numpy(each.log_probs[:count])  # its end may have been cut
        there[row] = mask[row]
    return log_probs.to(action_mask.device), there.to(action_mask.device)


class TwoRoundsLoss:
    """A policy loss in which second-round responses have their own ratio.

    Such a response is trained as one to the prompt of the data, which it was not drawn from. So in its ratio log π_old
    is given the second round's prompt. With shaping there is no clip, whatever the advantage's sign: A · sg(r) times a
    ratio of value 1 has the value and the gradient of A · r. The rollout policy's importance weight is part of r.
    """

    def __init__(self, method: SecondRound, loss: Loss, carried: Sequence[TwoRounds | None], action_mask: Tensor):
        self._method, self._loss = method, loss
        self._behavior, self._second = behavior(action_mask, carried)

    def __call__(
        self,
        log_probs: Actions,
        old_log_probs: Actions,
        advantages: Actions,
        rollout_log_probs: Actions | None = None,
        **kwargs: object,
    ) -> Any:
        second, log_ratio = self._second, self._method.log_ratio(log_probs, self._behavior.to(log_probs))
        if self._method.shaping is not None:
            weighed = advantages * log_ratio.detach().exp().to(advantages)
            advantages = torch.where(second, weighed, advantages)
            log_ratio = log_ratio - log_ratio.detach()
        log_probs = torch.where(second, old_log_probs + log_ratio, log_probs)
        if rollout_log_probs is not None:
            rollout_log_probs = torch.where(second, old_log_probs, rollout_log_probs)
        return self._loss(log_probs, old_log_probs, advantages, rollout_log_probs=rollout_log_probs, **kwargs)
