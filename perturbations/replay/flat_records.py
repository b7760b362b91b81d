# SPDX-License-Identifier: Apache-2.0
"""The records of a batch as one, and where their positions lie in a forward's input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from perturbations import streams
from perturbations.edit import InputEdit
from perturbations.replay import ReplayRecord


@dataclass(frozen=True)
class FlatRecords:
    """The records of a batch, concatenated: N positions in all.

    Attributes:
        sample: index in the batch, (N,) int64.
        position: position in the trajectory, (N,) int64.
        edit: the recorded inputs.
        noise_keys: (N,) int64, which give the recorded noise; None where nothing is noisy.
        seeds: each trajectory's seed, (N,) int64.
    """

    sample: Tensor
    position: Tensor
    edit: InputEdit
    noise_keys: Tensor | None
    seeds: Tensor


def flatten(records: Sequence[ReplayRecord | None], device: torch.device) -> FlatRecords:
    """The records of a batch, one per row or None, concatenated on a device."""
    present = [(i, r) for i, r in enumerate(records) if r is not None and len(r)]
    if not present:
        # Learned parameters and densities take part in the graph, with a gradient of zero, on every rank.
        none = torch.zeros(0, dtype=torch.int64, device=device)
        ids, floats = none.view(0, 1), none.float()
        return FlatRecords(none, none, InputEdit(ids, ids.float(), floats, None, floats), none, none)

    def joined(parts: Iterable[np.ndarray], dtype: type = np.float32) -> Tensor:
        return torch.from_numpy(np.concatenate(list(parts)).astype(dtype, copy=False)).to(device)

    def optional(name: str) -> Tensor | None:
        """Zeros where a record has none; None where no record has it."""
        shape = next((p.shape[1:] for _, r in present if (p := getattr(r, name)) is not None), None)
        if shape is None:
            return None
        parts = ((r, getattr(r, name)) for _, r in present)
        return joined(np.zeros((len(r), *shape)) if part is None else part for r, part in parts)

    def widened(part: np.ndarray, mode: Literal["edge", "constant"]) -> np.ndarray:
        """Narrower records have weight 0 on their own last candidate, which adds nothing to the sum."""
        missing = width - part.shape[1]
        return np.pad(part, ((0, 0), (0, missing)), mode=mode) if missing else part

    width = max(r.ids.shape[1] for _, r in present)
    ids = joined((widened(r.ids, "edge") for _, r in present), np.int64)
    weights = joined(widened(r.weights, "constant") for _, r in present)
    edit = InputEdit(ids, weights, *(optional(name) for name in ("sigma", "vectors", "normalizer")))
    position = joined((r.positions for _, r in present), np.int64)
    seeds = joined((np.full(len(r), r.seed, dtype=np.int64) for _, r in present), np.int64)
    noise_keys = None if edit.sigma is None else streams.keys(seeds, position, streams.Stream.NOISE)
    return FlatRecords(joined((np.full(len(r), i) for i, r in present), np.int64), position, edit, noise_keys, seeds)


def flat_rows(
    sample: Tensor, position: Tensor, shape: tuple[int, ...], attention_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Where recorded positions lie in a forward's flattened input.

    Args:
        sample, position: of :class:`FlatRecords`, (N,) int64.
        shape: of the forward's input: (B, T) for a padded batch, (1, total) for a packed one without padding.
        attention_mask: (B, T), 1 at real tokens, padded on either side; None for a batch without left padding.

    Returns:
        Rows in the flattened input (N,), and which of them exist (N,) bool: a trajectory may have been cut.

    Raises:
        ValueError: where the shape fits neither layout.
    """
    if attention_mask is None:
        inside = (position < shape[1]) & (sample < shape[0])
        return sample * shape[1] + position, inside
    mask = attention_mask.bool()
    lengths = mask.sum(dim=-1)
    inside = position < lengths[sample]
    if tuple(shape) == tuple(mask.shape):
        first = mask.int().argmax(dim=-1)
        return sample * shape[1] + first[sample] + position, inside
    # One host synchronisation, in the packed layout only; unpadding itself needs the same one.
    if shape[0] == 1 and shape[1] == int(lengths.sum()):
        starts = torch.cumsum(lengths, dim=0) - lengths
        return starts[sample] + position, inside
    raise ValueError(
        f"replay cannot place its records: the model was given {tuple(shape)} tokens, the attention mask is"
        f" {tuple(mask.shape)} with {int(lengths.sum())} real tokens. Padded batches (B, T) and packed ones"
        " (1, total) are supported; sequence-parallel slices (ring attention) are not."
    )
