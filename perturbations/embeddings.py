# SPDX-License-Identifier: Apache-2.0
"""The model's embeddings, their scale and neighbors, as perturbations see them.

Within ``torch.compile``, and for a matrix on the meta device, scale and neighbors are custom operators that the
compiler does not look into. So the caches and their refresh stay in Python, and a neighbor index may work on the host.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from perturbations.errors import require
from perturbations.neighbors import Drift, Neighborhood, NeighborIndex, create_index, refresh_period, word_numbers
from perturbations.neighbors.base import Shard, TableIndex

_ROWS = 1024  # rows of the matrix that are converted to float64 at once
_VOCABULARY_BLOCK = 1 << 14
# Two tokens are equally near if their cosines differ by less; embeddings of never-trained tokens nearly coincide.
_TIE = 1e-6

# The custom operators take an object's number, since an operator's schema has no Python objects.
_numbers = itertools.count()
_instances: weakref.WeakValueDictionary[int, "ModelEmbeddings"] = weakref.WeakValueDictionary()


class ModelEmbeddings:
    """A model's input embedding as perturbations see it. Values are cached until :meth:`refresh`."""

    def __init__(
        self,
        lookup: Callable[[Tensor], Tensor],
        input_matrix: Callable[[], Tensor | Shard],
        output_matrix: Callable[[], Tensor | Shard] | None = None,
        special_ids: Callable[[], Sequence[int]] = tuple,
        token_texts: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """``lookup``: ids of any shape to their input embeddings, shape + (D,).

        The matrices are E, (V, D), or a tensor-parallel rank's shard; None for the output where the model ties the two.
        ``special_ids``: special and never-trained tokens. ``token_texts``: rows beyond them are words of their own.
        """
        self.lookup = lookup
        self._matrices = {"input": input_matrix, "output": output_matrix or input_matrix}
        self._special_ids = special_ids
        self._token_texts = token_texts
        self._words: dict[int, Tensor] = {}  # by the size of the vocabulary, the number of each token's word
        self._indices: dict[tuple[str | bool, ...], Neighborhood] = {}  # by the arguments of index()
        self._outdated: set[tuple[str | bool, ...]] = set()  # indices that were not told of the latest weight sync
        self._rms: Tensor | None = None
        self._number = next(_numbers)
        _instances[self._number] = self

    def matrix(self, space: str = "input") -> Tensor:
        """The input or output embedding matrix, (V, D), as it is now; gathered where ranks share it."""
        return Shard.of(self._matrices[space]()).whole()

    def rms(self) -> Tensor:
        """Root-mean-square element of E, a float32 scalar tensor."""
        if self._opaque():
            return _rms(Shard.of(self._matrices["input"]()).rows, self._number)
        if self._rms is None:
            shard = Shard.of(self._matrices["input"]())
            sum_of_squares = torch.zeros((), dtype=torch.float64, device=shard.rows.device)
            # A block at a time, since the whole matrix in float64 would take four times its memory in bfloat16.
            for block in shard.real.split(_ROWS):
                sum_of_squares = sum_of_squares + block.double().square().sum()
            total = shard.gather(sum_of_squares.view(1)).sum()  # over the tensor-parallel ranks
            elements = shard.size * shard.rows.shape[1]
            self._rms = (total / elements).sqrt().float()
        return self._rms

    def index(
        self,
        metric: str,
        space: str = "input",
        skip_special: bool = False,
        kind: str = "exact",
        skip_same_word: bool = False,
        refresh: str = "every_sync",
    ) -> NeighborIndex:
        """The neighbor index over input or output embeddings, built on first use; arguments: `neighbor`'s options."""
        key = (metric, space, skip_special, kind, skip_same_word, refresh)
        if self._opaque():
            return _TracedIndex(self._number, key)
        if key not in self._indices:
            exclude = self._special_ids() if skip_special else ()

            def make(embedding: Shard, probe: bool) -> TableIndex:
                words = self._word_numbers(embedding.size) if skip_same_word else None
                if probe:  # for a few tokens an exact search costs less than the building of a graph
                    return create_index(embedding, "exact", metric, exclude, words, lazy=True)
                return create_index(embedding, kind, metric, exclude, words)

            self._indices[key] = Neighborhood(make, self._matrices[space], refresh_period(refresh), metric)
        return self._up_to_date(key)

    def _word_numbers(self, size: int) -> Tensor:
        """The number of each token's word, (V,) int64 with V = ``size``; computed once."""
        if size not in self._words:
            texts = require(self._token_texts, "token_texts, the tokens' texts that skip_same_word needs,")
            self._words[size] = word_numbers(texts(), size)
        return self._words[size]

    def _opaque(self) -> bool:
        """Whether the custom operators are used: while the compiler traces, and where the matrix has no values."""
        return torch.compiler.is_compiling() or Shard.of(self._matrices["input"]()).rows.is_meta

    def _up_to_date(self, key: tuple[str | bool, ...]) -> Neighborhood:
        """An index that knows of the latest weight sync."""
        if key in self._outdated:
            self._outdated.remove(key)
            self._indices[key].weights_changed()
        return self._indices[key]

    def refresh(self) -> None:
        """Marks all caches as outdated, after new weights; several calls without a query in between are one sync."""
        self._outdated.update(self._indices)
        self._rms = None

    def tensors(self) -> list[Tensor]:
        """What is cached on the device, which a captured step reads at its addresses: scale and neighbor tables."""
        tensors = [] if self._rms is None else [self._rms]
        for index in self._indices.values():
            tensors.extend(index.tensors())
        return tensors

    @property
    def refresh_bytes(self) -> int:
        """Memory of the device that new weights take for a moment: each index is rebuilt in turn beside its old one."""
        return max((index.build_bytes for index in self._indices.values()), default=0)

    def drift(self) -> Drift | None:
        """Changes by the latest weight sync, over all indices queried since the sync before; None without queries."""
        total = None
        for key, index in self._indices.items():
            if index.is_queried:
                self._up_to_date(key)  # the index takes in the latest sync, and measures its drift
            missed_sync = key in self._outdated  # since no query has come
            if missed_sync or index.drift is None:
                continue
            total = index.drift if total is None else total + index.drift
        return total


def matrix_embeddings(embedding: Tensor, special_ids: Sequence[int] = (), texts: Sequence[str] = ()) -> ModelEmbeddings:
    """The embeddings of a plain matrix E, (V, D): for tests and for models with one tensor as embedding."""
    return ModelEmbeddings(
        lookup=lambda ids: nn.functional.embedding(ids, embedding),
        input_matrix=lambda: embedding,
        special_ids=lambda: special_ids,
        token_texts=lambda: texts,
    )


def nearest_tokens(vectors: Tensor, matrix: Tensor, own: Tensor) -> Tensor:
    """The token of largest cosine to each vector (N, D) in the matrix (V, D): (N,) int64; ``own`` (N,) wins a tie."""
    directions = nn.functional.normalize(vectors.float(), dim=-1)  # (N, D)
    best_cosine = torch.full((len(vectors),), -torch.inf, device=vectors.device)  # (N,)
    best_token = torch.zeros_like(own)  # (N,)
    for start in range(0, len(matrix), _VOCABULARY_BLOCK):
        block = nn.functional.normalize(matrix[start : start + _VOCABULARY_BLOCK].float(), dim=-1)
        cosine, place = (directions @ block.T).max(dim=-1)
        best_token = torch.where(cosine > best_cosine, place + start, best_token)
        best_cosine = torch.maximum(cosine, best_cosine)
    own_directions = nn.functional.normalize(matrix[own].float(), dim=-1)  # (N, D)
    own_cosine = (directions * own_directions).sum(dim=-1)
    return torch.where(own_cosine >= best_cosine - _TIE, own, best_token)


class _TracedIndex(NeighborIndex):
    """A neighbor index for the compiler: its queries are the custom operator below.

    It holds the number of its :class:`ModelEmbeddings`, and the arguments of :meth:`ModelEmbeddings.index`.
    """

    def __init__(self, embeddings: int, key: tuple[str | bool, ...]) -> None:
        self._embeddings = embeddings
        self._key = key

    def query(self, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return _neighbors(token_ids, k, self._embeddings, *self._key)


@torch.library.custom_op(
    "perturbations::neighbors",
    mutates_args=(),
    schema="(Tensor tokens, int k, int embeddings, str metric, str space, bool skip_special, str kind,"
    " bool skip_same_word, str refresh) -> (Tensor, Tensor)",
)
def _neighbors(tokens: Tensor, k: int, embeddings: int, *key: str | bool) -> tuple[Tensor, Tensor]:
    index = _instances[embeddings].index(*cast(Any, key))
    ids, scores = index.query(tokens, k)
    return ids.contiguous(), scores.contiguous()


@_neighbors.register_fake
def _(tokens: Tensor, k: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = (*tokens.shape, k)
    return tokens.new_empty(shape), tokens.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("perturbations::rms", mutates_args=(), schema="(Tensor like, int embeddings) -> Tensor")
def _rms(like: Tensor, embeddings: int) -> Tensor:
    """``like`` is a tensor on the result's device, by which torch chooses the operator's implementation."""
    return _instances[embeddings].rms().clone()


@_rms.register_fake
def _(like: Tensor, embeddings: int) -> Tensor:
    return like.new_empty((), dtype=torch.float32)
