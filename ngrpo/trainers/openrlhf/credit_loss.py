# SPDX-License-Identifier: Apache-2.0
"""Credits that depend on the policy of each update: the ``credit_in_loss`` row of `patches.py`.

What such a credit adds to the score of a token enters the policy loss alone, as term − stop_gradient(term): its value
is 0, so the ratio, the clip and the reported ratios are the token's, and its gradient is the term's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ngrpo.config.run import current_run
from ngrpo.methods.credits.base import Credit, LossTokens
from ngrpo.trainers.openrlhf.loss import policy_loss, replacing
from perturbations.errors import present

if TYPE_CHECKING:
    from openrlhf.trainer.ppo_utils.experience import Experience

    from ngrpo.trainers.openrlhf.objects import ActorTrainer


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
        f"--credit {present(current_run().credit, '--credit').name}: {tuple(shape)} rows of logits for a batch of"
        f" {tuple(attention_mask.shape)}. It needs a row for each token: no sequence-parallel slices (ring attention)."
    )


class CreditInLoss:
    """The credit of one training step: sees the logits of its forward, and calls the policy loss with what follows."""

    def __init__(self, credit: Credit, loss_fn: Callable[..., Any], experience: Experience) -> None:
        self._credit, self._loss_fn, self._experience = credit, loss_fn, experience
        self._found: tuple[Tensor, Tensor] | None = None
        self.share = torch.tensor(0.0)

    def look(self, logits: Tensor, labels: Tensor, log_probs: Tensor) -> Tensor:
        """Asks the credit, and leaves the log-probabilities as they are: a `loss.Replace`."""
        experience = self._experience
        mask = experience.action_mask.bool().to(logits.device)
        rows, answers = rows_of_tokens(mask, experience.attention_mask.to(logits.device), tuple(labels.shape))
        advantages = experience.advantages.to(logits.device)
        own = advantages[mask].float()
        tokens = LossTokens(logits, rows, labels.flatten()[rows], log_probs.flatten()[rows], own, answers)
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
        return self._loss_fn(log_probs + scores.to(log_probs.dtype), old_log_probs, changed, **kwargs)


def training_step_with_credit(original: Callable[..., Any]) -> Callable[..., Any]:
    """`ActorPPOTrainer.training_step`, whose loss asks the run's credit."""

    def training_step(self: ActorTrainer, experience: Experience, *args: object, **kwargs: object) -> dict[str, Any]:
        credit = present(current_run().credit, "--credit")
        failed = f"--credit {credit.name} did not come into effect"
        with (
            policy_loss(self, lambda loss_fn: CreditInLoss(credit, loss_fn, experience)) as ours,
            replacing(ours.look, failed, "Take that path out."),
        ):
            result = original(self, experience, *args, **kwargs)
        result["metrics"]["credit/in_loss"] = ours.share
        result["weights"]["credit/in_loss"] = "token"
        return result

    return training_step
