# SPDX-License-Identifier: Apache-2.0
"""A neighbor index over the weight syncs of a run: its refreshes, and the drift of its sets."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perturbations.errors import UsageError, nearest
from perturbations.neighbors.base import NeighborIndex, Shard, TableIndex, fills_on_demand

# The most tokens that are followed for the drift. For L1 fewer, since its rows cost twenty times as much.
_FOLLOWED = 128
_FOLLOWED_L1 = 8


def refresh_period(text: str) -> int | None:
    """Weight syncs from one computation of neighbor sets to the next, None for never, by the option ``refresh``.

    ``every_sync``, ``never``, or a positive whole number of weight syncs; ``UsageError`` for anything else.
    """
    period_of_word = {"every_sync": 1, "never": None}
    if text in period_of_word:
        return period_of_word[text]
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(
        f"perturbation option refresh={text!r}: must be every_sync, never, or a positive whole number of weight syncs,"
        f" such as 10.{nearest(text, period_of_word)}"
    )


@dataclass(frozen=True)
class Drift:
    """Neighbor sets that the latest weight sync changed, of tokens that were used as anchors.

    Attributes:
        tokens: how many tokens are followed.
        changed_since_start: how many of these have another set than when they were first seen.
        compared: how many tokens had a set of the weights right before the sync.
        changed: how many of these have another set now.
    """

    tokens: int
    changed_since_start: int
    compared: int
    changed: int

    def __add__(self, other: "Drift") -> "Drift":
        return Drift(
            tokens=self.tokens + other.tokens,
            changed_since_start=self.changed_since_start + other.changed_since_start,
            compared=self.compared + other.compared,
            changed=self.changed + other.changed,
        )

    def shares(self) -> dict[str, float]:
        """``neighbors_changed`` and ``neighbors_changed_since_start`` in [0, 1], each where a set was compared."""
        shares = {}
        if self.compared:
            shares["neighbors_changed"] = self.changed / self.compared
        if self.tokens:
            shares["neighbors_changed_since_start"] = self.changed_since_start / self.tokens
        return shares


class Neighborhood(NeighborIndex):
    """Serves queries from an index that is rebuilt at some weight syncs, and measures the drift.

    At most 128 of the queried tokens (8 for L1) are followed, evenly spaced by id. At a sync their sets are computed
    from the new weights, whether or not the index is rebuilt. A set is the k nearest, in any order.
    """

    # An index that is kept over a weight sync must answer with sets of one state of the weights. On a CPU, where rows
    # are filled on first use, it is therefore made from a copy of the matrix. Elsewhere its table is complete before
    # the weights change. Only a query for a larger k then needs new sets: all are computed from the weights as they are
    # at that moment.

    def __init__(
        self,
        make: Callable[[Shard, bool], TableIndex],
        matrix: Callable[[], Tensor | Shard],
        every: int | None,
        metric: str = "cosine",
    ) -> None:
        """Builds the index.

        Args:
            make: makes an index of a matrix; with True one for the sets of a few tokens.
            matrix: returns the embedding matrix as it is now.
            every: weight syncs from one rebuild to the next, None for never, as :func:`refresh_period` returns it.
            metric: of the index.
        """
        self._make = make
        self._every = every
        self._matrix = lambda: Shard.of(matrix())
        self._most_followed = _FOLLOWED_L1 if metric == "l1" else _FOLLOWED
        self._syncs = 0  # weight syncs since the start
        self._k = 0  # of the latest query since the last sync; 0 where there was none
        self.drift: Drift | None = None
        self._index = self._built()
        with torch.inference_mode(False):
            shard = self._matrix()
            self._queried = torch.zeros(shard.size, dtype=torch.bool, device=shard.rows.device)  # (V,)
            self._followed = torch.zeros(0, dtype=torch.int64, device=shard.rows.device)  # token ids, (F,)
        # The sets of the followed tokens, (F, k) ids each, are set by _joining().
        self._first_sets: Tensor  # when the token was first seen
        self._latest_sets: Tensor  # after the latest sync

    def query(self, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As :meth:`NeighborIndex.query`."""
        ids, scores = self._index_for(k).query(token_ids, k)
        self._queried.index_fill_(0, token_ids, True)
        self._k = k
        return ids, scores

    def precompute(self, k: int) -> None:
        """As :meth:`NeighborIndex.precompute`."""
        self._index_for(k).precompute(k)

    def _index_for(self, k: int) -> TableIndex:
        """The index, rebuilt where it is of older weights and its table has fewer than k columns."""
        if k > self._index.width and self._is_of_older_weights:
            self._index = self._built()
        return self._index

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that a query reads and writes on the device."""
        return self._queried, *self._index.tensors()

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
        is_due = self._every is not None and self._syncs % self._every == 0
        # Only an index that was built at the sync before has the sets of the weights right before this sync. The first
        # index was built at the start, which counts as sync 0.
        sync_before = self._syncs - 1
        was_rebuilt = sync_before == 0 or (self._every is not None and sync_before % self._every == 0)
        previous_index = self._index
        if is_due:
            self._index = self._built()
            if not self._on_demand and previous_index.width:
                self._index.precompute(previous_index.width)
        self._is_of_older_weights = not is_due and not self._on_demand
        k = self._k
        self._k = 0
        if not k:
            self.drift = None
            return
        with torch.inference_mode(False), torch.no_grad():
            joining = self._joining(k)
            index_of_new_weights = self._index if is_due else self._make(self._matrix(), True)
            sets_before = _sets(previous_index, joining, k)
            followed_before = len(self._followed)
            followed = torch.cat([self._followed, joining])
            latest_sets = torch.cat([self._latest_sets, sets_before])
            first_sets = torch.cat([self._first_sets, sets_before])
            sets_now = _sets(index_of_new_weights, followed, k)
            changed = (sets_now != latest_sets).any(dim=-1)
            if not was_rebuilt:  # sets_before are of older weights
                changed = changed[:followed_before]
            changed_since_start = (sets_now != first_sets).any(dim=-1)
            self.drift = Drift(
                tokens=len(changed_since_start),
                changed_since_start=int(changed_since_start.sum()),
                compared=len(changed),
                changed=int(changed.sum()),
            )
            self._followed = followed
            self._latest_sets = sets_now
            self._first_sets = first_sets

    def _built(self) -> TableIndex:
        """A new index of the weights as they are now."""
        matrix = self._matrix()
        self._on_demand = fills_on_demand(matrix.rows.device)
        self._is_of_older_weights = False
        if self._on_demand and self._every != 1:
            matrix = replace(matrix, rows=matrix.rows.clone())
        return self._make(matrix, False)

    def _joining(self, k: int) -> Tensor:
        """Queried tokens that are not followed yet, as many as there is room for; another k starts anew."""
        if not len(self._followed) or self._first_sets.shape[-1] != k:
            self._followed = self._followed[:0]
            self._first_sets = self._followed.new_zeros(0, k)
            self._latest_sets = self._first_sets
        is_new = self._queried.clone()
        is_new[self._followed] = False
        new_tokens = is_new.nonzero().flatten()
        room = self._most_followed - len(self._followed)
        if len(new_tokens) > room:
            evenly_spaced = torch.arange(room, device=new_tokens.device) * len(new_tokens) // max(room, 1)
            new_tokens = new_tokens[evenly_spaced]
        return new_tokens


def _sets(index: NeighborIndex, tokens: Tensor, k: int) -> Tensor:
    """The tokens' k nearest, (Q, k) ids in ascending order."""
    ids, _ = index.query(tokens, k)
    return ids.sort(dim=-1).values
