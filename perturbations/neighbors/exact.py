# SPDX-License-Identifier: Apache-2.0
"""Exact nearest neighbors by blocked matrix products, each token's row computed once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from perturbations.errors import UsageError, nearest
from perturbations.neighbors.base import Shard, TableIndex, order

METRICS = ("cosine", "l2", "l1", "dot")

# Rows widened to float64 at once: on a CPU few enough for its cache, which is ten times as fast.
_ROWS_CPU, _ROWS_DEVICE = 256, 4096
_TINY = 1e-15
# The error of a product, in products of the norms: factors or result in bfloat16 or TF32, sums in float32. Products of
# two bfloat16 or float16 numbers are exact in float32, and sums of 16,384 of them stray by 2⁻⁹ at most.
_ROUNDING = 2.0**-7
_ROUNDING_L1 = 2.0**-10  # a sum of up to 8,192 terms in float32, in the sum's own size


class ExactIndex(TableIndex):
    """The k nearest tokens over all V by cosine, dot product, or negative L2 or L1 distance, ties by the lower id.

    Scores are computed in float64 and rounded to float32. The cosine with a zero vector, which has no direction, is
    defined as -1. The order depends on the embedding alone, not on the batch nor on the precision of products: products
    propose every pair that rounding leaves a chance, and these are scored.
    """

    # Each tensor-parallel rank searches its own rows, and the best of all ranks are kept.

    def __init__(
        self, embedding: Tensor | Shard, metric: str = "cosine", exclude: Sequence[int] = (), lazy: bool | None = None
    ) -> None:
        """``embedding``, (V, D) or a shard, is kept by reference; the others as of :class:`TableIndex`.

        ``UsageError`` for an unknown metric, or rows that are no finite matrix.
        """
        self._shard = shard = Shard.of(embedding)
        self.metric = metric
        if metric not in METRICS:
            raise UsageError(f"metric={metric!r}: must be one of {', '.join(METRICS)}.{nearest(str(metric), METRICS)}")
        if shard.rows.dim() != 2 or not shard.rows.is_floating_point():
            seen = f"embedding of shape {tuple(shard.rows.shape)} and {shard.rows.dtype}"
            raise UsageError(f"{seen}: must be a (V, D) matrix of floats.")
        self._block = _ROWS_CPU if shard.rows.device.type == "cpu" else _ROWS_DEVICE
        with torch.inference_mode(False), torch.no_grad():
            parts = [part.double().square().sum(dim=-1).sqrt() for part in shard.rows.split(self._block)]
            self.norms = shard.gather(torch.cat(parts))[: shard.size]
        bad = (~torch.isfinite(self.norms)).nonzero().flatten().tolist()
        if bad:
            which = f"{bad[0]} (and {len(bad) - 1} more)"
            raise UsageError(f"embedding row {which} is not finite: the model's weights are broken.")
        super().__init__(shard.size, shard.rows.device, exclude, lazy)
        self._rows = shard.real
        self._here = slice(shard.first, shard.first + len(self._rows))
        # Such products are five times as fast as converting first. CUDA may sum them in bfloat16, so there the result
        # is requested in float32, the type of the sums then.
        device, dtype = self._rows.device.type, self._rows.dtype
        self._native = (device, dtype) == ("cpu", torch.bfloat16) and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self._mixed = device == "cuda" and dtype in (torch.bfloat16, torch.float16)

    def search(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As :meth:`TableIndex.search`."""
        own = self._shard.lookup(tokens)
        lowest, highest = self._bounds(tokens, own)
        least = lowest.topk(min(k, lowest.shape[1]), dim=-1).values[:, -1:]
        proposed = (highest >= least) & (highest > -torch.inf)
        rows, others = proposed.nonzero(as_tuple=True)
        del lowest, highest, proposed
        others += self._shard.first
        counts = rows.bincount(minlength=len(tokens))
        place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        ids = tokens.new_zeros(len(tokens), max(k, int(counts.max())))
        scores = torch.full(ids.shape, -torch.inf, device=ids.device)
        ids[rows, place], scores[rows, place] = others, self.score(tokens, own, rows, others)
        ids, scores = order(ids, scores)
        # (Q, k) of each rank side by side, (Q, ranks · k).
        parts = (self._shard.gather(part[:, :k].contiguous()) for part in (ids, scores))
        ids, scores = order(*(part.view(-1, len(tokens), k).movedim(0, 1).flatten(1) for part in parts))
        return ids[:, :k], scores[:, :k]

    def _bounds(self, tokens: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Lowest and highest value of each pair's score, (Q, n) float32 each; -inf for pairs that are out."""
        # For l2 of the negative squared distance, for dot of the product with the token's direction: both order alike.
        # Excluded tokens and a token with itself are out.
        values = self._products(own)
        left, right = self.norms[tokens].float().unsqueeze(-1), self.norms[self._here].float()
        slack, slack_of_row = _ROUNDING * right, torch.zeros_like(left)
        if self.metric == "cosine":
            values.div_(left.clamp_min(_TINY)).div_(right.clamp_min(_TINY))
            values[:, right == 0.0] = -1.0
            # Products of such small vectors may have underflowed: these cosines are anywhere between -1 and 1.
            slack = torch.where((right < _TINY) & (right > 0.0), 2.0, _ROUNDING)
            slack_of_row = 2.0 * (left < _TINY)
        elif self.metric == "l2":
            values.mul_(2.0).sub_(left.square()).sub_(right.square())
            slack, slack_of_row = _ROUNDING * right.square(), _ROUNDING * left.square()  # 2 a b is at most a² + b²
        elif self.metric == "dot":
            values.div_(left.clamp_min(_TINY))
        values.masked_fill_(self._excluded[self._here], -torch.inf)
        at = tokens - self._shard.first
        here = (at >= 0) & (at < values.shape[1])
        values[here.nonzero().flatten(), at[here]] = -torch.inf
        if self.metric == "l1":
            return values * (1.0 + _ROUNDING_L1), values.mul_(1.0 - _ROUNDING_L1)
        return (values - slack).sub_(slack_of_row), values.add_(slack).add_(slack_of_row)

    def _products(self, own: Tensor) -> Tensor:
        """Products (for l1 negative distances) of (Q, D) with this rank's rows, a block at a time: (Q, n) float32."""
        if self._native and self.metric != "l1":
            return (own @ self._rows.T).float()
        if self._mixed and self.metric != "l1":
            return torch.mm(own, self._rows.T, out_dtype=torch.float32)
        own, products = own.float(), torch.empty(len(own), len(self._rows), device=own.device)
        block = len(self._rows) if self._rows.dtype == torch.float32 and self.metric != "l1" else self._block
        for start in range(0, len(self._rows), block):
            part = self._rows[start : start + block].float()
            values = -torch.cdist(own, part, p=1) if self.metric == "l1" else own @ part.T
            products[:, start : start + block] = values
        return products

    def score(self, tokens: Tensor, own: Tensor, pairs: Tensor, others: Tensor) -> Tensor:
        """Scores of N pairs, (N,) float32, of ``tokens[pairs]`` and ``others``, tokens of this rank, (N,) int64.

        ``own``: the embeddings, (Q, D), of ``tokens``, (Q,).
        """
        scores = []
        for at, right in zip(pairs.split(self._block), others.split(self._block)):
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
