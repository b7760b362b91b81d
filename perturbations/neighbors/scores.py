# SPDX-License-Identifier: Apache-2.0
"""The scores that define who is near: computed in float64 and rounded to float32, the same for every index."""

from __future__ import annotations

import torch
from torch import Tensor

from perturbations.errors import UsageError
from perturbations.options import nearest
from perturbations.shard import Shard

METRICS = ("cosine", "l2", "l1", "dot")

# Rows widened to float64 at once: on CPU few enough for its cache, which is ten times as fast.
ROWS_CPU, ROWS_DEVICE = 256, 4096


class PairScores:
    """Scores of pairs of tokens: cosine similarity, dot product, or the negative L2 or L1 distance.

    The cosine with a zero vector, which has no direction, is defined as -1.

    Attributes:
        norms: of all tokens, (V,) float64.
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
        """Scores of pairs of tokens.

        Args:
            tokens: (Q,) int64.
            own: their embeddings, (Q, D).
            pairs: which of ``tokens`` each pair has, (N,) int64.
            others: the other token of each pair, one of this rank's, (N,) int64.

        Returns:
            (N,) float32.
        """
        scores = [
            self._of_block(own[a].double(), self._shard.rows[b - self._shard.first].double(), tokens[a], b)
            for a, b in zip(pairs.split(self.block), others.split(self.block))
        ]
        return torch.cat(scores).float()

    def _of_block(self, a: Tensor, b: Tensor, left: Tensor, right: Tensor) -> Tensor:
        if self.metric == "l1":
            return -(a - b).abs().sum(dim=-1)
        if self.metric == "l2":
            return -(a - b).square().sum(dim=-1).sqrt()
        product = (a * b).sum(dim=-1)
        if self.metric == "dot":
            return product
        scale = self.norms[left] * self.norms[right]
        return torch.where(scale > 0.0, product / scale.clamp_min(torch.finfo(torch.float64).tiny), -1.0)


def order(ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts along the last dimension by falling score, equal scores by rising id."""
    ids, by_id = ids.sort(dim=-1)
    scores, by_score = scores.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, by_score), scores
