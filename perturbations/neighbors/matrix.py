# SPDX-License-Identifier: Apache-2.0
"""An embedding matrix, of which each tensor-parallel rank may hold a shard, and the scores of pairs of its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perturbations.errors import UsageError, nearest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

METRICS = ("cosine", "l2", "l1", "dot")

# Rows widened to float64 at once: on a CPU few enough for its cache, which is ten times as fast.
ROWS_CPU, ROWS_DEVICE = 256, 4096


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
    """The rows of a (V, D) matrix E in this process; all of them where there is one rank.

    Attributes:
        rows: E[first : first + n], (n, D); n is the same on every rank, and rows from V on are padding.
        size: V.
        gather: concatenates each rank's tensor (m, ...) in the ranks' order, (ranks · m, ...). Every rank must call it.
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


class PairScores:
    """Cosine, dot product, or negative L2 or L1 distance: computed in float64, rounded to float32, for every index.

    The cosine with a zero vector, which has no direction, is defined as -1. ``norms``: of all tokens, (V,) float64.
    """

    def __init__(self, shard: Shard, metric: str) -> None:
        """
        Args:
            shard: of an embedding matrix (V, D), any float dtype; kept by reference, not copied.
            metric: cosine, l2, l1 or dot.

        Raises:
            UsageError: for an unknown metric, or an embedding that is not a finite matrix.
        """
        if metric not in METRICS:
            raise UsageError(f"metric={metric!r}: must be one of {', '.join(METRICS)}.{nearest(str(metric), METRICS)}")
        if shard.rows.dim() != 2 or not shard.rows.is_floating_point():
            raise UsageError(
                f"embedding of shape {tuple(shard.rows.shape)} and {shard.rows.dtype}: must be a (V, D) matrix of"
                " floats."
            )
        self.metric, self._shard = metric, shard
        self.block = ROWS_CPU if shard.rows.device.type == "cpu" else ROWS_DEVICE
        with torch.inference_mode(False), torch.no_grad():
            parts = [part.double().square().sum(dim=-1).sqrt() for part in shard.rows.split(self.block)]
            self.norms = shard.gather(torch.cat(parts))[: shard.size]
        bad = (~torch.isfinite(self.norms)).nonzero().flatten().tolist()
        if bad:
            raise UsageError(
                f"embedding row {bad[0]} (and {len(bad) - 1} more) is not finite: the model's weights are broken."
            )

    def of(self, tokens: Tensor, own: Tensor, pairs: Tensor, others: Tensor) -> Tensor:
        """Scores of N pairs of tokens, (N,) float32.

        Args:
            tokens, own: (Q,) int64, and their embeddings, (Q, D).
            pairs: the index into ``tokens`` of each pair, (N,) int64.
            others: the other token of each pair, one of this rank's, (N,) int64.
        """
        scores = []
        for at, right in zip(pairs.split(self.block), others.split(self.block)):
            a, b = own[at].double(), self._shard.rows[right - self._shard.first].double()
            if self.metric == "l1":
                score = -(a - b).abs().sum(dim=-1)
            elif self.metric == "l2":
                score = -(a - b).square().sum(dim=-1).sqrt()
            else:
                score = (a * b).sum(dim=-1)
            if self.metric == "cosine":
                scale = self.norms[tokens[at]] * self.norms[right]
                score = torch.where(scale > 0.0, score / scale.clamp_min(torch.finfo(torch.float64).tiny), -1.0)
            scores.append(score)
        return torch.cat(scores).float()


def order(ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts along the last dimension by falling score, equal scores by rising id."""
    ids, by_id = ids.sort(dim=-1)
    scores, by_score = scores.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, by_score), scores
