"""Exact nearest neighbors by blocked matrix products, each token's row computed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perturbations.neighbors.base import NeighborIndex
from perturbations.options import nearest

METRICS = ("cosine", "l2", "l1", "dot")

_MARGIN = 8
_SCRATCH_CPU, _SCRATCH_DEVICE = 32 << 20, 512 << 20  # bytes of temporary values held at once
# Rows widened to float32 or float64 at once: on CPU few enough for its cache, which is ten times as fast.
_ROWS_CPU, _ROWS_DEVICE = 256, 4096
_TINY = 1e-30
_DOUBTFUL = 64


class ExactIndex(NeighborIndex):
    """The k nearest tokens over all V, with ties broken by the lower id.

    The order is that of the scores computed in float64 and rounded to float32, which is what :meth:`query`
    returns; it depends on the embedding alone, not on which tokens are asked for together. A float32 or
    bfloat16 matrix product, with a bound on its rounding error, only proposes which pairs to score.

    Rows are kept in a table. On CPU they are filled on first use; elsewhere the whole table is computed on
    the first query, so that later queries are a gather without host synchronisation.

    Scores: cosine similarity, dot product, or the negative L2 or L1 distance. The cosine with a zero vector,
    which has no direction, is defined as -1.
    """

    def __init__(self, embedding: Tensor, metric: str = "cosine", exclude: Sequence[int] = ()) -> None:
        """
        Args:
            embedding: (V, D), any float dtype; kept by reference, not copied.
            metric: cosine, l2, l1 or dot.
            exclude: ids that are never neighbors; they may still be queried.

        Raises:
            ValueError: for an unknown metric, an embedding that is not a finite matrix, or a bad excluded id.
        """
        if metric not in METRICS:
            raise ValueError(f"metric={metric!r}: must be one of {', '.join(METRICS)}.{nearest(str(metric), METRICS)}")
        if embedding.dim() != 2 or not embedding.is_floating_point():
            raise ValueError(
                f"embedding of shape {tuple(embedding.shape)} and {embedding.dtype}: must be a (V, D) matrix of floats."
            )
        self._size = embedding.shape[0]
        bad = [i for i in exclude if not 0 <= i < self._size]
        if bad:
            raise ValueError(f"exclude holds id {bad[0]}: must be in [0, {self._size - 1}], the embedding's rows.")
        self.metric = metric
        self._embedding = embedding.detach()
        self._device = embedding.device
        with torch.inference_mode(False), torch.no_grad():
            self._excluded = torch.zeros(self._size, dtype=torch.bool, device=self._device)
            self._excluded[torch.tensor(sorted(set(exclude)), dtype=torch.int64, device=self._device)] = True
            self._lazy = self._device.type == "cpu"
            self._rows = _ROWS_CPU if self._lazy else _ROWS_DEVICE
            self._norms = self._row_norms()
        if not bool(torch.isfinite(self._norms).all()):
            rows = (~torch.isfinite(self._norms)).nonzero().flatten().tolist()
            raise ValueError(
                f"embedding row {rows[0]} (and {len(rows) - 1} more) is not finite: the model's weights are broken."
            )
        self._scratch = _SCRATCH_CPU if self._lazy else _SCRATCH_DEVICE
        # Products in bfloat16 are five times as fast as converting first, where the processor has them. CUDA
        # may also sum in bfloat16, which no useful bound covers, so not there.
        bfloat16 = self._embedding.dtype == torch.bfloat16
        self._native = self._lazy and bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self._width = 0

    def query(self, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See :meth:`NeighborIndex.query`.

        Raises:
            ValueError: for a k outside [1, possible neighbors], or on CPU an id outside [0, V).
        """
        if k > self._width or k < 1:
            self._widen(k)
            if not self._lazy:
                self._fill_all()
        if self._lazy:
            try:
                known = self._filled.index_select(0, token_ids)
            except (IndexError, RuntimeError):
                low, high = int(token_ids.min()), int(token_ids.max())
                if low >= 0 and high < self._size:
                    raise
                bad = low if low < 0 else high
                raise ValueError(f"token id {bad}: must be in [0, {self._size - 1}], the embedding's rows.") from None
            if not known.all():
                self._fill(token_ids[~known].unique())
        ids = self._ids.index_select(0, token_ids)[:, :k].long()
        return ids, self._scores.index_select(0, token_ids)[:, :k]

    def precompute(self, k: int) -> None:
        """Fills the whole table for up to k neighbors, in blocks of bounded memory."""
        if k > self._width or k < 1:
            self._widen(k)
        self._fill_all()

    # --- the table ------------------------------------------------------------------------------------------

    def _widen(self, k: int) -> None:
        most = self._size - int(self._excluded.sum())
        # A token that is not excluded itself is no neighbor of its own; one that is has the same others.
        most -= 1 if most else 0
        if not 1 <= k <= most:
            excluded = f" without {int(self._excluded.sum())} excluded ones" if bool(self._excluded.any()) else ""
            raise ValueError(
                f"k={k} neighbors: must be in [1, {most}], the other tokens of a vocabulary of {self._size}{excluded}."
            )
        with torch.inference_mode(False):
            self._ids = torch.zeros(self._size, k, dtype=torch.int32, device=self._device)
            self._scores = torch.zeros(self._size, k, dtype=torch.float32, device=self._device)
            self._filled = torch.zeros(self._size, dtype=torch.bool, device=self._device)
        self._width = k

    def _fill_all(self) -> None:
        self._fill((~self._filled).nonzero().flatten())

    def _fill(self, tokens: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for block in tokens.split(max(1, self._scratch // (4 * self._size))):
                self._fill_block(block)

    def _fill_block(self, tokens: Tensor) -> None:
        """Proposes pairs by upper bounds, scores them exactly, and widens rows whose bounds leave doubt."""
        k = self._width
        bounds = self._upper_bounds(tokens)
        proposed, candidates = bounds.topk(min(k + _MARGIN, self._size), dim=-1)
        rows = torch.arange(len(tokens), device=self._device).unsqueeze(-1).expand_as(candidates)
        scores = self._score(tokens[rows.reshape(-1)], candidates.reshape(-1)).view_as(proposed)
        scores = scores.masked_fill(proposed == -torch.inf, -torch.inf)
        ids, scores = _order(candidates, scores)
        self._ids[tokens], self._scores[tokens] = ids[:, :k].int(), scores[:, :k]
        # Every token that was not proposed has a bound of at most the lowest proposed one.
        threshold = scores[:, k - 1]
        if self.metric == "l2":
            threshold = torch.nextafter(-threshold.square(), torch.full_like(threshold, -torch.inf))
        doubtful = (proposed[:, -1] >= threshold) & (proposed[:, -1] > -torch.inf)
        for part in doubtful.nonzero().flatten().split(_DOUBTFUL):
            self._widen_search(tokens[part], bounds[part] >= threshold[part].unsqueeze(-1))
        self._filled[tokens] = True

    def _widen_search(self, tokens: Tensor, possible: Tensor) -> None:
        """Scores all that may be neighbors of tokens (Q,); ``possible``: (Q, V) bool, at least k a row."""
        rows, candidates = possible.nonzero(as_tuple=True)  # by row, then by id
        scores = self._score(tokens[rows], candidates)
        order = scores.sort(descending=True, stable=True).indices
        order = order[rows[order].sort(stable=True).indices]
        counts = possible.sum(dim=-1)
        first = (counts.cumsum(0) - counts).unsqueeze(-1)
        best = order[first + torch.arange(self._width, device=self._device)]
        self._ids[tokens], self._scores[tokens] = candidates[best].int(), scores[best]

    # --- scores ---------------------------------------------------------------------------------------------

    def _upper_bounds(self, tokens: Tensor) -> Tensor:
        """At least the score of each pair (for l2 the negative squared distance); -inf where none can be.

        Args:
            tokens: (Q,) int64.

        Returns:
            (Q, V) float32.
        """
        error_out, error = self._rounding()
        norms, own = self._norms.float(), self._norms[tokens].float().unsqueeze(-1)
        if self.metric == "l1":
            bounds = torch.empty(len(tokens), self._size, device=self._device)
            for start in range(0, self._size, self._rows):
                part = self._embedding[start : start + self._rows].float()
                bounds[:, start : start + self._rows] = torch.cdist(self._embedding[tokens].float(), part, p=1)
            bounds.mul_(error - 1.0)
        else:
            bounds = self._products(tokens)
            bounds.add_(bounds.abs(), alpha=error_out)
            bounds.addcmul_(own, norms, value=error)
            if self.metric == "cosine":
                scale = own * norms
                # Products of such small vectors may have underflowed: 1 is a bound that always holds.
                bounds.div_(scale.clamp_min(_TINY)).masked_fill_(scale < _TINY, 1.0)
                bounds.masked_fill_((own == 0) | (norms == 0), -1.0)
            elif self.metric == "l2":
                bounds.mul_(2.0).sub_(own.square()).sub_(norms.square())
                bounds.addcmul_(own + norms, own + norms, value=error)
        bounds.masked_fill_(self._excluded, -torch.inf)
        return bounds.scatter_(1, tokens.unsqueeze(-1), -torch.inf)

    def _products(self, tokens: Tensor) -> Tensor:
        own = self._embedding[tokens]
        if self._native:
            return (own @ self._embedding.T).float()
        if self._embedding.dtype == torch.float32:
            return own @ self._embedding.T
        products = torch.empty(len(tokens), self._size, device=self._device)
        for start in range(0, self._size, self._rows):
            part = self._embedding[start : start + self._rows].float()
            products[:, start : start + self._rows] = own.float() @ part.T
        return products

    def _score(self, left: Tensor, right: Tensor) -> Tensor:
        """Scores of pairs, (P,) and (P,) ids to (P,) float32, computed in float64."""
        parts = [self._score_pairs(a, b) for a, b in zip(left.split(self._rows), right.split(self._rows))]
        return torch.cat(parts).float()

    def _score_pairs(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self._embedding[left].double(), self._embedding[right].double()
        if self.metric == "l1":
            return -(a - b).abs().sum(dim=-1)
        if self.metric == "l2":
            return -(a - b).square().sum(dim=-1).sqrt()
        product = (a * b).sum(dim=-1)
        if self.metric == "dot":
            return product
        scale = self._norms[left] * self._norms[right]
        return torch.where(scale > 0.0, product / scale.clamp_min(torch.finfo(torch.float64).tiny), -1.0)

    def _row_norms(self) -> Tensor:
        parts = [part.double().square().sum(dim=-1).sqrt() for part in self._embedding.split(self._rows)]
        return torch.cat(parts)

    def _rounding(self) -> tuple[float, float]:
        """Error bounds of a product: relative to its own size, and to the product of the norms."""
        summing = (self._embedding.shape[1] + 16) * 2.0**-23
        if self._native:
            return 2.0**-7, summing  # each sum is rounded by 2^-8 at the end; twice that is allowed for
        if not self._lazy:
            return 0.0, summing + 2.0**-10  # CUDA may round the factors to TF32
        reduced = torch.backends.mkldnn.matmul.fp32_precision not in ("ieee", "none")
        return 0.0, summing + (2.0**-7 if reduced else 0.0)


def _order(ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts along the last dimension by falling score, equal scores by rising id."""
    ids, by_id = ids.sort(dim=-1)
    scores, by_score = scores.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, by_score), scores
