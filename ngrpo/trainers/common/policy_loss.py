# SPDX-License-Identifier: Apache-2.0
"""Policy losses around a trainer's own: each takes the loss that it calls, and changes what goes into it.

They change neither the KL term nor the old log-probabilities. A term that a credit or a density adds to the score of a
token enters as term − stop_gradient(term): its value is 0, so ratio and clip are the token's, and its gradient is the
term's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ngrpo.methods.credits.base import Credit, LossTokens
from ngrpo.methods.second_rounds.base import SecondRound
from ngrpo.trainers.common.densities import Densities
from ngrpo.trainers.common.side_inputs import TwoRounds

Loss = Callable[..., Any]


class RatioMeasure:
    """Measures the mean of the PPO ratio π_new / π_old over the generated tokens, and adds the score of a density.

    The log-ratio is clamped to ±20, as OpenRLHF's loss does, so that the mean is finite.

    Attributes:
        densities: of the forward at hand, None where the perturbation has none.
        mean: of the last call.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.densities: Densities | None = None
        self.mean = torch.tensor(1.0)

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, *args: object, action_mask: Tensor, **kwargs: Any
    ) -> Any:
        with torch.no_grad():
            ratio = (log_probs - old_log_probs).float().clamp(-20.0, 20.0).exp()
            self.mean = (ratio * action_mask).sum() / action_mask.sum().clamp_min(1)
        if self.densities is not None:
            log_probs = self.densities.for_policy_loss(log_probs)
        return self._loss(log_probs, old_log_probs, *args, action_mask=action_mask, **kwargs)


def rows_of_tokens(action_mask: Tensor, attention_mask: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Which rows of a forward's logits generated tokens were drawn from.

    Args:
        action_mask: (B, A), 1 at generated tokens: of the last A of each row.
        attention_mask: (B, T), 1 at real tokens.
        shape: the logits', without V: (B, T) for a padded batch; (1, total) for a packed one.

    Returns:
        Rows in the flattened logits, and which sample each belongs to, (N,) int64 each.

    Raises:
        RuntimeError: where the logits are of neither.
    """
    sample, column = action_mask.bool().nonzero(as_tuple=True)
    length = attention_mask.shape[1]
    row = sample * length + (length - 1 - action_mask.shape[1]) + column
    if tuple(shape) == tuple(attention_mask.shape):
        return row, sample
    places = attention_mask.bool().flatten().cumsum(0) - 1
    if tuple(shape) == (1, int(places[-1]) + 1):
        return places[row], sample
    raise RuntimeError(
        f"--credit: {tuple(shape)} rows of logits for a batch of {tuple(attention_mask.shape)}. A credit in the loss"
        " needs a row for each token: no sequence-parallel slices (ring attention)."
    )


class CreditInLoss:
    """A credit that depends on the policy of each update: it sees the logits of the forward, then changes the loss.

    Attributes:
        share: the share of tokens that it changed.
    """

    def __init__(
        self, credit: Credit, loss: Loss, advantages: Tensor, action_mask: Tensor, attention_mask: Tensor
    ) -> None:
        """
        Args:
            credit: the run's.
            loss: the policy loss.
            advantages: (B, A).
            action_mask: (B, A), 1 at generated tokens.
            attention_mask: (B, T), 1 at real tokens.
        """
        self._credit, self._loss = credit, loss
        self._advantages, self._masks = advantages, (action_mask, attention_mask)
        self._found: tuple[Tensor, Tensor] | None = None
        self.share = torch.tensor(0.0)

    def look(self, logits: Tensor, labels: Tensor, log_probs: Tensor) -> Tensor:
        """Asks the credit; an override that leaves the log-probabilities as they are."""
        mask, attention_mask = (part.to(logits.device) for part in self._masks)
        mask = mask.bool()
        rows, responses = rows_of_tokens(mask, attention_mask, tuple(labels.shape))
        advantages = self._advantages.to(logits.device)
        own = advantages[mask].float()
        tokens = LossTokens(logits, rows, labels.flatten()[rows], log_probs.flatten()[rows], own, responses)
        changed, term = self._credit.in_loss(tokens) or (own, torch.zeros_like(own))
        if changed.shape != own.shape or term.shape != own.shape:
            raise RuntimeError(
                f"credit {self._credit.name!r}: in_loss returns {tuple(changed.shape)} and {tuple(term.shape)} for"
                f" {len(own)} tokens: one number for each is needed."
            )
        self.share = ((changed != own) | (term.detach() != 0.0)).float().mean() if len(own) else self.share
        full = advantages.masked_scatter(mask, changed.to(advantages.dtype))
        scores = torch.zeros_like(advantages, dtype=term.dtype).masked_scatter(mask, term - term.detach())
        self._found = full, scores
        return log_probs

    def __call__(
        self,
        log_probs: Float[Tensor, "batch actions"],
        old_log_probs: Float[Tensor, "batch actions"],
        advantages: Float[Tensor, "batch actions"],
        **kwargs: object,
    ) -> Any:
        """The policy loss, with the credit's advantages and its term in the score."""
        if self._found is None:
            raise RuntimeError(
                f"--credit {self._credit.name} did not come into effect: the policy loss came without a forward whose"
                " logits it could see (openrlhf.models.actor.log_probs_from_logits of 0.11.2), as with a fused loss."
                " Take that path out."
            )
        changed, scores = self._found
        self._found = None
        return self._loss(log_probs + scores.to(log_probs.dtype), old_log_probs, changed, **kwargs)


def behavior(action_mask: Tensor, carried: Sequence[TwoRounds | None]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of second-round responses given the prompts that they were drawn from.

    Args:
        action_mask: (B, A), 1 at generated tokens.
        carried: of each sample.

    Returns:
        log π_old, 0 where it is not of such a response, (B, A) float32; and where it is, (B, A) bool.

    Raises:
        RuntimeError: where a response is longer than what it carries: its tokens would be weighed as others.
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
    """A policy loss in which second-round responses have a ratio of their own.

    Such a response is trained as one to the prompt of the data, which it was not drawn from. So its ratio has log π_old
    given the prompt of the second round, as the engine drew it, in the place of the old log-probability.
    """

    def __init__(self, method: SecondRound, loss: Loss, carried: Sequence[TwoRounds | None], action_mask: Tensor):
        """
        Args:
            method: the run's.
            loss: the policy loss.
            carried: of each sample.
            action_mask: (B, A), 1 at generated tokens.
        """
        self._method, self._loss = method, loss
        self._behavior, self._second = behavior(action_mask, carried)

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
        return self._loss(log_probs, old_log_probs, advantages, rollout_log_probs=rollout_log_probs, **kwargs)
