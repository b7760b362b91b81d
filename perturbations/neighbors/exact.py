# SPDX-License-Identifier: Apache-2.0
"""Exact nearest neighbors by blocked matrix products, each token's row computed once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from perturbations.errors import UsageError, nearest
from perturbations.neighbors.base import Shard, TableIndex, order

METRICS = ("cosine", "l2", "l1", "dot")

# Rows that are converted to float64 at once. On a CPU they fit into its cache, which is ten times as fast.
_ROWS_CPU = 256
_ROWS_DEVICE = 4096
_TINY = 1e-15
# A bound of the error of a product a · b, as a share of ‖a‖ ‖b‖, where factors or results are in bfloat16 or TF32 and
# sums in float32. Products of two bfloat16 or float16 numbers are exact in float32, and sums of 16,384 of them are off
# by 2⁻⁹ at most.
_ROUNDING = 2.0**-7
_ROUNDING_L1 = 2.0**-10  # a bound of the error of a sum of up to 8,192 terms in float32, as a share of the sum


class ExactIndex(TableIndex):
    """The k nearest tokens over all V by cosine, dot product, or negative L2 or L1 distance, ties by the lower id.

    Scores are computed in float64 and rounded to float32. The cosine with a zero vector, which has no direction, is
    defined as -1. The order depends on the embedding alone, and neither on the batch nor on the precision of products:

    1. matrix products in low precision bound every pair's score from below and from above;
    2. a pair is proposed if its upper bound reaches the k-th largest lower bound, so no neighbor is missed;
    3. the proposed pairs are scored in float64.

    Each tensor-parallel rank searches its own rows, and the best of all ranks are kept.
    """

    def __init__(
        self, embedding: Tensor | Shard, metric: str = "cosine", exclude: Sequence[int] = (), lazy: bool | None = None
    ) -> None:
        """``embedding``, (V, D) or a shard, is kept by reference; the others as in :class:`TableIndex`.

        ``UsageError`` for an unknown metric, or rows that are no finite matrix.
        """
        shard = Shard.of(embedding)
        self._shard = shard
        self.metric = metric
        if metric not in METRICS:
            raise UsageError(f"metric={metric!r}: must be one of {', '.join(METRICS)}.{nearest(str(metric), METRICS)}")
        if shard.rows.dim() != 2 or not shard.rows.is_floating_point():
            raise UsageError(
                f"embedding of shape {tuple(shard.rows.shape)} and {shard.rows.dtype}: must be a (V, D) matrix of"
                " floats."
            )
        self._block = _ROWS_CPU if shard.rows.device.type == "cpu" else _ROWS_DEVICE
        self.norms = _norms(shard, self._block)  # (V,) float64
        broken = (~torch.isfinite(self.norms)).nonzero().flatten().tolist()
        if broken:
            raise UsageError(
                f"embedding row {broken[0]} (and {len(broken) - 1} more) is not finite: the model's weights are broken."
            )
        super().__init__(shard.size, shard.rows.device, exclude, lazy)
        self._rows = shard.real  # (n, D)
        self._local_tokens = slice(shard.first, shard.first + len(self._rows))
        # Products in the matrix's own dtype are five times as fast as products of rows that are converted to float32.
        device = self._rows.device.type
        dtype = self._rows.dtype
        is_bfloat16_on_cpu = device == "cpu" and dtype == torch.bfloat16
        self._bfloat16_products = is_bfloat16_on_cpu and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        # CUDA may sum products in bfloat16. Where the result is requested in float32, the sums are in float32 too.
        self._float32_results = device == "cuda" and dtype in (torch.bfloat16, torch.float16)

    def search(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As :meth:`TableIndex.search`."""
        vectors = self._shard.lookup(tokens)  # (Q, D)
        lowest, highest = self._bounds(tokens, vectors)  # (Q, n) each
        kth_lowest = lowest.topk(min(k, lowest.shape[1]), dim=-1).values[:, -1:]
        is_proposed = (highest >= kth_lowest) & (highest > -torch.inf)
        rows, neighbors = is_proposed.nonzero(as_tuple=True)  # of the N proposed pairs, (N,) each
        del lowest, highest, is_proposed
        neighbors += self._shard.first

        # The proposed neighbors of each token side by side, filled up with score -inf.
        counts = rows.bincount(minlength=len(tokens))
        first_of_row = counts.cumsum(0) - counts
        columns = torch.arange(len(rows), device=rows.device) - first_of_row[rows]
        ids = tokens.new_zeros(len(tokens), max(k, int(counts.max())))
        scores = torch.full(ids.shape, -torch.inf, device=ids.device)
        ids[rows, columns] = neighbors
        scores[rows, columns] = self.score(tokens, vectors, rows, neighbors)
        ids, scores = order(ids, scores)

        ids, scores = order(self._of_all_ranks(ids[:, :k]), self._of_all_ranks(scores[:, :k]))
        return ids[:, :k], scores[:, :k]

    def _of_all_ranks(self, own: Tensor) -> Tensor:
        """Each rank's tensor (Q, k) side by side, (Q, ranks · k)."""
        gathered = self._shard.gather(own.contiguous()).view(-1, *own.shape)  # (ranks, Q, k)
        return gathered.movedim(0, 1).flatten(1)

    def _bounds(self, tokens: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of the scores of Q tokens a with this rank's n tokens b, (Q, n) float32 each.

        For l2 the bounds are of the negative squared distance, for dot of the product with a's direction: these order
        the tokens b as the scores do. An excluded token b, and b = a, has -inf for both.
        """
        values = self._products(vectors)  # changed in place below, since it is large
        norm_a = self.norms[tokens].float().unsqueeze(-1)  # (Q, 1)
        norm_b = self.norms[self._local_tokens].float()  # (n,)
        # The bounds are values ± (error_b + error_a).
        error_b = _ROUNDING * norm_b
        error_a = torch.zeros_like(norm_a)
        if self.metric == "cosine":
            values.div_(norm_a.clamp_min(_TINY)).div_(norm_b.clamp_min(_TINY))
            values[:, norm_b == 0.0] = -1.0
            # Products of vectors below _TINY may have underflowed, so their cosines are anywhere between -1 and 1.
            error_b = torch.where((norm_b < _TINY) & (norm_b > 0.0), 2.0, _ROUNDING)
            error_a = 2.0 * (norm_a < _TINY)
        elif self.metric == "l2":
            values.mul_(2.0).sub_(norm_a.square()).sub_(norm_b.square())  # 2 a · b − ‖a‖² − ‖b‖²
            error_b = _ROUNDING * norm_b.square()  # 2 ‖a‖ ‖b‖ is at most ‖a‖² + ‖b‖²
            error_a = _ROUNDING * norm_a.square()
        elif self.metric == "dot":
            values.div_(norm_a.clamp_min(_TINY))
        values.masked_fill_(self._excluded[self._local_tokens], -torch.inf)
        own_columns = tokens - self._shard.first
        is_local = (own_columns >= 0) & (own_columns < values.shape[1])
        values[is_local.nonzero().flatten(), own_columns[is_local]] = -torch.inf
        if self.metric == "l1":
            lowest = values * (1.0 + _ROUNDING_L1)  # the values are negative
            highest = values.mul_(1.0 - _ROUNDING_L1)
            return lowest, highest
        lowest = (values - error_b).sub_(error_a)
        highest = values.add_(error_b).add_(error_a)
        return lowest, highest

    def _products(self, vectors: Tensor) -> Tensor:
        """Products (for l1 negative distances) of (Q, D) with this rank's rows, (Q, n) float32."""
        if self._bfloat16_products and self.metric != "l1":
            return (vectors @ self._rows.T).float()
        if self._float32_results and self.metric != "l1":
            return torch.mm(vectors, self._rows.T, out_dtype=torch.float32)
        vectors = vectors.float()
        products = torch.empty(len(vectors), len(self._rows), device=vectors.device)
        # Rows are converted to float32, and l1 distances computed, block by block, to bound the memory.
        is_one_product = self._rows.dtype == torch.float32 and self.metric != "l1"
        block = len(self._rows) if is_one_product else self._block
        for start in range(0, len(self._rows), block):
            rows = self._rows[start : start + block].float()
            if self.metric == "l1":
                products[:, start : start + block] = -torch.cdist(vectors, rows, p=1)
            else:
                products[:, start : start + block] = vectors @ rows.T
        return products

    def score(self, tokens: Tensor, vectors: Tensor, rows: Tensor, neighbors: Tensor) -> Tensor:
        """The scores of N pairs of ``tokens[rows]`` and ``neighbors``, in float64, as (N,) float32.

        Args:
            tokens: (Q,) int64.
            vectors: the tokens' embeddings, (Q, D).
            rows: the pairs' first tokens, by their index in ``tokens``, (N,) int64.
            neighbors: the pairs' second tokens, of this rank, (N,) int64.
        """
        scores = []
        for block_rows, block_neighbors in zip(rows.split(self._block), neighbors.split(self._block)):
            a = vectors[block_rows].double()
            b = self._shard.rows[block_neighbors - self._shard.first].double()
            if self.metric == "l1":
                score = -(a - b).abs().sum(dim=-1)
            elif self.metric == "l2":
                score = -(a - b).square().sum(dim=-1).sqrt()
            else:
                score = (a * b).sum(dim=-1)
            if self.metric == "cosine":
                norms = self.norms[tokens[block_rows]] * self.norms[block_neighbors]
                cosine = score / norms.clamp_min(torch.finfo(torch.float64).tiny)
                score = torch.where(norms > 0.0, cosine, -1.0)
            scores.append(score)
        return torch.cat(scores).float()


def _norms(shard: Shard, block_size: int) -> Tensor:
    """The length of every row of the matrix, (V,) float64; ``block_size`` rows are converted at once."""
    with torch.inference_mode(False), torch.no_grad():
        norms_of_blocks = []
        for block in shard.rows.split(block_size):
            squared_norms = block.double().square().sum(dim=-1)
            norms_of_blocks.append(squared_norms.sqrt())
        own_norms = torch.cat(norms_of_blocks)  # (n,)
        return shard.gather(own_norms)[: shard.size]
