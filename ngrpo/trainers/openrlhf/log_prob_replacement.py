# SPDX-License-Identifier: Apache-2.0
"""The one place in OpenRLHF 0.11.2 where logits become log-probabilities, and what stands in for these.

``Actor.forward`` takes them from temperature-scaled logits by ``log_probs_from_logits``, in a padded batch as in a
packed one. So whatever replaces some of them there is in the old, the new and the reference log-probabilities, and with
them in the ratio, the clip and the KL term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

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

    def noted(*given: Tensor) -> Tensor:
        nonlocal used
        used = True
        return replace(*given)

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
    """`openrlhf.models.actor.log_probs_from_logits`, with what is to be put in. A row of `seams.py`."""

    def log_probs_from_logits(logits: Tensor, labels: Tensor, *args: object, **kwargs: object) -> Tensor:
        log_probs = original(logits, labels, *args, **kwargs)
        for replace in _active.get():
            log_probs = replace(logits, labels, log_probs)
        return log_probs

    return log_probs_from_logits
