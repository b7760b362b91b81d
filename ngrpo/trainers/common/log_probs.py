# SPDX-License-Identifier: Apache-2.0
"""Overrides of the log-probabilities that a trainer takes from logits.

A trainer's own function, wrapped by :func:`with_overrides`, gives the old, the new and the reference log-probabilities;
whatever a context of :func:`override_log_probs` puts there reaches the ratio, the clip and the KL term. Two overrides
are in use: a density (`densities.py`), and the sampling mask of ``--sampling.correct_mask`` below. With top-p, top-k or
min-p a rollout samples from π_S, the policy renormalised over the set S of tokens left, while a trainer scores π. The
correction is log π_S(x) = z_x − log Σ_{v ∈ S} exp z_v, with gradient to every z_v in S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ngrpo.trainers.common.side_inputs import unpack
from perturbations.replay.flat_records import flat_rows
from perturbations.replay.trajectory import SamplingMask

Override = Callable[[Tensor, Tensor, Tensor], Tensor]
_active: ContextVar[tuple[Override, ...]] = ContextVar("log_prob_overrides", default=())


@contextmanager
def override_log_probs(override: Override, failed: str, fix: str) -> Iterator[None]:
    """Overrides the log-probabilities of the forward in this context, after the overrides of outer contexts.

    Args:
        override: gives the log-probabilities for logits (…, V), labels (…) and the log-probabilities so far (…).
        failed: what to say where no log-probabilities came through: the plain ones would be another method.
        fix: what to do then.

    Raises:
        RuntimeError: at the end, where no log-probabilities came through.
    """
    used = False

    def noted(*tensors: Tensor) -> Tensor:
        nonlocal used
        used = True
        return override(*tensors)

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
def no_overrides() -> Iterator[None]:
    """A forward in this context has the plain log-probabilities, whatever outer contexts override."""
    token = _active.set(())
    try:
        yield
    finally:
        _active.reset(token)


def with_overrides(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A trainer's function from logits and labels to log-probabilities, with the overrides of the context."""

    def log_probs_from_logits(logits: Tensor, labels: Tensor, *args: object, **kwargs: object) -> Tensor:
        log_probs = original(logits, labels, *args, **kwargs)
        for override in _active.get():
            log_probs = override(logits, labels, log_probs)
        return log_probs

    return log_probs_from_logits


def log_probs_among(logits: Tensor, labels: Tensor, rows: Tensor, which: Tensor, ids: Tensor) -> Tensor:
    """log π_S of the labels at N rows.

    Args:
        logits: z̃, (R, V).
        labels: the token drawn from each row, (R,) int64.
        rows: (N,) int64.
        which: index into ``rows`` of each member of a set, (M,) int64.
        ids: the members themselves, (M,) int64.

    Returns:
        (N,), with gradient to the logits.

    Raises:
        RuntimeError: where a label is not in its set.
    """
    scores = logits[rows[which], ids]
    is_label = ids == labels[rows[which]]
    if int(is_label.sum()) != len(rows):
        raise RuntimeError(
            f"{len(rows) - int(is_label.sum())} of {len(rows)} tokens to be trained on are not among those that the"
            " rollout's sampling left: the sampling masks are not those of these samples."
        )
    highest = scores.new_full(rows.shape, -torch.inf).scatter_reduce(0, which, scores.detach(), "amax")
    total = scores.new_zeros(rows.shape).index_add(0, which, (scores - highest[which]).exp())
    return scores[is_label] - highest - total.log()  # `which` ascends, so the drawn ones stand in the order of the rows


class MaskCorrection:
    """The sampling masks of one forward."""

    def __init__(self, masks: Sequence[SamplingMask], attention_mask: Tensor) -> None:
        """
        Args:
            masks: one per sample.
            attention_mask: (B, T), padded on either side.
        """
        self._attention_mask = attention_mask.cpu()
        self._sample = torch.cat([torch.full((len(mask),), i) for i, mask in enumerate(masks)])
        self._position = torch.cat([torch.from_numpy(mask.positions) for mask in masks])
        self._left = [left for mask in masks for left in mask.left()]

    def override(self, logits: Tensor, labels: Tensor, log_probs: Tensor) -> Tensor:
        """Log-probabilities with log π_S where tokens were cut.

        Args:
            logits: z̃ of a padded forward (B, T, V) or a packed one (1, total, V).
            labels: the token that follows each row, logits' shape without V.
            log_probs: of the labels, of the same shape.

        Returns:
            As ``log_probs``.
        """
        at, inside = flat_rows(self._sample, self._position, tuple(labels.shape), self._attention_mask)
        kept = inside.nonzero().flatten().tolist()
        if not kept:
            return log_probs
        left = [self._left[i] for i in kept]
        which = np.repeat(np.arange(len(left)), [len(ids) for ids in left])
        # The row before a position chose its token.
        rows, members, ids = (
            part.to(logits.device)
            for part in (at[inside] - 1, torch.from_numpy(which), torch.from_numpy(np.concatenate(left)))
        )
        corrected = log_probs_among(logits.flatten(0, -2), labels.flatten(), rows, members, ids)
        return log_probs.flatten().index_copy(0, rows, corrected.to(log_probs.dtype)).view_as(log_probs)


@contextmanager
def corrected(side_inputs: Sequence[Any] | None, attention_mask: Tensor) -> Iterator[None]:
    """Corrects the log-probabilities of the forward in this context by the samples' sampling masks.

    Args:
        side_inputs: of the batch, see `side_inputs.py`.
        attention_mask: (B, T).

    Raises:
        RuntimeError: where a sample has no mask, or no log-probabilities came through.
    """
    candidates = [each.sampling_mask for each in unpack(side_inputs) if each is not None]
    masks = [mask for mask in candidates if mask is not None]
    missing = len(attention_mask) - len(masks)
    if missing:
        raise RuntimeError(
            f"--sampling.correct_mask: {missing} of {len(attention_mask)} samples came without their sampling mask:"
            " the rollout's engine does not record them, or an agent drops mm_train_inputs from its response."
        )
    override = MaskCorrection(masks, attention_mask).override
    with override_log_probs(override, "--sampling.correct_mask did not come into effect", "Take that path out."):
        yield
