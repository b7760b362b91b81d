# SPDX-License-Identifier: Apache-2.0
"""What a step draws, on its way from the device to the host: in one matrix of a graph, or in a tensor for each field.

Both kinds of record are read once their copies have arrived, by `async_scheduling.py`.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

# The fields of an edit that have 32-bit words, in the order of a packed record.
_FIELDS = ("ids", "weights", "sigma", "vectors", "normalizer")


class StepRecord(Protocol):
    """The draws of a step's B rows."""

    def log_probs(self) -> np.ndarray:
        """log π of each row's token, (B,) float32."""
        ...

    def edits(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The M rows that are perturbed, (M,) int64, and the fields of their edits by name, ``agreed`` among them."""
        ...


@dataclass(frozen=True)
class SeparateRecord:
    """A record with a tensor on the host for each field.

    Attributes:
        token_log_probs: (B,) float32.
        gated_rows: the rows for which an edit was proposed, (G,) int64.
        fields: of their edits, G rows each, and ``fed``, (G,) bool; empty for no edits.
    """

    token_log_probs: Tensor
    gated_rows: np.ndarray
    fields: dict[str, Tensor]

    def log_probs(self) -> np.ndarray:
        """As :meth:`StepRecord.log_probs`."""
        return self.token_log_probs.numpy()

    def edits(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """As :meth:`StepRecord.edits`."""
        fields = {name: field.numpy() for name, field in self.fields.items()}
        if not fields:
            return self.gated_rows[:0], fields
        fed = fields.pop("fed")
        if fed.all():
            return self.gated_rows, fields
        return self.gated_rows[fed], {name: field[fed] for name, field in fields.items()}


class RecordLayout:
    """Where the fields of a row's record are among its W 32-bit words.

    Word 0 has two flags: bit 0, whether the edit is fed, and bit 1, whether the text has the sampled token. Word 1 is
    log π. The fields of the edit follow, those that the perturbation has.
    """

    def __init__(self, recorded: dict[str, Tensor]) -> None:
        """recorded: the fields of a step, as of :class:`~ngrpo.rollout.step_kernels.Edited`."""
        self._places: dict[str, slice | int] = {}
        self.width = 2
        for name in _FIELDS:
            if name not in recorded:
                continue
            if recorded[name].dim() == 1:
                self._places[name] = self.width
                self.width += 1
            else:
                end = self.width + recorded[name].shape[1]
                self._places[name] = slice(self.width, end)
                self.width = end

    def log_probs(self, words: np.ndarray) -> np.ndarray:
        """log π, (B,) float32, of words (B, W) int32."""
        return words[:, 1].view(np.float32)

    def fed(self, words: np.ndarray) -> np.ndarray:
        """Which rows are perturbed, (B,) bool."""
        return (words[:, 0] & 1) > 0

    def fields(self, words: np.ndarray) -> dict[str, np.ndarray]:
        """The fields of all rows by name, ``agreed`` among them."""
        fields: dict[str, np.ndarray] = {"agreed": (words[:, 0] & 2) > 0}
        for name, place in self._places.items():
            field = words[:, place]
            fields[name] = field if name == "ids" else field.view(np.float32)
        return fields


def pack(log_probs: Tensor, recorded: dict[str, Tensor]) -> Tensor:
    """The words (B, W) int32 of a :class:`RecordLayout`, from log π (B,) float32 and the fields of all B rows."""
    flags = recorded["fed"].to(torch.int32) | (recorded["agreed"].to(torch.int32) << 1)
    columns = [flags.unsqueeze(1), log_probs.view(torch.int32).unsqueeze(1)]
    for name in _FIELDS:
        if name in recorded:
            words = recorded[name].contiguous().view(torch.int32)
            columns.append(words.unsqueeze(1) if words.dim() == 1 else words)
    return torch.cat(columns, dim=1)


@dataclass(frozen=True)
class PackedRecord:
    """A record as a matrix of words.

    Attributes:
        words: (B, W) int32 on the host.
        layout: of the words.
    """

    words: Tensor
    layout: RecordLayout

    def log_probs(self) -> np.ndarray:
        """As :meth:`StepRecord.log_probs`."""
        return self.layout.log_probs(self.words.numpy())

    def edits(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """As :meth:`StepRecord.edits`."""
        words = self.words.numpy()
        fed = self.layout.fed(words)
        rows = fed.nonzero()[0]
        return rows, self.layout.fields(words if len(rows) == len(words) else words[rows])
