# SPDX-License-Identifier: Apache-2.0
"""What a sample carries through OpenRLHF: its replay record, the rollout's log-probabilities, its sampling mask.

OpenRLHF carries a dictionary for each sample, ``mm_train_inputs``, from the rollout to the actor's forward, the
reference's forward and the training step. It is meant for images, beside which ours stands; text-only models ignore it,
and :func:`without_ours` takes ours out before a multimodal model's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from ngrpo.rollout.sampling_mask import SamplingMask
from ngrpo.trainers.openrlhf.unperturbed import UnperturbedAnswer
from perturbations.replay import ReplayRecord, packing

if TYPE_CHECKING:
    import torch

_REPLAY, _LOG_PROBS, _MASK = "perturbation_record", "perturbation_log_probs", "sampling_mask"
_VERSION = 1  # of the bytes of log-probabilities and counts
_COUNTS, _UNPERTURBED = "perturbation_counts", "unperturbed_answer"
_OURS = (_REPLAY, _LOG_PROBS, _MASK, _COUNTS, _UNPERTURBED)


@dataclass(frozen=True)
class TrajectoryRecord:
    """What is kept of one sample's rollout.

    Attributes:
        replay: the perturbed inputs.
        log_probs: log π at the rollout by position in the sequence, NaN where no token was generated, (T,) float32.
        mask: the tokens that sampling left at each position, None where that is not recorded.
        dropped: edits of earlier turns whose tokens an agent or a chat template has changed.
        prompted: tokens of the prompts of all turns.
        cached: how many of these the engine found in its prefix cache.
        unperturbed: a short answer of the same engine with the perturbation off, None after most samples.
    """

    replay: ReplayRecord
    log_probs: np.ndarray
    mask: SamplingMask | None = None
    dropped: int = 0
    prompted: int = 0
    cached: int = 0
    unperturbed: UnperturbedAnswer | None = None

    def pack(self) -> dict[str, bytes]:
        """As plain bytes with checksums: nothing that OpenRLHF would move to a device or pad."""
        log_probs = packing.sealed([packing.floats(self.log_probs)], _VERSION)
        packed = {_REPLAY: self.replay.to_bytes(), _LOG_PROBS: log_probs}
        counts = [packing.varint(count) for count in (self.dropped, self.prompted, self.cached)]
        packed[_COUNTS] = packing.sealed(counts, _VERSION)
        if self.unperturbed is not None:
            packed[_UNPERTURBED] = self.unperturbed.pack()
        return packed if self.mask is None else {**packed, _MASK: self.mask.to_bytes()}


def unpack(side_inputs: Sequence[Any] | None) -> list[TrajectoryRecord | None]:
    """The records of a batch.

    Args:
        side_inputs: ``Experience.mm_train_inputs``: one dictionary or None per sample.

    Returns:
        One per sample, None where the sample has none.

    Raises:
        ValueError: where bytes were cut or altered on their way.
    """
    return [_unpack_one(entry) for entry in side_inputs or ()]


def records(side_inputs: Sequence[Any] | None, batch: int) -> list[ReplayRecord]:
    """The replay records of a training batch, in order; a sample without a perturbed position has an empty one.

    Raises:
        RuntimeError: where a sample has none.
    """
    found = unpack(side_inputs) or [None] * batch
    missing = [i for i, record in enumerate(found) if record is None]
    if missing or len(found) != batch:
        raise RuntimeError(
            f"{len(missing) or batch - len(found)} of {batch} samples have no replay record (the first:"
            f" {missing[:5]}). Each sample of a perturbed run brings its own in mm_train_inputs; without it the model"
            " would be trained on inputs that the rollout did not see. A custom executor must hand on what generate()"
            " returns."
        )
    return [record.replay for record in found if record is not None]


def without_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    """`merge_mm_train_inputs`: what a multimodal model's forward gets of a batch, without what is ours."""

    @wraps(original)
    def merge_mm_train_inputs(mm_train_inputs_list: Sequence[Any], device: torch.device) -> Any:
        return original([_theirs(entry) for entry in mm_train_inputs_list], device)

    return merge_mm_train_inputs


def _theirs(entry: Any) -> Any:
    if isinstance(entry, list):
        return [_theirs(one) for one in entry]
    return {name: value for name, value in (entry or {}).items() if name not in _OURS} or None


def _unpack_one(entry: Any) -> TrajectoryRecord | None:
    if not entry or _REPLAY not in entry:
        return None
    log_probs, counts = (packing.unsealed(entry[name], _VERSION, name) for name in (_LOG_PROBS, _COUNTS))
    return TrajectoryRecord(
        ReplayRecord.from_bytes(entry[_REPLAY]),
        np.frombuffer(log_probs.rest(), "<f4").astype(np.float32),
        SamplingMask.from_bytes(entry[_MASK]) if _MASK in entry else None,
        dropped=counts.varint(),
        prompted=counts.varint(),
        cached=counts.varint(),
        unperturbed=UnperturbedAnswer.unpack(entry[_UNPERTURBED]) if _UNPERTURBED in entry else None,
    )
