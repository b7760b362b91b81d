# SPDX-License-Identifier: Apache-2.0
"""A neighbor index over the weight syncs of a run: its refreshes, and the drift of its sets."""

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from perturbations.errors import UsageError, nearest
from perturbations.neighbors.base import NeighborIndex, Shard, TableIndex

_WATCHED, _WATCHED_L1 = 128, 8  # an L1 row costs as much as some twenty others


def refresh_period(text: str) -> int | None:
    """Weight syncs from one computation of neighbor sets to the next, None for never, by the option ``refresh``.

    ``every_sync``, ``never``, or a positive whole number of weight syncs; ``UsageError`` for anything else.
    """
    words = {"every_sync": 1, "never": None}
    if text in words:
        return words[text]
    if text.isdecimal() and int(text) > 0:
        return int(text)
    allowed = "must be every_sync, never, or a positive whole number of weight syncs, such as 10"
    raise UsageError(f"perturbation option refresh={text!r}: {allowed}.{nearest(text, words)}")


@dataclass(frozen=True)
class Drift:
    """Neighbor sets that the latest weight sync changed, of tokens that were used as anchors."""

    tokens: int  # followed
    changed_since_start: int  # of these, with another set than at first
    compared: int  # with a known set right before the sync
    changed: int  # of these, with another set now

    def __add__(self, other: "Drift") -> "Drift":
        return Drift(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def shares(self) -> dict[str, float]:
        """``neighbors_changed`` and ``neighbors_changed_since_start`` in [0, 1], each where it is known."""
        now, start = (self.changed, self.compared), (self.changed_since_start, self.tokens)
        shares = {"neighbors_changed": now, "neighbors_changed_since_start": start}
        return {name: part / whole for name, (part, whole) in shares.items() if whole}


class Neighborhood(NeighborIndex):
    """Serves queries from an index that is rebuilt at some weight syncs, and measures the drift.

    At most 128 of the queried tokens (8 for L1) are followed, evenly spaced by id. At a sync their sets are computed
    from the new weights, used or not. A set is the k nearest, in any order.
    """

    # Sets that outlive a weight sync are all of the same weights. On a CPU, where rows are filled on first use, the
    # index is made from a copy of the matrix. Elsewhere the table is complete before the weights change, and a larger k
    # computes all sets again from the weights of that moment.

    def __init__(
        self,
        make: Callable[[Shard, bool], TableIndex],
        matrix: Callable[[], Tensor | Shard],
        every: int | None,
        metric: str = "cosine",
    ) -> None:
        """``make``: makes the index, with True a probe for few tokens. ``matrix``: gives the embedding as it is now.

        ``every``: as of :func:`refresh_period`.
        """
        self._make, self._every = make, every
        self._matrix = lambda: Shard.of(matrix())
        self._most = _WATCHED_L1 if metric == "l1" else _WATCHED
        self._syncs = self._k = 0
        self.drift: Drift | None = None
        self._index = self._built()
        with torch.inference_mode(False):
            shard = self._matrix()
            self._asked = torch.zeros(shard.size, dtype=torch.bool, device=shard.rows.device)
            self._watched = torch.zeros(0, dtype=torch.int64, device=shard.rows.device)

    def query(self, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As :meth:`NeighborIndex.query`."""
        found = self._index_for(k).query(token_ids, k)
        self._asked.index_fill_(0, token_ids, True)
        self._k = k
        return found

    def precompute(self, k: int) -> None:
        """As :meth:`NeighborIndex.precompute`."""
        self._index_for(k).precompute(k)

    def _index_for(self, k: int) -> TableIndex:
        if k > self._index.width and self._outlived:
            self._index = self._built()
        return self._index

    def tensors(self) -> tuple[Tensor, ...]:
        """What a query reads and writes on the device."""
        return self._asked, *self._index.tensors()

    @property
    def build_bytes(self) -> int:
        """Memory that a weight sync takes for a moment, for the new index beside the old one."""
        return self._index.build_bytes

    @property
    def is_queried(self) -> bool:
        """Whether there was a query since the last sync."""
        return self._k > 0

    def weights_changed(self) -> None:
        """To be called after a weight sync and before the next query."""
        self._syncs += 1
        due = self._every is not None and self._syncs % self._every == 0
        # Whether the sets in use are of the weights right before this sync, and not older ones.
        fresh = (self._syncs - 1) % (self._every or self._syncs) == 0
        old, k = self._index, self._k
        if due:
            self._index = self._built()
            if not self._on_demand and old.width:
                self._index.precompute(old.width)
        self._outlived = not due and not self._on_demand
        self._k = 0
        if not k:
            self.drift = None
            return
        with torch.inference_mode(False), torch.no_grad():
            joining = self._joining(k)
            now_in_use = self._index if due else self._make(self._matrix(), True)
            before = _sets(old, joining, k)
            now = _sets(now_in_use, torch.cat([self._watched, joining]), k)
            count = len(self._watched)
            last, first = torch.cat([self._last, before]), torch.cat([self._first, before])
            changed = (now != last).any(dim=-1)
            if not fresh:
                changed = changed[:count]
            since = (now != first).any(dim=-1)
            self.drift = Drift(len(since), int(since.sum()), len(changed), int(changed.sum()))
            self._watched, self._last, self._first = torch.cat([self._watched, joining]), now, first

    def _built(self) -> TableIndex:
        matrix = self._matrix()
        self._on_demand, self._outlived = rows_on_demand(matrix), False
        if self._on_demand and self._every != 1:
            matrix = replace(matrix, rows=matrix.rows.clone())
        return self._make(matrix, False)

    def _joining(self, k: int) -> Tensor:
        """Queried tokens that are not followed yet, as many as there is room for."""
        if not len(self._watched) or self._first.shape[-1] != k:
            self._watched = self._watched[:0]
            self._last = self._first = self._watched.new_zeros(0, k)
        new = self._asked.clone()
        new[self._watched] = False
        new = new.nonzero().flatten()
        room = self._most - len(self._watched)
        if len(new) > room:
            new = new[torch.arange(room, device=new.device) * len(new) // max(room, 1)]
        return new


def rows_on_demand(matrix: Shard) -> bool:
    """Whether an index of this matrix fills its rows on first use."""
    return matrix.rows.device.type == "cpu"


def _sets(index: NeighborIndex, tokens: Tensor, k: int) -> Tensor:
    """(Q, k) ids in ascending order."""
    return index.query(tokens, k)[0].sort(dim=-1).values
