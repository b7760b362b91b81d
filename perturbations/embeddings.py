# SPDX-License-Identifier: Apache-2.0
"""What a perturbation may ask of the model: embeddings, their scale, and neighbors. Refreshed after a weight sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perturbations import traced
from perturbations.shard import Shard

if TYPE_CHECKING:
    from perturbations.neighbors import Drift, Neighborhood, NeighborIndex
    from perturbations.neighbors.table import TableIndex


_ROWS = 1024  # of the matrix, in float64 at once


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
        """
        Args:
            lookup: ids of any shape to their input embeddings, shape + (D,).
            input_matrix: gives the input embedding matrix E, (V, D), or the shard of a tensor-parallel rank.
            output_matrix: gives the output embedding matrix likewise; None where the model ties the two.
            special_ids: gives the special and never-trained tokens, which some options leave out.
            token_texts: gives the text of each token, by which tokens are the same word; rows of the embedding beyond
                them are words of their own.
        """
        self.lookup = lookup
        self._matrices = {"input": input_matrix, "output": output_matrix or input_matrix}
        self._special_ids = special_ids
        self._token_texts = token_texts
        self._words: dict[int, Tensor] = {}
        self._indices: dict[tuple[str | bool, ...], tuple[Neighborhood, int]] = {}
        self._syncs = 0
        self._rms: Tensor | None = None
        self._number = traced.number_of(self)

    def matrix(self, space: str = "input") -> Tensor:
        """The input or output embedding matrix, (V, D), as it is now; gathered where ranks share it."""
        return Shard.of(self._matrices[space]()).whole()

    def rms(self) -> Tensor:
        """Root-mean-square element of E, a float32 scalar tensor."""
        if torch.compiler.is_compiling():
            return traced.rms(Shard.of(self._matrices["input"]()).rows, self._number)
        if self._rms is None:
            shard = Shard.of(self._matrices["input"]())
            # A block at a time: E in float32 would be twice its size in bfloat16.
            nothing = torch.zeros((), dtype=torch.float64, device=shard.rows.device)
            squares = sum((block.double().square().sum() for block in shard.real.split(_ROWS)), nothing)
            total = shard.gather(squares.view(1)).sum()
            self._rms = (total / (shard.size * shard.rows.shape[1])).sqrt().float()
        return self._rms

    def index(
        self,
        metric: str,
        space: str = "input",
        skip_special: bool = False,
        *,
        kind: str = "exact",
        skip_same_word: bool = False,
        refresh: str = "every_sync",
    ) -> NeighborIndex | traced.TracedIndex:
        """The neighbor index over the input or output embeddings, built on first use.

        Args:
            metric: cosine, l2, l1 or dot.
            space: ``input`` or ``output``.
            skip_special: leave special and never-trained tokens out of the neighbors.
            kind: ``exact`` or ``hnsw``.
            skip_same_word: leave out neighbors that are the same word as the token.
            refresh: when the sets are computed anew: ``every_sync``, ``never``, or every so many weight syncs.

        Raises:
            ValueError: for a bad value, or ``skip_same_word`` where the token's texts are not known.
        """
        key = (metric, space, skip_special, kind, skip_same_word, refresh)
        if torch.compiler.is_compiling():
            return traced.TracedIndex(self._number, key)
        if key not in self._indices:
            self._indices[key] = self._neighborhood(*key), self._syncs
        index, sync = self._indices[key]
        if sync != self._syncs:
            index.weights_changed()
            self._indices[key] = index, self._syncs
        return index

    def _neighborhood(
        self, metric: str, space: str, skip_special: bool, kind: str, skip_same_word: bool, refresh: str
    ) -> Neighborhood:
        from perturbations.neighbors import Neighborhood, Refresh, create_index

        exclude = self._special_ids() if skip_special else ()

        def make(embedding: Shard, probe: bool) -> TableIndex:
            words = self._word_numbers(embedding.size) if skip_same_word else None
            # A graph is not built for a look at a few tokens.
            return create_index(embedding, "exact" if probe else kind, metric, exclude, words, True if probe else None)

        return Neighborhood(make, self._matrices[space], Refresh.parse(refresh), metric)

    def _word_numbers(self, size: int) -> Tensor:
        from perturbations.neighbors import word_numbers

        if self._token_texts is None:
            raise ValueError("skip_same_word: this embeddings does not know its tokens' texts; pass token_texts to it.")
        if size not in self._words:
            self._words[size] = word_numbers(self._token_texts(), size)
        return self._words[size]

    def refresh(self) -> None:
        """The weights have changed: each value is computed anew on its next use, neighbor sets as their policy says.

        Several calls with nothing asked in between count as one weight sync.
        """
        self._syncs += 1
        self._rms = None

    def drift(self) -> Drift | None:
        """What the latest weight sync changed, over all indices asked since the sync before; None where nothing was."""
        total = None
        for key, (neighborhood, sync) in self._indices.items():
            if neighborhood.is_queried and sync != self._syncs:
                neighborhood.weights_changed()
                self._indices[key] = neighborhood, sync = neighborhood, self._syncs
            if sync == self._syncs and neighborhood.drift is not None:
                total = neighborhood.drift if total is None else total + neighborhood.drift
        return total


def matrix_embeddings(embedding: Tensor, special_ids: Sequence[int] = (), texts: Sequence[str] = ()) -> ModelEmbeddings:
    """The embeddings of a plain matrix E, (V, D): for tests and for models whose embedding is one tensor."""
    return ModelEmbeddings(
        lambda ids: torch.nn.functional.embedding(ids, embedding),
        lambda: embedding,
        None,
        lambda: special_ids,
        lambda: texts,
    )
