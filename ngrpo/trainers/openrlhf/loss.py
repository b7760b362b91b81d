# SPDX-License-Identifier: Apache-2.0
"""Where OpenRLHF's loss is met: two places in OpenRLHF 0.11.2, through which everything of ours reaches it.

- ``log_probs_from_logits``, by which ``Actor.forward`` takes log-probabilities from temperature-scaled logits, in a
  padded batch as in a packed one. What :func:`replacing` puts there is in the old, the new and the reference
  log-probabilities, and with them in the ratio, the clip and the KL term: a density (`density_loss.py`), log π among
  the tokens that sampling left (`mask_correction.py`).
- ``actor_loss_fn``, the policy loss alone. What :func:`policy_loss` puts there changes neither the KL term nor the old
  log-probabilities: the score of a density (`model_actors.py`), of a credit (`credit_loss.py`), the ratio of another
  prompt (`second_round_loss.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from ngrpo.trainers.openrlhf.objects import ActorTrainer

_Loss = TypeVar("_Loss", bound=Callable[..., Any])
Replace = Callable[[Tensor, Tensor, Tensor], Tensor]
_active: ContextVar[tuple[Replace, ...]] = ContextVar("log_prob_replacements", default=())


@contextmanager
def replacing(replace: Replace, failed: str, fix: str) -> Iterator[None]:
    """Puts something in place of log-probabilities of the forward in this context, after what outer contexts put.

    Args:
        replace: gives the log-probabilities for logits (…, V), labels (…) and the log-probabilities so far (…).
        failed: what to say where no log-probabilities came through: there is no quiet return to the plain ones.
        fix: what to do then.

    Raises:
        RuntimeError: at the end, where no log-probabilities came through.
    """
    used = False

    def noted(*tensors: Tensor) -> Tensor:
        nonlocal used
        used = True
        return replace(*tensors)

    token = _active.set((*_active.get(), noted))
    try:
        yield
    finally:
        _active.reset(token)
    if not used:
        raise RuntimeError(
            f"{failed}: the model's log-probabilities did not come from openrlhf.models.actor.log_probs_from_logits"
            f" (0.11.2), as with a fused loss. {fix}"
        )


@contextmanager
def nothing_replaced() -> Iterator[None]:
    """A forward in this context has the plain log-probabilities, whatever outer contexts put: it is of other texts."""
    token = _active.set(())
    try:
        yield
    finally:
        _active.reset(token)


def with_replacements(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`openrlhf.models.actor.log_probs_from_logits`, with what is to be put in. A row of `patches.py`."""

    def log_probs_from_logits(logits: Tensor, labels: Tensor, *args: object, **kwargs: object) -> Tensor:
        log_probs = original(logits, labels, *args, **kwargs)
        for replace in _active.get():
            log_probs = replace(logits, labels, log_probs)
        return log_probs

    return log_probs_from_logits


@contextmanager
def policy_loss(trainer: ActorTrainer, make: Callable[[Callable[..., Any]], _Loss]) -> Iterator[_Loss]:
    """Has the training step in this context call another policy loss.

    Args:
        trainer: OpenRLHF's ``ActorPPOTrainer``.
        make: gives the loss for the one that is called now, which it calls in turn.
    """
    plain = trainer.actor_loss_fn
    trainer.actor_loss_fn = loss = make(plain)
    try:
        yield loss
    finally:
        trainer.actor_loss_fn = plain
