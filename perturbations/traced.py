# SPDX-License-Identifier: Apache-2.0
"""What a compiled step asks of the embeddings and the compiler must not look into.

Neighbor tables and the matrix's scale are kept and computed anew by rules of their own, after a weight sync for
example. Within ``torch.compile`` they are two operators, called at each step, and their rules stay Python's.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from perturbations.embeddings import ModelEmbeddings

_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, ModelEmbeddings] = weakref.WeakValueDictionary()


def number_of(embeddings: ModelEmbeddings) -> int:
    """A number by which the operators find these embeddings."""
    number = next(_numbers)
    _known[number] = embeddings
    return number


@torch.library.custom_op(
    "perturbations::neighbors",
    mutates_args=(),
    schema="(Tensor tokens, int k, int embeddings, str metric, str space, bool skip_special, str kind,"
    " bool skip_same_word, str refresh) -> (Tensor, Tensor)",
)
def neighbors(
    tokens: Tensor,
    k: int,
    embeddings: int,
    metric: str,
    space: str,
    skip_special: bool,
    kind: str,
    skip_same_word: bool,
    refresh: str,
) -> tuple[Tensor, Tensor]:
    """As :meth:`perturbations.neighbors.NeighborIndex.query`: ids (B, k) int64 and scores (B, k) float32."""
    index = _known[embeddings].index(
        metric, space, skip_special, kind=kind, skip_same_word=skip_same_word, refresh=refresh
    )
    ids, scores = index.query(tokens, k)
    return ids.contiguous(), scores.contiguous()


@neighbors.register_fake
def _(tokens: Tensor, k: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = (*tokens.shape, k)
    return tokens.new_empty(shape), tokens.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("perturbations::rms", mutates_args=(), schema="(Tensor like, int embeddings) -> Tensor")
def rms(like: Tensor, embeddings: int) -> Tensor:
    """As :meth:`perturbations.embeddings.ModelEmbeddings.rms`; ``like`` says on which device."""
    return _known[embeddings].rms().clone()


@rms.register_fake
def _(like: Tensor, embeddings: int) -> Tensor:
    return like.new_empty((), dtype=torch.float32)


class TracedIndex:
    """A neighbor index as the compiler sees it."""

    def __init__(self, embeddings: int, key: tuple[str | bool, ...]) -> None:
        """
        Args:
            embeddings: the number of the embeddings.
            key: metric, space, skip_special, kind, skip_same_word and refresh.
        """
        self._embeddings, self._key = embeddings, key

    def precompute(self, k: int) -> None:
        """Nothing: a compiled step computes no tables."""
        return None

    def query(self, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See :meth:`perturbations.neighbors.NeighborIndex.query`."""
        return neighbors(token_ids, k, self._embeddings, *self._key)
