# SPDX-License-Identifier: Apache-2.0
"""What a sample carries through OpenRLHF: the bytes of its trajectory, in ``mm_train_inputs``.

OpenRLHF carries that dictionary for each sample from the rollout to the actor's forward, the reference's forward and
the training step. It is meant for images, beside which ours stands; text-only models ignore it, and
:func:`without_ours` takes ours out before a multimodal model's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from perturbations.replay import ReplayRecord, packing
from perturbations.replay.trajectory import FinishedTrajectory

if TYPE_CHECKING:
    import torch


def unpack(side_inputs: Sequence[Any] | None) -> list[FinishedTrajectory | None]:
    """The trajectories of a batch.

    Args:
        side_inputs: ``Experience.mm_train_inputs``: one dictionary or None per sample.

    Returns:
        One per sample, None where the sample has none.

    Raises:
        ValueError: where bytes were cut or altered on their way.
    """
    return [
        FinishedTrajectory.unpack(entry) if entry and packing.RECORD in entry else None for entry in side_inputs or ()
    ]


def records(side_inputs: Sequence[Any] | None, batch: int) -> list[ReplayRecord]:
    """The replay records of a training batch, in order; a sample without a perturbed position has an empty one.

    Raises:
        RuntimeError: where a sample has none.
    """
    trajectories = unpack(side_inputs) or [None] * batch
    missing = [i for i, trajectory in enumerate(trajectories) if trajectory is None]
    if missing or len(trajectories) != batch:
        raise RuntimeError(
            f"{len(missing) or batch - len(trajectories)} of {batch} samples have no replay record (the first:"
            f" {missing[:5]}). Each sample of a perturbed run brings its own in mm_train_inputs; without it the model"
            " would be trained on inputs that the rollout did not see. A custom executor must hand on what generate()"
            " returns."
        )
    return [trajectory.record for trajectory in trajectories if trajectory is not None]


def without_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    """`merge_mm_train_inputs`: what a multimodal model's forward gets of a batch, without what is ours."""

    @wraps(original)
    def merge_mm_train_inputs(mm_train_inputs_list: Sequence[Any], device: torch.device) -> Any:
        return original([_theirs(entry) for entry in mm_train_inputs_list], device)

    return merge_mm_train_inputs


def _theirs(entry: Any) -> Any:
    if isinstance(entry, list):
        return [_theirs(one) for one in entry]
    return {name: value for name, value in (entry or {}).items() if name not in packing.PARTS} or None
