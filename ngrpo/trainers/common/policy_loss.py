# SPDX-License-Identifier: Apache-2.0
"""Policy losses around a trainer's own: each changes the arguments of the loss that it calls.

A term that a credit or a density adds to a token's score enters as term − stop_gradient(term): its value is 0, so ratio
and clip are the token's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ngrpo.methods.credits.base import Credit, LossTokens, check_results
from ngrpo.methods.second_rounds.base import SecondRound
from ngrpo.trainers.common.log_probs import NO_VISIBLE_LOGITS, Densities
from ngrpo.trainers.common.sample_records import TwoRounds
from perturbations.replay.flat_records import flat_rows

Loss = Callable[..., Any]
Actions = Float[Tensor, "batch actions"]


class RatioMeasure:
    """Measures the mean PPO ratio π_new / π_old of a call in ``mean``.

    The log-ratio is clamped to ±20, as in OpenRLHF's loss, so that the mean is finite.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.mean = torch.tensor(1.0)

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, *args: object, action_mask: Tensor, **kwargs: Any
    ) -> Any:
        with torch.no_grad():
            ratio = (log_probs - old_log_probs).float().clamp(-20.0, 20.0).exp()
            self.mean = (ratio * action_mask).sum() / action_mask.sum().clamp_min(1)
        return self._loss(log_probs, old_log_probs, *args, action_mask=action_mask, **kwargs)


class DensityScoreLoss:
    """A policy loss whose log-probabilities also have the score of a perturbation's density."""

    def __init__(self, loss: Loss, densities: Densities) -> None:
        self._loss = loss
        self._densities = densities

    def __call__(self, log_probs: Tensor, *args: object, **kwargs: object) -> Any:
        return self._loss(self._densities.for_policy_loss(log_probs), *args, **kwargs)


def rows_of_tokens(action_mask: Tensor, attention_mask: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Rows of a forward's flattened logits that generated tokens were drawn from, and their samples, (N,) int64 each.

    Args:
        action_mask: (B, A), 1 at generated tokens among the last A of each row.
        attention_mask: (B, T).
        shape: the logits' without V, (B, T) of a padded batch or (1, total) of a packed one; ValueError for others.
    """
    sample, position = positions_of_tokens(action_mask, attention_mask)
    # The row before a token chose it.
    rows, _ = flat_rows(sample, position - 1, shape, attention_mask)
    return rows, sample


def positions_of_tokens(action_mask: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The samples of generated tokens and the tokens' positions in their trajectories, (N,) int64 each.

    Arguments as in :func:`rows_of_tokens`.
    """
    sample, column = action_mask.bool().nonzero(as_tuple=True)
    first = attention_mask.int().argmax(dim=-1)
    return sample, attention_mask.shape[1] - action_mask.shape[1] + column - first[sample]


@dataclass(frozen=True)
class _CreditOfForward:
    """What a credit makes of one forward with N generated tokens.

    Attributes:
        tokens: the forward's generated tokens.
        advantages: the changed ones, (B, A).
        scores: term − stop_gradient(term) at each token, (B, A): its value is 0, its gradient the term's.
    """

    tokens: LossTokens
    advantages: Tensor
    scores: Tensor


class CreditInLoss:
    """A credit that depends on the policy of each update: :meth:`look` sees the forward's logits, a call is the loss.

    Attributes:
        share: the share of tokens that the credit changed or marked.
    """

    def __init__(
        self,
        credit: Credit,
        loss: Loss,
        *,
        advantages: Tensor,
        action_mask: Tensor,
        attention_mask: Tensor,
        marks: Tensor | None = None,
    ) -> None:
        """
        Args:
            credit: the run's.
            loss: the policy loss that it changes.
            advantages: of the micro-batch, (B, A).
            action_mask: (B, A), 1 at generated tokens.
            attention_mask: (B, T).
            marks: :meth:`Credit.marks` of the micro-batch, (B, A); None for a credit without marks.
        """
        self._credit = credit
        self._loss = loss
        self._advantages = advantages
        self._action_mask = action_mask
        self._attention_mask = attention_mask
        self._marks = marks
        self._of_forward: _CreditOfForward | None = None
        self.share = torch.tensor(0.0)

    def look(self, logits: Tensor, labels: Tensor, log_probs: Tensor) -> Tensor:
        """Calls the credit; an override that leaves the log-probabilities as they are."""
        mask = self._action_mask.to(logits.device).bool()
        attention_mask = self._attention_mask.to(logits.device)
        advantages = self._advantages.to(logits.device)
        rows, responses = rows_of_tokens(mask, attention_mask, tuple(labels.shape))
        tokens = LossTokens(
            logits=logits,
            rows=rows,
            tokens=labels.flatten()[rows],
            log_probs=log_probs.flatten()[rows],
            advantages=advantages[mask].float(),
            responses=responses,
        )
        unchanged = (tokens.advantages, torch.zeros_like(tokens.advantages))
        changed, term = self._credit.in_loss(tokens) or unchanged
        check_results(self._credit, "in_loss", len(rows), changed, term)

        touched = (changed != tokens.advantages) | (term.detach() != 0.0)
        if self._marks is not None:
            touched = touched | self._marks.to(mask.device)[mask]
        if len(rows):
            self.share = touched.float().mean()
        no_scores = torch.zeros_like(advantages, dtype=term.dtype)
        self._of_forward = _CreditOfForward(
            tokens=tokens,
            advantages=advantages.masked_scatter(mask, changed.to(advantages.dtype)),
            scores=no_scores.masked_scatter(mask, term - term.detach()),
        )
        return log_probs

    def __call__(self, log_probs: Actions, old_log_probs: Actions, advantages: Actions, **kwargs: object) -> Any:
        """The policy loss with the credit of the latest forward, once; RuntimeError without a forward before it."""
        if self._of_forward is None:
            raise RuntimeError(
                f"--credit {self._credit.name} did not come into effect: {NO_VISIBLE_LOGITS} Take that path out."
            )
        credited = self._of_forward
        self._of_forward = None
        scored = log_probs + credited.scores.to(log_probs.dtype)
        result = self._loss(scored, old_log_probs, credited.advantages, **kwargs)
        if self._marks is None:
            return result
        mask = self._action_mask.to(log_probs.device).bool()
        marks = self._marks.to(log_probs.device).bool()
        marked = marks[mask].nonzero().flatten()
        penalty = self._credit.marked_loss(credited.tokens, marked, (log_probs - old_log_probs)[marks])
        check_results(self._credit, "marked_loss", len(marked), penalty)
        # A ratio of value 1 is not clipped: with A = 1 the loss averages −1 · ratio over tokens in its own way.
        penalty_score = (penalty - penalty.detach()).to(log_probs.dtype)
        scores = torch.zeros_like(log_probs).masked_scatter(marks, penalty_score)
        ones = torch.ones_like(credited.advantages)
        marked_loss, *_ = self._loss(old_log_probs - scores, old_log_probs, ones, **kwargs)
        total, *measures = result
        return total + (marked_loss - marked_loss.detach()), *measures


def second_round_log_probs(
    action_mask: Tensor, rounds_by_response: Sequence[TwoRounds | None]
) -> tuple[Tensor, Tensor]:
    """log π_old of second-round responses given the prompts they were drawn from, (B, A), 0 elsewhere; and where they
    are, (B, A) bool.

    RuntimeError if a response is longer than the log-probabilities that it carries.
    """
    mask = action_mask.bool().cpu()
    log_probs = torch.zeros(mask.shape)
    is_second = torch.zeros(mask.shape, dtype=torch.bool)
    for row, rounds in enumerate(rounds_by_response):
        if rounds is None or rounds.log_probs is None:
            continue
        count = int(mask[row].sum())
        if count > len(rounds.log_probs):
            raise RuntimeError(
                f"--second_round: a response of {count} tokens has {len(rounds.log_probs)} probabilities."
            )
        # OpenRLHF may have cut the end of the response.
        log_probs[row, mask[row]] = torch.from_numpy(rounds.log_probs[:count])
        is_second[row] = mask[row]
    return log_probs.to(action_mask.device), is_second.to(action_mask.device)


class TwoRoundsLoss:
    """A policy loss in which second-round responses have their own ratio.

    Such a response is trained as one to the prompt of the data, which it was not drawn from. So in its ratio log π_old
    is given the second round's prompt. With shaping there is no clip, whatever the advantage's sign: A · sg(r) times a
    ratio of value 1 has the value and the gradient of A · r. The rollout policy's importance weight is part of r.
    """

    def __init__(
        self, method: SecondRound, loss: Loss, rounds_by_response: Sequence[TwoRounds | None], action_mask: Tensor
    ):
        self._method = method
        self._loss = loss
        self._behavior_log_probs, self._is_second = second_round_log_probs(action_mask, rounds_by_response)

    def __call__(
        self,
        log_probs: Actions,
        old_log_probs: Actions,
        advantages: Actions,
        rollout_log_probs: Actions | None = None,
        **kwargs: object,
    ) -> Any:
        is_second = self._is_second
        log_ratio = self._method.log_ratio(log_probs, self._behavior_log_probs.to(log_probs))
        if self._method.shaping is not None:
            weighted = advantages * log_ratio.detach().exp().to(advantages)
            advantages = torch.where(is_second, weighted, advantages)
            log_ratio = log_ratio - log_ratio.detach()
        log_probs = torch.where(is_second, old_log_probs + log_ratio, log_probs)
        if rollout_log_probs is not None:
            rollout_log_probs = torch.where(is_second, old_log_probs, rollout_log_probs)
        return self._loss(log_probs, old_log_probs, advantages, rollout_log_probs=rollout_log_probs, **kwargs)
