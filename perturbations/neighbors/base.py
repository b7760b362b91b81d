# SPDX-License-Identifier: Apache-2.0
"""The contract of a neighbor index, its table of rows, and the embedding matrix, perhaps in shards."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations.errors import UsageError

_SCRATCH_CPU, _SCRATCH_DEVICE = 64 << 20, 512 << 20  # bytes of temporary values held at once
_BYTES = 16  # of them for each pair of tokens that is compared: three numbers and a few flags


def _alone(tensor: Tensor) -> Tensor:
    return tensor


def over_ranks(group: "torch.distributed.ProcessGroup") -> Callable[[Tensor], Tensor]:
    """:attr:`Shard.gather` over a process group of `torch.distributed`."""

    def gather(tensor: Tensor) -> Tensor:
        mine = tensor.contiguous().view(torch.uint8)  # not every backend knows every dtype
        shards = [torch.empty_like(mine) for _ in range(group.size())]
        torch.distributed.all_gather(shards, mine, group=group)
        return torch.cat(shards).view(tensor.dtype)

    return gather


@dataclass(frozen=True)
class Shard:
    """The rows of a (V, D) matrix E in this process; all of them where there is one rank.

    ``rows`` are E[first : first + n], (n, D); n is the same on every rank, and rows from V = ``size`` on are padding.
    ``gather`` concatenates each rank's tensor (m, ...) in the ranks' order, (ranks · m, ...). Every rank must call it.
    """

    rows: Tensor
    size: int
    first: int = 0
    gather: Callable[[Tensor], Tensor] = _alone

    @classmethod
    def of(cls, matrix: "Tensor | Shard") -> "Shard":
        """A whole matrix (V, D) as the shard of a single rank; a shard as it is."""
        return matrix if isinstance(matrix, Shard) else cls(matrix.detach(), len(matrix))

    @property
    def real(self) -> Tensor:
        """The rows without the padding."""
        return self.rows[: max(self.size - self.first, 0)]

    def whole(self) -> Tensor:
        """E, (V, D); a copy where there are several ranks."""
        return self.gather(self.rows)[: self.size]

    def lookup(self, tokens: Tensor) -> Tensor:
        """The rows of any tokens (N,) int64, bit for bit: (N, D)."""
        at = tokens - self.first
        here = (at >= 0) & (at < len(self.rows))
        vectors = self.rows[torch.where(here, at, 0)]
        if self.gather is _alone:
            return vectors
        # One rank holds the row, and the others add zeros to it.
        return self.gather(vectors.masked_fill(~here.unsqueeze(-1), 0)).view(-1, *vectors.shape).sum(dim=0)


def order(ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts along the last dimension by falling score, equal scores by rising id."""
    ids, by_id = ids.sort(dim=-1)
    scores, by_score = scores.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, by_score), scores


class NeighborIndex(ABC):
    """Nearest tokens of a token. An index belongs to one state of the weights; new weights need a new one."""

    @abstractmethod
    def query(self, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k ≥ 1 nearest other tokens of each token, (B,) int64; ``ValueError`` where there are fewer.

        Returns ids (B, k) int64, best first, and scores (B, k) float32, higher is nearer.
        """

    def precompute(self, k: int) -> None:
        """Does the work of queries for up to k neighbors ahead of time, where the index can."""
        return None


class TableIndex(NeighborIndex):
    """Serves queries from a table of rows that a subclass computes in :meth:`search`.

    On a CPU rows are filled on first use. Elsewhere the first query fills all; later ones do not wait for the device.
    """

    def __init__(self, size: int, device: torch.device, exclude: Sequence[int] = (), lazy: bool | None = None) -> None:
        """For V = ``size`` tokens; those to ``exclude`` are never neighbors. ``lazy``: None for the rule above."""
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

        Four (Q, V) float32 tensors fit into the scratch memory.
        """

    def query(self, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As :meth:`NeighborIndex.query`; ``UsageError`` for a k beyond :attr:`most`, or on a CPU an unknown id."""
        if k > self.width or k < 1:
            self._widen(k)
            if not self._lazy:
                self.precompute(k)
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
        self._fill((~self._filled).nonzero().flatten())

    def tensors(self) -> tuple[Tensor, ...]:
        """What a query reads on the device; none before the table has a width."""
        return (self._ids, self._scores) if self.width else ()

    @property
    def build_bytes(self) -> int:
        """Memory of the device that building this table takes: its rows, and temporary values for a moment."""
        rows = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())
        return rows + self._scratch if rows else 0

    @property
    def most(self) -> int:
        """The largest k: an excluded token has as many other tokens as any."""
        return max(self._size - int(self._excluded.sum()) - 1, 0)

    def _widen(self, k: int) -> None:
        if not 1 <= k <= self.most:
            excluded = f" without {int(self._excluded.sum())} excluded ones" if bool(self._excluded.any()) else ""
            others = f"the other tokens of a vocabulary of {self._size}{excluded}"
            raise UsageError(f"k={k} neighbors: must be in [1, {self.most}], {others}.")
        with torch.inference_mode(False):
            self._ids = torch.zeros(self._size, k, dtype=torch.int32, device=self._device)
            self._scores = torch.zeros(self._size, k, dtype=torch.float32, device=self._device)
            self._filled = torch.zeros(self._size, dtype=torch.bool, device=self._device)
        self.width = k

    def _fill(self, tokens: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for block in tokens.split(max(1, self._scratch // (_BYTES * self._size))) if len(tokens) else ():
                ids, scores = self.search(block, self.width)
                self._ids[block], self._scores[block] = ids.int(), scores
                self._filled[block] = True
