# SPDX-License-Identifier: Apache-2.0
"""Reuses a neighbor table after a weight sync: rows whose sets are proven unchanged are not searched again.

By the triangle inequality a score changes by no more than its two tokens have moved (for cosines: their directions).
Each row has a bound that no token outside of its set exceeds, and each sync raises the bound by these movements. While
the set's new scores stay above the bound, the set is that of a full search. The few tokens that move much are compared
with every row instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perturbations.neighbors.matrix import order

if TYPE_CHECKING:
    from perturbations.neighbors.exact import ExactIndex

ADDITIVE = ("cosine", "l2", "l1")
# One of so many tokens is compared with every row: those that moved the most.
_MOVERS = 64
# Scores are rounded to float32 and equal ones ordered by id, so that less than this decides nothing; in their size.
_DOUBT = 2.0**-20
_DOUBT_OF_COSINES = 1e-9  # which may be far smaller than the products that they are the sum of


def movement(before: Tensor, now: Tensor, metric: str, block: int) -> Tensor:
    """An upper bound of how far each token has moved, (V,) float64, from (V, D) on any device to (V, D).

    ``block``: rows that are converted at once.
    """
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


def reuse(old: ExactIndex, new: ExactIndex, before: Tensor) -> None:
    """Fills an index's table from a complete one of earlier weights (V, D); searches only the rows in doubt."""
    new._widen(old.width)
    distances = movement(before, new._rows, new.metric, new._pairs.block)
    if not bool(distances.any()):
        for name in ("_ids", "_scores", "_rest", "_filled", "_before"):
            setattr(new, name, getattr(old, name))
        old._before = None
        return
    ids, scores = _scored_again(old, new)
    least = scores[:, -1].double()
    rest = _bound(old, new, distances, ids)
    doubt = _DOUBT * least.abs() + (_DOUBT_OF_COSINES if new.metric == "cosine" else 0.0)
    again = ~(least > rest + doubt)
    new._ids, new._scores = ids.int(), scores
    # Rounded up: to the next float32 at least.
    new._rest = torch.where(rest.isinf(), rest, rest + rest.abs() * 2.0**-22).float()
    new._filled = ~again
    new._fill(again.nonzero().flatten())
    new._before, old._before = before.copy_(new._rows), None


def _scored_again(old: ExactIndex, new: ExactIndex) -> tuple[Tensor, Tensor]:
    """The old sets with the scores of the new weights, in order: (V, k) each."""
    blocks = []
    for tokens in torch.arange(old._size, device=old._device).split(new._pairs.block):
        ids = old._ids[tokens].long()
        pairs = torch.arange(len(tokens), device=ids.device).repeat_interleave(ids.shape[1])
        scores = new._pairs.of(tokens, new._shard.lookup(tokens), pairs, ids.flatten())
        blocks.append(order(ids, scores.view_as(ids)))
    ids, scores = (torch.cat(parts) for parts in zip(*blocks))
    return ids, scores


def _bound(old: ExactIndex, new: ExactIndex, distances: Tensor, ids: Tensor) -> Tensor:
    """A score that no token outside of a row's set exceeds with the new weights, (V,) float64."""
    few = max(len(distances) // _MOVERS, 1)
    movers = distances.topk(few).indices
    movers = movers[distances[movers] > 0.0]
    others = distances.clone()
    others[movers] = 0.0
    rest = old._rest.double()
    rest = torch.where(rest.isinf(), rest, rest + rest.abs() * _DOUBT + distances + others.max())
    # An excluded token is in no set, however near it has come.
    for tokens in movers[~new._excluded[movers]].split(max(1, new._scratch // (16 * new._size))):
        own = new._shard.lookup(tokens)
        _, highest = new._bounds(tokens, own, of_all=True)
        highest = new._as_score(highest).double()
        of_set = (ids.unsqueeze(0) == tokens.view(-1, 1, 1)).any(dim=-1)
        of_set[torch.arange(len(tokens), device=tokens.device), tokens] = True
        highest.masked_fill_(of_set, -torch.inf)
        near, rows = (highest > rest).nonzero(as_tuple=True)
        highest[near, rows] = new._pairs.of(tokens, own, near, rows).double()
        if len(tokens):
            rest = torch.maximum(rest, highest.amax(dim=0))
    return rest
