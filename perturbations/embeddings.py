# SPDX-License-Identifier: Apache-2.0
"""The model's embeddings, their scale and neighbors, as perturbations see them.

Within ``torch.compile``, and for a matrix without values, scale and neighbors are two opaque operators: caches and
refresh stay Python's, and an index may work on the host.
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

_ROWS = 1024  # of the matrix, in float64 at once
_VOCABULARY_BLOCK = 1 << 14
# Two tokens are equally near if their cosines differ by less; embeddings of never-trained tokens nearly coincide.
_TIE = 1e-6

_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, "ModelEmbeddings"] = weakref.WeakValueDictionary()


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
        self._special_ids, self._token_texts = special_ids, token_texts
        self._words: dict[int, Tensor] = {}
        self._indices: dict[tuple[str | bool, ...], Neighborhood] = {}
        self._behind: set[tuple[str | bool, ...]] = set()  # indices without the latest weight sync
        self._rms: Tensor | None = None
        self._number = next(_numbers)
        _known[self._number] = self

    def matrix(self, space: str = "input") -> Tensor:
        """The input or output embedding matrix, (V, D), as it is now; gathered where ranks share it."""
        return Shard.of(self._matrices[space]()).whole()

    def rms(self) -> Tensor:
        """Root-mean-square element of E, a float32 scalar tensor."""
        if self._opaque():
            return _rms(Shard.of(self._matrices["input"]()).rows, self._number)
        if self._rms is None:
            shard = Shard.of(self._matrices["input"]())
            nothing = torch.zeros((), dtype=torch.float64, device=shard.rows.device)
            # A block at a time: E in float32 would be twice its size in bfloat16.
            squares = sum((block.double().square().sum() for block in shard.real.split(_ROWS)), nothing)
            total = shard.gather(squares.view(1)).sum()
            self._rms = (total / (shard.size * shard.rows.shape[1])).sqrt().float()
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
                words, size = None, embedding.size
                if skip_same_word:
                    texts = require(self._token_texts, "token_texts, the tokens' texts that skip_same_word needs,")
                    words = self._words.get(size)
                    words = self._words[size] = word_numbers(texts(), size) if words is None else words
                # No graph is built to look at a few tokens.
                return create_index(embedding, "exact" if probe else kind, metric, exclude, words, probe or None)

            self._indices[key] = Neighborhood(make, self._matrices[space], refresh_period(refresh), metric)
        return self._up_to_date(key)

    def _opaque(self) -> bool:
        return torch.compiler.is_compiling() or Shard.of(self._matrices["input"]()).rows.is_meta

    def _up_to_date(self, key: tuple[str | bool, ...]) -> Neighborhood:
        if key in self._behind:
            self._behind.remove(key)
            self._indices[key].weights_changed()
        return self._indices[key]

    def refresh(self) -> None:
        """The weights have changed; several calls without a query in between count as one weight sync."""
        self._behind.update(self._indices)
        self._rms = None

    def tensors(self) -> list[Tensor]:
        """What is cached on the device, which a captured step reads at its addresses: scale and neighbor tables."""
        scale = [] if self._rms is None else [self._rms]
        return [*scale, *(tensor for index in self._indices.values() for tensor in index.tensors())]

    @property
    def refresh_bytes(self) -> int:
        """Memory of the device that new weights take for a moment: indices are built beside the old ones in turn."""
        return max((index.build_bytes for index in self._indices.values()), default=0)

    def drift(self) -> Drift | None:
        """Changes by the latest weight sync, over all indices queried since the sync before; None without queries."""
        total = None
        for key, index in self._indices.items():
            if index.is_queried:
                self._up_to_date(key)
            if key not in self._behind and index.drift is not None:
                total = index.drift if total is None else total + index.drift
        return total


def matrix_embeddings(embedding: Tensor, special_ids: Sequence[int] = (), texts: Sequence[str] = ()) -> ModelEmbeddings:
    """The embeddings of a plain matrix E, (V, D): for tests and for models with one tensor as embedding."""
    return ModelEmbeddings(
        lambda ids: nn.functional.embedding(ids, embedding), lambda: embedding, None, lambda: special_ids, lambda: texts
    )


def nearest_tokens(vectors: Tensor, matrix: Tensor, own: Tensor) -> Tensor:
    """The token of largest cosine to each vector (N, D) in the matrix (V, D): (N,) int64; ``own`` (N,) wins a tie."""
    normal = nn.functional.normalize(vectors.float(), dim=-1)
    best = torch.full((len(vectors),), -torch.inf, device=vectors.device)
    tokens = torch.zeros_like(own)
    for start in range(0, len(matrix), _VOCABULARY_BLOCK):
        block = nn.functional.normalize(matrix[start : start + _VOCABULARY_BLOCK].float(), dim=-1)
        score, best_of_block = (normal @ block.T).max(dim=-1)
        tokens = torch.where(score > best, best_of_block + start, tokens)
        best = torch.maximum(score, best)
    of_own = (normal * nn.functional.normalize(matrix[own].float(), dim=-1)).sum(dim=-1)
    return torch.where(of_own >= best - _TIE, own, tokens)


class _TracedIndex(NeighborIndex):
    """A neighbor index for the compiler: the embeddings' number and the key of :meth:`ModelEmbeddings.index`."""

    def __init__(self, embeddings: int, key: tuple[str | bool, ...]) -> None:
        self._embeddings, self._key = embeddings, key

    def query(self, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return _neighbors(token_ids, k, self._embeddings, *self._key)


@torch.library.custom_op(
    "perturbations::neighbors",
    mutates_args=(),
    schema="(Tensor tokens, int k, int embeddings, str metric, str space, bool skip_special, str kind,"
    " bool skip_same_word, str refresh) -> (Tensor, Tensor)",
)
def _neighbors(tokens: Tensor, k: int, embeddings: int, *key: str | bool) -> tuple[Tensor, Tensor]:
    ids, scores = _known[embeddings].index(*cast(Any, key)).query(tokens, k)
    return ids.contiguous(), scores.contiguous()


@_neighbors.register_fake
def _(tokens: Tensor, k: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = (*tokens.shape, k)
    return tokens.new_empty(shape), tokens.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("perturbations::rms", mutates_args=(), schema="(Tensor like, int embeddings) -> Tensor")
def _rms(like: Tensor, embeddings: int) -> Tensor:
    """``like`` says on which device."""
    return _known[embeddings].rms().clone()


@_rms.register_fake
def _(like: Tensor, embeddings: int) -> Tensor:
    return like.new_empty((), dtype=torch.float32)
