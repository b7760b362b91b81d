# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401
"""Nearest tokens by their embeddings."""

from collections.abc import Sequence

from torch import Tensor

from perturbations.errors import UsageError, nearest
from perturbations.neighbors.base import NeighborIndex, Shard, TableIndex
from perturbations.neighbors.exact import ExactIndex
from perturbations.neighbors.hnsw import HnswIndex
from perturbations.neighbors.refresh import Drift, Neighborhood, refresh_period
from perturbations.neighbors.words import OtherWords, word_key, word_numbers

INDICES = ("exact", "hnsw")


def create_index(
    embedding: Tensor | Shard,
    kind: str = "exact",
    metric: str = "cosine",
    exclude: Sequence[int] = (),
    words: Tensor | None = None,
    lazy: bool | None = None,
) -> TableIndex:
    """An index with its default settings; arguments and errors as in :class:`ExactIndex`.

    ``kind``: exact or hnsw; l1 always has the exact index. ``words``: (V,) int64, to skip neighbors of the same word.
    """
    if kind not in INDICES:
        raise UsageError(f"index={kind!r}: must be one of {', '.join(INDICES)}.{nearest(str(kind), INDICES)}")
    index_class = HnswIndex if kind == "hnsw" and metric != "l1" else ExactIndex
    index = index_class(embedding, metric, exclude, lazy=lazy)
    if words is None:
        return index
    return OtherWords(index, words)
