# SPDX-License-Identifier: Apache-2.0
"""Exact nearest neighbors by blocked matrix products, each token's row computed once."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from perturbations.neighbors.base import NeighborIndex, PairScores, Shard, TableIndex, order

_TINY = 1e-15
# The error of a product, in products of the norms: factors or result in bfloat16 or TF32, sums in float32. Products of
# two bfloat16 or float16 numbers are exact in float32, and sums of 16,384 of them stray by 2⁻⁹ at most.
_ROUNDING = 2.0**-7
_ROUNDING_L1 = 2.0**-10  # a sum of up to 8,192 terms in float32, in the sum's own size
_ADDITIVE = ("cosine", "l2", "l1")
# One of this many tokens is compared with every row after a weight sync: the ones that moved the most.
_MOVERS = 64
# Scores are rounded to float32 and equal ones ordered by id, so that less than this decides nothing; in their size.
_DOUBT = 2.0**-20
_DOUBT_OF_COSINES = 1e-9  # which may be far smaller than the products that they are the sum of


class ExactIndex(TableIndex):
    """The k nearest tokens over all V, ordered as :class:`PairScores` says, ties broken by the lower id.

    The order depends on the embedding alone, not on the batch nor on the precision of products: products propose every
    pair that rounding leaves a chance, and these are scored.
    """

    # Each tensor-parallel rank searches its own rows, and the best of all ranks are kept.
    #
    # After a weight sync a row is searched again only where its set may have changed. By the triangle inequality a
    # score changes by no more than the movement of its two tokens (for cosines: of their directions). Each row has a
    # bound on the scores of tokens outside of its set, and each sync raises it by these movements. While the set's new
    # scores exceed the bound, a full search would find the same set. The few tokens that move much are compared with
    # every row.
    _followed = False

    def __init__(
        self, embedding: Tensor | Shard, metric: str = "cosine", exclude: Sequence[int] = (), lazy: bool | None = None
    ) -> None:
        """Arguments and errors of :class:`PairScores` and :class:`TableIndex`; ``embedding``: (V, D) or a shard."""
        self._shard = shard = Shard.of(embedding)
        self._pairs, self.metric = PairScores(shard, metric), metric
        super().__init__(shard.size, shard.rows.device, exclude, lazy)
        self._rows = shard.real
        self._here = slice(shard.first, shard.first + len(self._rows))
        # Such products are five times as fast as converting first. CUDA may sum them in bfloat16, so there the result
        # is requested in float32, the type of the sums then.
        bfloat16 = self._rows.device.type == "cpu" and self._rows.dtype == torch.bfloat16
        self._native = bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self._mixed = self._rows.device.type == "cuda" and _sums_in_float32(self._rows.device, self._rows.dtype)
        self._before: Tensor | None = None

    def follow(self) -> None:
        """Keeps the rows in the host's memory once the table is complete, for an index of later weights."""
        self._followed = not self._lazy and self.metric in _ADDITIVE and len(self._rows) == self._shard.size

    def take_over(self, old: NeighborIndex) -> None:
        """As :meth:`NeighborIndex.take_over`; searches only the rows in doubt."""
        if not self._followed or not isinstance(old, ExactIndex) or old._before is None:
            return
        before, kept = old._before, (old._before.shape, old._before.dtype, old.metric)
        if kept != (self._rows.shape, self._rows.dtype, self.metric) or not torch.equal(old._excluded, self._excluded):
            return
        old._before = None
        with torch.inference_mode(False), torch.no_grad():
            self._widen(old.width)
            distances = movement(before, self._rows, self.metric, self._pairs.block)
            if not bool(distances.any()):
                self._ids, self._scores, self._rest, self._filled = old._ids, old._scores, old._rest, old._filled
                self._before = before
                return
            ids, scores = self._scored_again(old._ids)
            least, rest = scores[:, -1].double(), self._bound_of_others(old._rest.double(), distances, ids)
            doubt = _DOUBT * least.abs() + (_DOUBT_OF_COSINES if self.metric == "cosine" else 0.0)
            again = ~(least > rest + doubt)
            self._ids, self._scores = ids.int(), scores
            # Rounded up: to the next float32 at least.
            self._rest = torch.where(rest.isinf(), rest, rest + rest.abs() * 2.0**-22).float()
            self._filled = ~again
            self._fill(again.nonzero().flatten())
            self._before = before.copy_(self._rows)

    def _scored_again(self, old: Tensor) -> tuple[Tensor, Tensor]:
        """The sets of an old table with their scores now, in order: (V, k) each."""
        blocks = []
        for tokens in torch.arange(self._size, device=self._device).split(self._pairs.block):
            ids = old[tokens].long()
            pairs = torch.arange(len(tokens), device=ids.device).repeat_interleave(ids.shape[1])
            scores = self._pairs.of(tokens, self._shard.lookup(tokens), pairs, ids.flatten())
            blocks.append(order(ids, scores.view_as(ids)))
        ids, scores = (torch.cat(parts) for parts in zip(*blocks))
        return ids, scores

    def _bound_of_others(self, rest: Tensor, distances: Tensor, ids: Tensor) -> Tensor:
        """A score that no token outside of a row's set exceeds now, (V,) float64, from the one before."""
        movers = distances.topk(max(len(distances) // _MOVERS, 1)).indices
        movers = movers[distances[movers] > 0.0]
        others = distances.clone()
        others[movers] = 0.0
        rest = torch.where(rest.isinf(), rest, rest + rest.abs() * _DOUBT + distances + others.max())
        # An excluded token is in no set, however near it has come.
        for tokens in movers[~self._excluded[movers]].split(max(1, self._scratch // (16 * self._size))):
            own = self._shard.lookup(tokens)
            highest = self._as_score(self._bounds(tokens, own, of_all=True)[1]).double()
            of_set = (ids.unsqueeze(0) == tokens.view(-1, 1, 1)).any(dim=-1)
            of_set[torch.arange(len(tokens), device=tokens.device), tokens] = True
            highest.masked_fill_(of_set, -torch.inf)
            near, rows = (highest > rest).nonzero(as_tuple=True)
            highest[near, rows] = self._pairs.of(tokens, own, near, rows).double()
            if len(tokens):
                rest = torch.maximum(rest, highest.amax(dim=0))
        return rest

    def _widen(self, k: int) -> None:
        super()._widen(k)
        with torch.inference_mode(False):
            self._rest = torch.zeros(self._size, device=self._device)

    def _fill_all(self) -> None:
        super()._fill_all()
        if self._followed and self._before is None:
            with torch.inference_mode(False), torch.no_grad():
                self._before = self._rows.detach().to("cpu", copy=True)

    def search(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As :meth:`TableIndex.search`; for the table of an index that follows, also the bound of each row."""
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
        if rest is not None:
            self._rest[tokens] = rest
        return ids[:, :k], scores[:, :k]

    def _as_score(self, values: Tensor) -> Tensor:
        """A value of :meth:`_bounds` as a score; for dot by the token's length."""
        return -values.neg().clamp_min(0.0).sqrt() if self.metric == "l2" else values

    def _bounds(self, tokens: Tensor, own: Tensor, of_all: bool = False) -> tuple[Tensor, Tensor]:
        """Lowest and highest value of each pair's score, (Q, n) float32 each; -inf for pairs that are out."""
        # For l2 of the negative squared distance, for dot of the product with the token's direction: both order alike.
        # Excluded tokens and a token with itself are out, unless ``of_all``.
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


def movement(before: Tensor, now: Tensor, metric: str, block: int) -> Tensor:
    """An upper bound of each token's movement, (V,) float64, from (V, D) on any device to (V, D), in blocks of rows."""
    parts = []
    for start in range(0, len(now), block):
        old = before[start : start + block].to(now.device).double()
        new = now[start : start + block].double()
        if metric == "cosine":
            tiny = torch.finfo(torch.float64).tiny
            left, right = old.norm(dim=-1, keepdim=True), new.norm(dim=-1, keepdim=True)
            distances = (old / left.clamp_min(tiny) - new / right.clamp_min(tiny)).norm(dim=-1)
            # A zero vector has no direction, and -1 for a cosine with anything.
            distances = torch.where((left == 0.0).squeeze(-1) ^ (right == 0.0).squeeze(-1), 4.0, distances)
        else:
            distances = torch.linalg.vector_norm(new - old, ord=1 if metric == "l1" else 2, dim=-1)
        parts.append(torch.where((new == old).all(dim=-1), 0.0, distances))
    return torch.cat(parts) * (1.0 + 1e-9)
