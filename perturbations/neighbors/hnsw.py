# SPDX-License-Identifier: Apache-2.0
"""Approximate nearest neighbors by a graph (HNSW, Malkov and Yashunin, arXiv 1603.09320), scored exactly."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from perturbations.errors import UsageError
from perturbations.neighbors.base import Shard, TableIndex, order
from perturbations.neighbors.exact import ExactIndex

_MARGIN = 8  # candidates beyond k
_BLOCK = 64  # tokens whose candidates are scored at once
# The power of its length by which a vector is divided. At 0 distances in the graph order the tokens as the metric does,
# and the search gets lost; at 1 the search is easy, and the order is another one.
_POWER = {"cosine": 0.65, "l2": 0.75, "dot": 0.75}
_TINY = 1e-12


class HnswIndex(TableIndex):
    """The k nearest tokens among candidates that a graph proposes, scored and ordered as by :class:`ExactIndex`."""

    # Token embeddings share a large common part. Tokens close to it are near everything, so a search in a graph of the
    # plain vectors ends at them. The graph therefore holds the vectors (for cosine normalised) less their mean, each
    # divided by a power of its length. The tokens closest to the mean (for dot the longest) are the hubs, which are
    # compared with every query.
    #
    # One thread builds the graph in the order of the ids on the first query: all ranks must have the same graph.

    links = 32  # of a vector in the graph; twice as many in its lowest layer
    width_of_build = 300  # candidates that are compared when a vector is added
    width_of_search = 256  # candidates that are compared in a search
    rerank = 128  # results of a search that are scored
    hubs = 2048

    def __init__(
        self, embedding: Tensor | Shard, metric: str = "cosine", exclude: Sequence[int] = (), lazy: bool | None = None
    ) -> None:
        """As :class:`ExactIndex`; copies the embedding unless a CPU has all of it. ``UsageError`` for l1 too."""
        if metric == "l1":
            raise UsageError("metric='l1': an HNSW graph knows cosine, l2 and dot; take ExactIndex for l1.")
        shard = Shard.of(embedding)
        self.metric = metric
        self._embedding = shard.whole().cpu()  # (V, D)
        self._exact = ExactIndex(self._embedding, metric, exclude)
        super().__init__(shard.size, shard.rows.device, exclude, lazy)
        self._kept = (~self._excluded.cpu()).nonzero().flatten()  # the tokens that may be neighbors

    @cached_property
    def _graph(self) -> Any:
        """The graph; its vectors are in the order of ``_kept``.

        Building it also sets what the other methods read: ``_mean`` (D,) and ``_lengths`` (V,), by which
        :meth:`_placed` places vectors, and the ``_hubs``, ascending ids, with their embeddings ``_hub_rows``.
        """
        with torch.inference_mode(False), torch.no_grad():
            vectors = torch.cat([self._directions(block) for block in self._embedding.split(4096)])  # (V, D)
            self._mean = vectors.mean(dim=0)
            self._lengths = (vectors - self._mean).norm(dim=-1)
            # The hubs have the lowest ranks: for dot the longest vectors, else those closest to the mean.
            rank = -self._exact.norms.float() if self.metric == "dot" else self._lengths
            lowest_ranks = rank[self._kept].argsort(stable=True)[: self.hubs]
            self._hubs = self._kept[lowest_ranks].sort().values
            self._hub_rows = self._embedding[self._hubs].float()
            with _one_thread() as faiss:
                graph = faiss.IndexHNSWFlat(vectors.shape[1], self.links)
                graph.hnsw.efConstruction = self.width_of_build
                for tokens in self._kept.split(4096):
                    graph.add(self._placed(tokens).numpy())
        return graph

    def search(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As :meth:`TableIndex.search`; ``ImportError`` where faiss is not installed."""
        ids_of_blocks = []
        scores_of_blocks = []
        for block in tokens.cpu().split(_BLOCK):
            ids, scores = self._search_block(block, k)
            ids_of_blocks.append(ids)
            scores_of_blocks.append(scores)
        return torch.cat(ids_of_blocks).to(self._device), torch.cat(scores_of_blocks).to(self._device)

    def _search_block(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As :meth:`search`, for a few tokens, on the CPU."""
        candidates = self._candidates(tokens, k)  # (Q, C)
        if candidates is None:
            return self._exact.search(tokens, k)
        ids = candidates.sort(dim=-1).values
        rows = torch.arange(len(ids)).repeat_interleave(ids.shape[1])
        scores = self._exact.score(tokens, self._embedding[tokens], rows, ids.reshape(-1)).view_as(ids)
        is_repeated = ids[:, 1:] == ids[:, :-1]
        scores[:, 1:].masked_fill_(is_repeated, -torch.inf)
        is_itself = ids == tokens.unsqueeze(-1)
        ids, scores = order(ids, scores.masked_fill(is_itself, -torch.inf))
        return ids[:, :k], scores[:, :k]

    def _candidates(self, tokens: Tensor, k: int) -> Tensor | None:
        """(Q, C) ids, with repetitions; None where the exact search is needed."""
        count = max(self.rerank, k + _MARGIN) + 1
        if count + self.hubs >= len(self._kept):
            return None  # the exact search compares fewer pairs
        graph = self._graph
        graph.hnsw.efSearch = max(self.width_of_search, count)
        with _one_thread():
            _, places_in_graph = graph.search(self._placed(tokens).numpy(), count)
        places = torch.from_numpy(places_in_graph)  # in self._kept, (Q, count)
        if (places < 0).any():
            return None  # the graph of hundreds of equal vectors can fall apart, so that a search finds too few
        # The best hubs by their scores, without what is the same for all hubs of a token; the token itself is none. The
        # products become the scores in place.
        products = self._embedding[tokens].float() @ self._hub_rows.T
        norms = self._exact.norms[self._hubs].float()
        if self.metric == "cosine":
            products.div_(norms.clamp_min(torch.finfo(torch.float32).tiny))
        elif self.metric == "l2":
            products.mul_(2.0).sub_(norms.square())
        products.masked_fill_(self._hubs == tokens.unsqueeze(-1), -torch.inf)
        nearest_hubs = products.topk(min(k + _MARGIN, len(self._hubs)), dim=-1).indices
        return torch.cat([self._kept[places], self._hubs[nearest_hubs]], dim=-1)

    def _directions(self, rows: Tensor) -> Tensor:
        """The rows in float32, for cosine normalised."""
        if self.metric == "cosine":
            return torch.nn.functional.normalize(rows.float(), dim=-1)
        return rows.float()

    def _placed(self, tokens: Tensor) -> Tensor:
        """Where tokens lie in the graph's space, (Q, D) float32."""
        vectors = self._directions(self._embedding[tokens]) - self._mean
        divisors = self._lengths[tokens].clamp_min(_TINY).pow(_POWER[self.metric])  # (Q,)
        return vectors / divisors.unsqueeze(-1)


@contextmanager
def _one_thread() -> Iterator[ModuleType]:
    """The library faiss, limited to one thread."""
    try:
        import faiss
    except ImportError as error:
        raise ImportError("HnswIndex needs faiss: pip install 'ngrpo[hnsw]', or take the exact index.") from error
    threads_before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield faiss
    finally:
        faiss.omp_set_num_threads(threads_before)
