# SPDX-License-Identifier: Apache-2.0
"""``--sampling.correct_mask``: log-probabilities among the tokens that the rollout's sampling left.

With top-p, top-k or min-p the rollout draws from π_S, the policy renormalised over the set S of tokens left, while a
trainer scores π. Here the old, the new and the reference log-probabilities are all log π_S(x) = z_x − log Σ_{v ∈ S}
exp z_v, with S as recorded at the rollout (`perturbations.replay.sampling_mask`) and gradient to every z_v in S. The
functions at the end are the ``sampling_mask`` rows of `patches.py`. A density, whose context is inside
of this one, takes the place of what stands here at perturbed positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ngrpo.trainers.openrlhf.loss import replacing
from ngrpo.trainers.openrlhf.side_inputs import unpack
from perturbations.errors import present
from perturbations.replay.flat_records import flat_rows
from perturbations.replay.sampling_mask import SamplingMask

if TYPE_CHECKING:
    from openrlhf.trainer.ppo_utils.experience import Experience

    from ngrpo.trainers.openrlhf.objects import ActorTrainer


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

    def replace(self, logits: Tensor, labels: Tensor, log_probs: Tensor) -> Tensor:
        """Log-probabilities with log π_S where tokens were cut.

        Args:
            logits: z̃ of a padded forward (B, T, V) or a packed one (1, total, V).
            labels: the token that follows each row, logits' shape without V.
            log_probs: of the labels, likewise.

        Returns:
            As ``log_probs``.
        """
        at, inside = flat_rows(self._sample, self._position, tuple(labels.shape), self._attention_mask)
        present = inside.nonzero().flatten().tolist()
        if not present:
            return log_probs
        left = [self._left[i] for i in present]
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
    """Corrects the log-probabilities of the forward in this context.

    Args:
        side_inputs: ``mm_train_inputs`` of the batch.
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
    replace = MaskCorrection(masks, attention_mask).replace
    with replacing(replace, "--sampling.correct_mask did not come into effect", "Take that path out."):
        yield


def correcting_model(plain: type) -> type:
    """`PolicyModelActor` and `ReferenceModelActor`: their log-probabilities are corrected."""

    class CorrectingModelActor(plain):  # type: ignore[misc, valid-type]
        def forward(
            self,
            sequences: Tensor,
            action_mask: Tensor | None = None,
            attention_mask: Tensor | None = None,
            **kwargs: Any,
        ) -> Any:
            with corrected(kwargs.get("mm_train_inputs_list"), present(attention_mask, "attention_mask")):
                return super().forward(sequences, action_mask, attention_mask, **kwargs)

    return CorrectingModelActor


def correcting_training_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """`ActorPPOTrainer.training_step`: the forward that is differentiated is corrected too."""

    def training_step(self: ActorTrainer, experience: Experience, *args: object, **kwargs: object) -> dict[str, Any]:
        with corrected(experience.mm_train_inputs, experience.attention_mask):
            return original(self, experience, *args, **kwargs)

    return training_step
