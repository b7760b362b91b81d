# SPDX-License-Identifier: Apache-2.0
"""An embedding matrix, of which each tensor-parallel rank may hold a part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _alone(tensor: Tensor) -> Tensor:
    return tensor


def over_ranks(group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    """:attr:`Shard.gather` over a process group of `torch.distributed`."""

    def gather(tensor: Tensor) -> Tensor:
        mine = tensor.contiguous().view(torch.uint8)  # not every backend knows every dtype
        shards = [torch.empty_like(mine) for _ in range(group.size())]
        torch.distributed.all_gather(shards, mine, group=group)
        return torch.cat(shards).view(tensor.dtype)

    return gather


@dataclass(frozen=True)
class Shard:
    """The rows of a (V, D) matrix E that this process holds; all of them where there is one rank.

    Attributes:
        rows: E[first : first + n], (n, D); n is the same on every rank, and rows from V on are padding.
        size: V.
        first: the token of the first row.
        gather: a tensor (m, ...) of each rank, concatenated in the ranks' order, (ranks · m, ...). Every rank must call
            it alike.
    """

    rows: Tensor
    size: int
    first: int = 0
    gather: Callable[[Tensor], Tensor] = _alone

    @classmethod
    def of(cls, matrix: Tensor | Shard) -> Shard:
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
