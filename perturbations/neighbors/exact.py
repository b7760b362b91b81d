"""Exact nearest neighbors by blocked matrix products, each token's row computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from perturbations.neighbors import files
from perturbations.neighbors.scores import ROWS_CPU, ROWS_DEVICE, PairScores, order
from perturbations.neighbors.table import TableIndex

_MARGIN = 8
_TINY = 1e-30
_DOUBTFUL = 64


class ExactIndex(TableIndex):
    """The k nearest tokens over all V, with ties broken by the lower id.

    The order is that of the scores computed in float64 and rounded to float32, which is what :meth:`query`
    returns; it depends on the embedding alone, not on which tokens are asked for together. A float32 or
    bfloat16 matrix product, with a bound on its rounding error, only proposes which pairs to score.

    Scores and table are those of :class:`PairScores` and :class:`TableIndex`.
    """

    def __init__(
        self, embedding: Tensor, metric: str = "cosine", exclude: Sequence[int] = (), lazy: bool | None = None
    ) -> None:
        """
        Args:
            embedding: (V, D), any float dtype; kept by reference, not copied.
            metric: cosine, l2, l1 or dot.
            exclude: ids that are never neighbors; they may still be queried.
            lazy: as in :class:`TableIndex`.

        Raises:
            ValueError: for an unknown metric, an embedding that is not a finite matrix, or a bad excluded id.
        """
        self._pairs = PairScores(embedding, metric)
        super().__init__(embedding.shape[0], embedding.device, exclude, lazy)
        self.metric = metric
        self._embedding, self._norms = self._pairs.embedding, self._pairs.norms
        self._on_cpu = self._device.type == "cpu"
        # Rows widened to float32 at once, see PairScores.
        self._rows = ROWS_CPU if self._on_cpu else ROWS_DEVICE
        # Products in bfloat16 are five times as fast as converting first, where the processor has them. CUDA
        # may also sum in bfloat16, which no useful bound covers, so not there.
        bfloat16 = self._embedding.dtype == torch.bfloat16
        self._native = self._on_cpu and bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def search(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See :meth:`TableIndex.search`: bounds propose pairs, these are scored, and doubtful rows searched wider."""
        bounds = self._upper_bounds(tokens)
        proposed, candidates = bounds.topk(min(k + _MARGIN, self._size), dim=-1)
        rows = torch.arange(len(tokens), device=self._device).unsqueeze(-1).expand_as(candidates)
        scores = self._pairs.of(tokens[rows.reshape(-1)], candidates.reshape(-1)).view_as(proposed)
        scores = scores.masked_fill(proposed == -torch.inf, -torch.inf)
        ids, scores = order(candidates, scores)
        ids, scores = ids[:, :k].clone(), scores[:, :k].clone()
        # Every token that was not proposed has a bound of at most the lowest proposed one.
        threshold = scores[:, k - 1]
        if self.metric == "l2":
            threshold = torch.nextafter(-threshold.square(), torch.full_like(threshold, -torch.inf))
        doubtful = (proposed[:, -1] >= threshold) & (proposed[:, -1] > -torch.inf)
        for part in doubtful.nonzero().flatten().split(_DOUBTFUL):
            possible = bounds[part] >= threshold[part].unsqueeze(-1)
            ids[part], scores[part] = self._search_all(tokens[part], possible, k)
        return ids, scores

    def _search_all(self, tokens: Tensor, possible: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Scores all that may be neighbors of tokens (Q,); ``possible``: (Q, V) bool, at least k a row."""
        rows, candidates = possible.nonzero(as_tuple=True)  # by row, then by id
        scores = self._pairs.of(tokens[rows], candidates)
        best = scores.sort(descending=True, stable=True).indices
        best = best[rows[best].sort(stable=True).indices]
        counts = possible.sum(dim=-1)
        first = (counts.cumsum(0) - counts).unsqueeze(-1)
        best = best[first + torch.arange(k, device=self._device)]
        return candidates[best], scores[best]

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
            bounds = self._in_blocks(tokens, partial(torch.cdist, p=1))
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
        return self._in_blocks(tokens, lambda own, part: own @ part.T)

    def _in_blocks(self, tokens: Tensor, values: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """What ``values`` gives for tokens (Q, D) and all others (V, D), in float32 and a block at a time: (Q, V)."""
        own = self._embedding[tokens].float()
        found = torch.empty(len(tokens), self._size, device=self._device)
        for start in range(0, self._size, self._rows):
            part = slice(start, start + self._rows)
            found[:, part] = values(own, self._embedding[part].float())
        return found

    def _rounding(self) -> tuple[float, float]:
        """Error bounds of a product: relative to its own size, and to the product of the norms."""
        summing = (self._embedding.shape[1] + 16) * 2.0**-23
        if self._native:
            return 2.0**-7, summing  # each sum is rounded by 2^-8 at the end; twice that is allowed for
        if not self._on_cpu:
            return 0.0, summing + 2.0**-10  # CUDA may round the factors to TF32
        reduced = torch.backends.mkldnn.matmul.fp32_precision not in ("ieee", "none")
        return 0.0, summing + (2.0**-7 if reduced else 0.0)

    # --- files --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes the rows computed so far to one file, whole or not at all."""
        header, arrays = self._state()
        files.write(path, "ExactIndex", self._embedding, {**header, "metric": self.metric}, arrays)

    @classmethod
    def load(cls, path: str | Path, embedding: Tensor, lazy: bool | None = None) -> ExactIndex:
        """An index with the rows that were saved.

        Args:
            path: what :meth:`save` wrote.
            embedding: (V, D), the same values as then.
            lazy: as in :class:`TableIndex`.

        Raises:
            ValueError: where the file is no saved ExactIndex, or the embedding another one.
        """
        header, arrays = files.read(path, "ExactIndex", embedding)
        index = cls(embedding, header["metric"], header["exclude"], lazy)
        index._restore(header, arrays)
        return index
