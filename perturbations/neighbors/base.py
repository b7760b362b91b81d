# SPDX-License-Identifier: Apache-2.0
"""The contract of a neighbor index, its table of rows, and the embedding matrix, perhaps in shards."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perturbations.errors import UsageError

_SCRATCH_CPU = 64 << 20  # bytes of temporary values held at once
_SCRATCH_DEVICE = 512 << 20
_BYTES_PER_PAIR = 16  # of temporary values for two tokens that are compared: three numbers and a few flags


def _alone(tensor: Tensor) -> Tensor:
    """:attr:`Shard.gather` of a single rank."""
    return tensor


def over_ranks(group: "torch.distributed.ProcessGroup") -> Callable[[Tensor], Tensor]:
    """:attr:`Shard.gather` over a process group of `torch.distributed`."""

    def gather(tensor: Tensor) -> Tensor:
        own_bytes = tensor.contiguous().view(torch.uint8)  # every backend can gather bytes, and not every dtype
        bytes_of_ranks = [torch.empty_like(own_bytes) for _ in range(group.size())]
        torch.distributed.all_gather(bytes_of_ranks, own_bytes, group=group)
        return torch.cat(bytes_of_ranks).view(tensor.dtype)

    return gather


@dataclass(frozen=True)
class Shard:
    """The rows of a (V, D) matrix E in this process; all of them where there is one rank.

    Attributes:
        rows: E[first : first + n], (n, D). n is the same on every rank, so rows from V on may be padding.
        size: V, without the padding.
        first: the row of E at which the shard begins.
        gather: concatenates each rank's tensor (m, ...) in the ranks' order, (ranks · m, ...). Every rank must call it.
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
        local_rows = tokens - self.first
        is_local = (local_rows >= 0) & (local_rows < len(self.rows))
        vectors = self.rows[torch.where(is_local, local_rows, 0)]  # (N, D)
        if self.gather is _alone:
            return vectors
        # One rank holds a token's row. The other ranks add zeros to it, which changes no bit.
        own_vectors = vectors.masked_fill(~is_local.unsqueeze(-1), 0)
        vectors_of_ranks = self.gather(own_vectors).view(-1, *vectors.shape)  # (ranks, N, D)
        return vectors_of_ranks.sum(dim=0)


def fills_on_demand(device: torch.device) -> bool:
    """Whether rows of a table are computed on first use: the whole table takes half a minute on a CPU."""
    return device.type == "cpu"


def order(ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts along the last dimension by falling score, equal scores by rising id."""
    ids_by_id, by_id = ids.sort(dim=-1)
    scores_by_id = scores.gather(-1, by_id)
    scores_by_score, by_score = scores_by_id.sort(dim=-1, descending=True, stable=True)
    return ids_by_id.gather(-1, by_score), scores_by_score


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
        """Makes an empty table for V = ``size`` tokens.

        ``exclude``: tokens that are never neighbors. ``lazy``: whether rows are filled on first use; None for the rule
        of the class.
        """
        for token in exclude:
            if not 0 <= token < size:
                raise UsageError(f"exclude holds id {token}: must be in [0, {size - 1}], the embedding's rows.")
        self._size = size
        self._device = device
        with torch.inference_mode(False):
            self._excluded = torch.zeros(size, dtype=torch.bool, device=device)
            self._excluded[torch.tensor(sorted(set(exclude)), dtype=torch.int64, device=device)] = True
        self._lazy = fills_on_demand(device) if lazy is None else lazy
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
            self._fill_missing(token_ids)
        ids = self._ids.index_select(0, token_ids)[:, :k].long()
        scores = self._scores.index_select(0, token_ids)[:, :k]
        return ids, scores

    def _fill_missing(self, token_ids: Tensor) -> None:
        """Fills the tokens' rows that are not filled yet; ``UsageError`` for an unknown id."""
        try:
            is_filled = self._filled.index_select(0, token_ids)
        except (IndexError, RuntimeError):
            unknown = token_ids[(token_ids < 0) | (token_ids >= self._size)].tolist()
            if not unknown:
                raise
            limit = f"must be in [0, {self._size - 1}], the embedding's rows"
            raise UsageError(f"token id {unknown[0]}: {limit}.") from None
        if not is_filled.all():
            self._fill(token_ids[~is_filled].unique())

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
        table_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())
        return table_bytes + self._scratch if table_bytes else 0

    @property
    def most(self) -> int:
        """The largest k that every token has: all tokens but the excluded ones and the token itself."""
        return max(self._size - int(self._excluded.sum()) - 1, 0)

    def _widen(self, k: int) -> None:
        """Makes an empty table with k columns; ``UsageError`` for a k beyond :attr:`most`."""
        if not 1 <= k <= self.most:
            excluded_count = int(self._excluded.sum())
            without_excluded = f" without {excluded_count} excluded ones" if excluded_count else ""
            raise UsageError(
                f"k={k} neighbors: must be in [1, {self.most}], the other tokens of a vocabulary of"
                f" {self._size}{without_excluded}."
            )
        with torch.inference_mode(False):
            self._ids = torch.zeros(self._size, k, dtype=torch.int32, device=self._device)
            self._scores = torch.zeros(self._size, k, dtype=torch.float32, device=self._device)
            self._filled = torch.zeros(self._size, dtype=torch.bool, device=self._device)
        self.width = k

    def _fill(self, tokens: Tensor) -> None:
        """Computes the tokens' rows, as many at once as the scratch memory allows."""
        if not len(tokens):
            return
        rows_at_once = max(1, self._scratch // (_BYTES_PER_PAIR * self._size))
        with torch.inference_mode(False), torch.no_grad():
            for block in tokens.split(rows_at_once):
                ids, scores = self.search(block, self.width)
                self._ids[block] = ids.int()
                self._scores[block] = scores
                self._filled[block] = True
