# SPDX-License-Identifier: Apache-2.0
"""The contract of a neighbor index, and the table in which all of ours keep a row for each token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from perturbations.errors import UsageError

_SCRATCH_CPU, _SCRATCH_DEVICE = 64 << 20, 512 << 20  # bytes of temporary values held at once
_BYTES = 16  # of them for each pair of tokens that is compared: three numbers and a few flags


class NeighborIndex(ABC):
    """Nearest tokens of a token. An index belongs to one state of the weights; new weights need a new one."""

    @abstractmethod
    def query(self, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k ≥ 1 nearest other tokens of each token, (B,) int64 on the embedding's device.

        Returns:
            ids (B, k) int64, best first and never the token itself; scores (B, k) float32, higher is nearer.

        Raises:
            ValueError: where there are fewer than k other tokens.
        """

    def precompute(self, k: int) -> None:
        """Does the work of queries for up to k neighbors ahead of time, where the index can."""
        return None

    def follow(self) -> None:
        """Keeps its results for an index of later weights, where the index can. Called before any query."""
        return None

    def take_over(self, old: NeighborIndex) -> None:
        """Takes valid rows from an index of earlier weights that follows; answers do not change."""
        return None


class TableIndex(NeighborIndex):
    """Answers queries from a table of rows that a subclass computes in :meth:`search`.

    On a CPU rows are filled on first use. Elsewhere the first query computes the whole table, so that later queries
    are a gather without host synchronisation.
    """

    def __init__(self, size: int, device: torch.device, exclude: Sequence[int] = (), lazy: bool | None = None) -> None:
        """
        Args:
            size: V.
            device: of the table.
            exclude: ids that are never neighbors; they may still be queried. ``UsageError`` for one that is no token.
            lazy: fill rows on first use; None for the rule above.
        """
        bad = [i for i in exclude if not 0 <= i < size]
        if bad:
            raise UsageError(f"exclude holds id {bad[0]}: must be in [0, {size - 1}], the embedding's rows.")
        self._size, self._device = size, device
        with torch.inference_mode(False):
            self._excluded = torch.zeros(size, dtype=torch.bool, device=device)
            self._excluded[torch.tensor(sorted(set(exclude)), dtype=torch.int64, device=device)] = True
        self._lazy = device.type == "cpu" if lazy is None else lazy
        self._scratch = _SCRATCH_CPU if device.type == "cpu" else _SCRATCH_DEVICE
        self.width = 0
        """The largest k of a query."""

    @abstractmethod
    def search(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Computes rows: ids (Q, k) int64 and scores (Q, k) float32, best first, equal scores by rising id.

        ``tokens``: (Q,) int64; four (Q, V) float32 tensors fit into the scratch memory. ``k``: in [1, :attr:`most`].
        """

    def query(self, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As :meth:`NeighborIndex.query`; ``UsageError`` for a k beyond :attr:`most`, or on a CPU an unknown id."""
        if k > self.width or k < 1:
            self._widen(k)
            if not self._lazy:
                self._fill_all()
        if self._lazy:
            try:
                is_filled = self._filled.index_select(0, token_ids)
            except (IndexError, RuntimeError):
                for bad in token_ids[(token_ids < 0) | (token_ids >= self._size)].tolist():
                    what = f"token id {bad}: must be in [0, {self._size - 1}], the embedding's rows."
                    raise UsageError(what) from None
                raise
            if not is_filled.all():
                self._fill(token_ids[~is_filled].unique())
        ids = self._ids.index_select(0, token_ids)[:, :k].long()
        return ids, self._scores.index_select(0, token_ids)[:, :k]

    def precompute(self, k: int) -> None:
        """Fills the whole table for up to k neighbors, in blocks of bounded memory."""
        if k > self.width or k < 1:
            self._widen(k)
        self._fill_all()

    @property
    def most(self) -> int:
        """The largest k: an excluded token has as many other tokens as any."""
        return max(self._size - int(self._excluded.sum()) - 1, 0)

    def _widen(self, k: int) -> None:
        if not 1 <= k <= self.most:
            excluded = f" without {int(self._excluded.sum())} excluded ones" if bool(self._excluded.any()) else ""
            raise UsageError(
                f"k={k} neighbors: must be in [1, {self.most}], the other tokens of a vocabulary of"
                f" {self._size}{excluded}."
            )
        with torch.inference_mode(False):
            self._ids = torch.zeros(self._size, k, dtype=torch.int32, device=self._device)
            self._scores = torch.zeros(self._size, k, dtype=torch.float32, device=self._device)
            self._filled = torch.zeros(self._size, dtype=torch.bool, device=self._device)
        self.width = k

    def _fill_all(self) -> None:
        self._fill((~self._filled).nonzero().flatten())

    def _fill(self, tokens: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for block in tokens.split(max(1, self._scratch // (_BYTES * self._size))) if len(tokens) else ():
                ids, scores = self.search(block, self.width)
                self._ids[block], self._scores[block] = ids.int(), scores
                self._filled[block] = True
