# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's ``Experience``, a micro-batch of B responses: values at its trained tokens, and the marks of a credit.

Its tensors of tokens have A columns; entry t of ``action_mask`` (B, A) says whether token t + 1 of the sequence is
trained.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ngrpo.machine.upstream.types import Experience


def masked(experiences: Sequence[Experience], values: Sequence[Tensor]) -> Tensor:
    """The values of a step's trained tokens in one row, (N,).

    Args:
        experiences: the micro-batches of the step.
        values: of each micro-batch, (B, A) on the device of its action mask.
    """
    rows = [of_batch[experience.action_mask.bool()] for experience, of_batch in zip(experiences, values, strict=True)]
    return torch.cat(rows)


def set_marks(experience: Experience, marks: Tensor) -> None:
    """Keeps a credit's marks (`Credit.marks`) of a micro-batch, (B, A) bool, until its training step.

    They travel in ``experience.kl``. OpenRLHF 0.11.2 reads that field while it computes advantages, then sets it to
    None, and its replay buffer splits and pads the field with the samples.
    """
    experience.kl = marks


def marks_of(experience: Experience) -> Tensor | None:
    """The marks that :func:`set_marks` kept, (B, A) bool; None for a credit without marks."""
    return experience.kl
