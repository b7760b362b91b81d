# SPDX-License-Identifier: Apache-2.0
"""The records of a batch as tensors, one after the other, and the rows of their positions in a forward's tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from perturbations import InputEdit, ReplayRecord, streams


@dataclass(frozen=True)
class FlatRecords:
    """The records of a batch, concatenated: N positions in all."""

    sample: Tensor  # index in the batch, (N,) int64
    position: Tensor  # in the trajectory, (N,) int64
    edit: InputEdit  # the recorded inputs
    noise_keys: Tensor | None  # keys of the recorded noise, (N,) int64; None where no input has noise
    seeds: Tensor  # the trajectories' seeds, (N,) int64


def flatten(records: Sequence[ReplayRecord | None], device: torch.device) -> FlatRecords:
    """The records of a batch, one per row or None, concatenated on a device."""
    rows: list[int] = []  # the batch's rows with a perturbed position
    present: list[ReplayRecord] = []  # their records
    for row, record in enumerate(records):
        if record is not None and len(record):
            rows.append(row)
            present.append(record)
    if not present:
        return _no_positions(device)

    width = max(record.ids.shape[1] for record in present)  # K
    ids = [_widened(record.ids, width, "edge") for record in present]
    weights = [_widened(record.weights, width, "constant") for record in present]
    row_of_positions = [np.full(len(record), row) for row, record in zip(rows, present)]
    seed_of_positions = [np.full(len(record), record.seed, dtype=np.int64) for record in present]
    edit = InputEdit(
        ids=_joined(ids, np.int64, device),
        weights=_joined(weights, np.float32, device),
        sigma=_joined_field(present, "sigma", device),
        vectors=_joined_field(present, "vectors", device),
        normalizer=_joined_field(present, "normalizer", device),
    )
    position = _joined([record.positions for record in present], np.int64, device)
    seeds = _joined(seed_of_positions, np.int64, device)
    sample = _joined(row_of_positions, np.int64, device)
    noise_keys = None if edit.sigma is None else streams.keys(seeds, position, streams.Stream.NOISE)
    return FlatRecords(sample, position, edit, noise_keys, seeds)


def _widened(array: np.ndarray, width: int, mode: Literal["edge", "constant"]) -> np.ndarray:
    """A record's candidates as (n, K), K = ``width``.

    ``mode``: with ``edge`` each row repeats its last candidate, for ids; with ``constant`` it ends in zeros, for
    weights.
    """
    missing = width - array.shape[1]
    return np.pad(array, ((0, 0), (0, missing)), mode=mode) if missing else array


def _joined(arrays: Iterable[np.ndarray], dtype: type, device: torch.device) -> Tensor:
    """Arrays concatenated along the first dimension, as a tensor."""
    array = np.concatenate(list(arrays)).astype(dtype, copy=False)
    return torch.from_numpy(array).to(device)


def _joined_field(records: Sequence[ReplayRecord], name: str, device: torch.device) -> Tensor | None:
    """An optional field of all records, float32, with zeros for a record that lacks it; None where all lack it."""
    arrays = [getattr(record, name) for record in records]
    shape = next((array.shape[1:] for array in arrays if array is not None), None)
    if shape is None:
        return None
    filled = []
    for record, array in zip(records, arrays):
        filled.append(np.zeros((len(record), *shape)) if array is None else array)
    return _joined(filled, np.float32, device)


def _no_positions(device: torch.device) -> FlatRecords:
    """The records of a batch without perturbed positions.

    It has noise and a normalizer for no rows, so that learned parameters and densities take part in the graph: on
    several ranks all must reduce the same gradients, zero among them.
    """
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    no_ids = nothing.view(0, 1)
    no_floats = nothing.float()
    edit = InputEdit(no_ids, no_ids.float(), sigma=no_floats, normalizer=no_floats)
    return FlatRecords(sample=nothing, position=nothing, edit=edit, noise_keys=nothing, seeds=nothing)


def flat_rows(
    sample: Tensor, position: Tensor, shape: tuple[int, ...], attention_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The rows of N recorded positions in a forward's flattened tokens, and whether each position is among them.

    Returns rows (N,) int64, and inside (N,) bool, which is False for a position that the trainer has cut off.

    Args:
        sample: the positions' index in the batch, (N,) int64.
        position: in their trajectories, (N,) int64.
        shape: of the forward's tokens: (B, T) for a padded batch, (1, total) for a packed one; ``ValueError`` for
            another.
        attention_mask: (B, T), 1 at real tokens, padded on either side; None for a batch without left padding.
    """
    if attention_mask is None:
        inside = (position < shape[1]) & (sample < shape[0])
        return sample * shape[1] + position, inside
    mask = attention_mask.bool()
    lengths = mask.sum(dim=-1)
    inside = position < lengths[sample]
    if tuple(shape) == tuple(mask.shape):
        first_token = mask.int().argmax(dim=-1)  # after the left padding, (B,)
        return sample * shape[1] + first_token[sample] + position, inside
    # The sum waits for the device, in the packed layout only. Packing the batch waits for it as well.
    if shape[0] == 1 and shape[1] == int(lengths.sum()):
        starts = torch.cumsum(lengths, dim=0) - lengths
        return starts[sample] + position, inside
    raise ValueError(
        f"replay cannot place its records: the model was given {tuple(shape)} tokens, the attention mask is"
        f" {tuple(mask.shape)} with {int(lengths.sum())} real tokens. Give padded batches (B, T) or packed ones"
        " (1, total), no sequence-parallel slices (ring attention)."
    )
