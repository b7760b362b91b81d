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

_MARGIN = 8
_BLOCK = 64  # tokens scored at once
# At 0 the graph's order is the wanted one and its search gets lost, at 1 its search is easy and its order another.
_POWER = {"cosine": 0.65, "l2": 0.75, "dot": 0.75}
_TINY = 1e-12


class HnswIndex(TableIndex):
    """The k nearest tokens among candidates that a graph proposes, scored and ordered as by :class:`ExactIndex`."""

    # Token embeddings share a large common part. Tokens close to it are near everything, and hide the rest from a graph
    # over the plain vectors. So the graph holds the vectors (for cosine normalised) less their mean, each divided by a
    # power of its length. The ``hubs`` tokens closest to the mean (for dot the longest) are compared with every query.
    #
    # One thread builds the graph in the order of the ids on the first query: all ranks must have the same graph.

    links = 32  # of a vector in the graph; twice as many at its base
    width_of_build, width_of_search = 300, 256  # candidates compared
    rerank = 128  # of those of a search, how many are scored
    hubs = 2048

    def __init__(
        self, embedding: Tensor | Shard, metric: str = "cosine", exclude: Sequence[int] = (), lazy: bool | None = None
    ) -> None:
        """As :class:`ExactIndex`; copies the embedding unless a CPU has all of it. ``UsageError`` for l1 too."""
        if metric == "l1":
            raise UsageError("metric='l1': an HNSW graph knows cosine, l2 and dot; take ExactIndex for l1.")
        shard = Shard.of(embedding)
        self.metric, self._embedding = metric, shard.whole().cpu()
        self._exact = ExactIndex(self._embedding, metric, exclude)
        super().__init__(shard.size, shard.rows.device, exclude, lazy)
        self._kept = (~self._excluded.cpu()).nonzero().flatten()

    @cached_property
    def _graph(self) -> Any:
        """The graph; its vectors are in the order of ``_kept``."""
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.cat([self._directions(part) for part in self._embedding.split(4096)])
            self._mean = whole.mean(dim=0)
            self._lengths = (whole - self._mean).norm(dim=-1)
            rank = -self._exact.norms.float() if self.metric == "dot" else self._lengths
            near_everything = self._kept[rank[self._kept].argsort(stable=True)[: self.hubs]]
            self._hubs = near_everything.sort().values
            self._hub_rows = self._embedding[self._hubs].float()
            with _one_thread() as faiss:
                graph = faiss.IndexHNSWFlat(whole.shape[1], self.links)
                graph.hnsw.efConstruction = self.width_of_build
                for part in self._kept.split(4096):
                    graph.add(self._placed(part).numpy())
        return graph

    def search(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As :meth:`TableIndex.search`; ``ImportError`` where faiss is not installed."""
        found = []
        for block in tokens.cpu().split(_BLOCK):
            ids = self._candidates(block, k)
            if ids is None:
                found.append(self._exact.search(block, k))
                continue
            ids = ids.sort(dim=-1).values
            pairs = torch.arange(len(ids)).repeat_interleave(ids.shape[1])
            scores = self._exact.score(block, self._embedding[block], pairs, ids.reshape(-1)).view_as(ids)
            scores[:, 1:].masked_fill_(ids[:, 1:] == ids[:, :-1], -torch.inf)
            ids, scores = order(ids, scores.masked_fill(ids == block.unsqueeze(-1), -torch.inf))
            found.append((ids[:, :k], scores[:, :k]))
        ids, scores = (torch.cat(parts) for parts in zip(*found))
        return ids.to(self._device), scores.to(self._device)

    def _candidates(self, tokens: Tensor, k: int) -> Tensor | None:
        """(Q, C) ids, with repetitions; None where the graph cannot name enough."""
        count = max(self.rerank, k + _MARGIN) + 1
        if count + self.hubs >= len(self._kept):
            return None  # the exact search compares fewer pairs
        graph = self._graph
        graph.hnsw.efSearch = max(self.width_of_search, count)
        with _one_thread():
            places = torch.from_numpy(graph.search(self._placed(tokens).numpy(), count)[1])
        if (places < 0).any():
            return None  # vectors that are equal by the hundreds can fall apart into islands
        # The hubs in the order of their scores; the token itself is last.
        products = self._embedding[tokens].float() @ self._hub_rows.T
        norms = self._exact.norms[self._hubs].float()
        if self.metric == "cosine":
            products.div_(norms.clamp_min(torch.finfo(torch.float32).tiny))
        elif self.metric == "l2":
            products.mul_(2.0).sub_(norms.square())
        products.masked_fill_(self._hubs == tokens.unsqueeze(-1), -torch.inf)
        near = products.topk(min(k + _MARGIN, len(self._hubs)), dim=-1).indices
        return torch.cat([self._kept[places], self._hubs[near]], dim=-1)

    def _directions(self, rows: Tensor) -> Tensor:
        return torch.nn.functional.normalize(rows.float(), dim=-1) if self.metric == "cosine" else rows.float()

    def _placed(self, tokens: Tensor) -> Tensor:
        """Where tokens lie in the graph's space, (Q, D) float32."""
        directions = self._directions(self._embedding[tokens]) - self._mean
        return directions / self._lengths[tokens].clamp_min(_TINY).pow(_POWER[self.metric]).unsqueeze(-1)


@contextmanager
def _one_thread() -> Iterator[ModuleType]:
    """The library faiss, held to one thread."""
    try:
        import faiss
    except ImportError as error:
        raise ImportError("HnswIndex needs faiss: pip install 'ngrpo[hnsw]', or take the exact index.") from error
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield faiss
    finally:
        faiss.omp_set_num_threads(before)
