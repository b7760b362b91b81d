# SPDX-License-Identifier: Apache-2.0
"""Exact nearest neighbors by blocked matrix products, each token's row computed once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from perturbations.neighbors.base import NeighborIndex, TableIndex
from perturbations.neighbors.matrix import PairScores, Shard, order
from perturbations.neighbors.reuse import ADDITIVE, reuse

_TINY = 1e-15
# How far off a product may be, in products of the norms: factors or result rounded to bfloat16 or TF32, as a processor
# or a setting of the process may have it, sums in float32. Products of two bfloat16 or float16 numbers are exact in
# float32, and sums of 16,384 of them stray by 2⁻⁹ at most, also where they are cut off and not rounded.
_ROUNDING = 2.0**-7
_ROUNDING_L1 = 2.0**-10  # a sum of up to 8,192 terms in float32, in the sum's own size


class ExactIndex(TableIndex):
    """The k nearest tokens over all V, with ties broken by the lower id.

    The order is that of :class:`PairScores`. It depends on the embedding alone, not on the batch nor on the process's
    precision of products: products propose every pair that rounding leaves a chance, some five of a vocabulary, and
    these are scored. Each tensor-parallel rank searches its own rows, and the best of all ranks are kept.
    """

    _followed = False

    def __init__(
        self, embedding: Tensor | Shard, metric: str = "cosine", exclude: Sequence[int] = (), lazy: bool | None = None
    ) -> None:
        """
        Args:
            embedding: (V, D), any float dtype, or a rank's shard of it; kept by reference, not copied.
            metric: cosine, l2, l1 or dot.
            exclude, lazy: as in :class:`TableIndex`.

        Raises:
            ValueError: for an unknown metric, an embedding that is not a finite matrix, or a bad excluded id.
        """
        self._shard = shard = Shard.of(embedding)
        self._pairs, self.metric = PairScores(shard, metric), metric
        super().__init__(shard.size, shard.rows.device, exclude, lazy)
        self._rows = shard.real
        self._here = slice(shard.first, shard.first + len(self._rows))
        # Such products are five times as fast as converting first. CUDA may sum them in bfloat16, so there the result
        # is asked for in float32, which is what is summed in then.
        bfloat16 = self._rows.device.type == "cpu" and self._rows.dtype == torch.bfloat16
        self._native = bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self._mixed = self._rows.device.type == "cuda" and _sums_in_float32(self._rows.device, self._rows.dtype)
        self._before: Tensor | None = None

    def follow(self) -> None:
        """Keeps the rows in the host's memory once the table is complete, for an index of later weights."""
        self._followed = not self._lazy and self.metric in ADDITIVE and len(self._rows) == self._shard.size

    def take_over(self, old: NeighborIndex) -> None:
        """As :meth:`NeighborIndex.take_over`."""
        if not self._followed or not isinstance(old, ExactIndex) or old._before is None:
            return
        before = old._before.shape, old._before.dtype, old.metric
        if before == (self._rows.shape, self._rows.dtype, self.metric) and torch.equal(old._excluded, self._excluded):
            with torch.inference_mode(False), torch.no_grad():
                reuse(old, self, old._before)

    def _widen(self, k: int) -> None:
        super()._widen(k)
        with torch.inference_mode(False):
            self._rest = torch.zeros(self._size, device=self._device)

    def _fill_all(self) -> None:
        super()._fill_all()
        if self._followed and self._before is None:
            with torch.inference_mode(False), torch.no_grad():
                self._before = self._rows.detach().to("cpu", copy=True)

    def _fill_block(self, tokens: Tensor) -> None:
        ids, scores, rest = self._search(tokens, self.width)
        self._ids[tokens], self._scores[tokens] = ids.int(), scores
        if rest is not None:
            self._rest[tokens] = rest
        self._filled[tokens] = True

    def search(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As :meth:`TableIndex.search`."""
        return self._search(tokens, k)[:2]

    def _search(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids and scores; for an index that follows also a score that no other token exceeds, (Q,)."""
        own = self._shard.lookup(tokens)
        lowest, highest = self._bounds(tokens, own)
        least = lowest.topk(min(k, lowest.shape[1]), dim=-1).values[:, -1:]
        proposed = (highest >= least) & (highest > -torch.inf)
        rows, others = proposed.nonzero(as_tuple=True)
        rest = self._as_score(highest.masked_fill_(proposed, -torch.inf).amax(dim=-1)) if self._followed else None
        del lowest, highest, proposed
        others += self._shard.first
        counts = rows.bincount(minlength=len(tokens))
        place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        ids = tokens.new_zeros(len(tokens), max(k, int(counts.max())))
        scores = torch.full(ids.shape, -torch.inf, device=ids.device)
        ids[rows, place], scores[rows, place] = others, self._pairs.of(tokens, own, rows, others)
        ids, scores = order(ids, scores)
        if rest is not None and scores.shape[1] > k:
            rest = torch.maximum(rest, scores[:, k])
        # (Q, k) of each rank side by side, (Q, ranks · k).
        parts = (self._shard.gather(part[:, :k].contiguous()) for part in (ids, scores))
        ids, scores = order(*(part.view(-1, len(tokens), k).movedim(0, 1).flatten(1) for part in parts))
        return ids[:, :k], scores[:, :k], rest

    def _as_score(self, values: Tensor) -> Tensor:
        """What :meth:`_bounds` bounds, as a score; for dot by the token's length."""
        return -values.neg().clamp_min(0.0).sqrt() if self.metric == "l2" else values

    def _bounds(self, tokens: Tensor, own: Tensor, of_all: bool = False) -> tuple[Tensor, Tensor]:
        """Between which values each pair's score lies, (Q, n) float32 each.

        For l2 of the negative squared distance, for dot of the product with the token's direction: both order alike.
        -inf for excluded tokens and a token with itself, unless ``of_all``.
        """
        values = self._products(own)
        left, right = self._pairs.norms[tokens].float().unsqueeze(-1), self._pairs.norms[self._here].float()
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
        if not of_all:
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
        block = len(self._rows) if self._rows.dtype == torch.float32 and self.metric != "l1" else self._pairs.block
        for start in range(0, len(self._rows), block):
            part = self._rows[start : start + block].float()
            values = -torch.cdist(own, part, p=1) if self.metric == "l1" else own @ part.T
            products[:, start : start + block] = values
        return products


@functools.cache
def _sums_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device multiplies matrices of such numbers with a result in float32."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    some = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        return torch.mm(some, some, out_dtype=torch.float32).dtype == torch.float32
    except (NotImplementedError, RuntimeError, TypeError):
        return False
