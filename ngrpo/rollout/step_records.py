# SPDX-License-Identifier: Apache-2.0
"""The draws of a step on their way from the device to the host.

A graph sends them as one matrix of words (:class:`PackedRecord`); the parts of a step without a graph send a tensor for
each field (:class:`SeparateRecord`). `async_scheduling.py` reads either once the copies have arrived.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

# The fields of an edit that take 32-bit words, in their order in a packed record.
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
        token_log_probs: log π of each row's token, (B,) float32.
        gated_rows: the rows for which an edit was proposed, (G,) int64.
        fields: the fields of these edits by name, of G rows each, and ``fed``, (G,) bool; empty where no edit was
            proposed.
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
    log π. The fields that the perturbation's edits have follow, in the order of ``_FIELDS``.
    """

    def __init__(self, recorded: dict[str, Tensor]) -> None:
        """recorded: the fields of a step, as in :class:`~ngrpo.rollout.step_rows.Edited`."""
        self._places: dict[str, slice | int] = {}
        self.width = 2
        for name in _FIELDS:
            field = recorded.get(name)
            if field is None:
                continue
            start = self.width
            if field.dim() == 1:
                self.width = start + 1
                self._places[name] = start
            else:
                self.width = start + field.shape[1]
                self._places[name] = slice(start, self.width)

    def log_probs(self, words: np.ndarray) -> np.ndarray:
        """log π, (B,) float32, in words (B, W) int32."""
        return words[:, 1].view(np.float32)

    def fed(self, words: np.ndarray) -> np.ndarray:
        """Which rows are perturbed, (B,) bool."""
        return (words[:, 0] & 1) > 0

    def fields(self, words: np.ndarray) -> dict[str, np.ndarray]:
        """The fields of the rows in these words by name, ``agreed`` among them."""
        fields: dict[str, np.ndarray] = {"agreed": (words[:, 0] & 2) > 0}
        for name, place in self._places.items():
            field = words[:, place]
            fields[name] = field if name == "ids" else field.view(np.float32)
        return fields


def pack(log_probs: Tensor, recorded: dict[str, Tensor]) -> Tensor:
    """Log π (B,) float32 and the fields of all B rows as words (B, W) int32, in the order of :class:`RecordLayout`."""
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
        rows = self.layout.fed(words).nonzero()[0]
        return rows, self.layout.fields(words if len(rows) == len(words) else words[rows])
