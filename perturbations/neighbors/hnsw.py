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
from perturbations.neighbors.base import PairScores, Shard, TableIndex, order
from perturbations.neighbors.exact import ExactIndex

_MARGIN = 8
_BLOCK = 64  # tokens scored at once
_SETTINGS = {"m": 2, "ef_construction": 1, "ef": 1, "rerank": 1, "hubs": 0}  # lowest values
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

    def __init__(
        self,
        embedding: Tensor | Shard,
        metric: str = "cosine",
        exclude: Sequence[int] = (),
        m: int = 32,
        ef_construction: int = 300,
        ef: int = 256,
        rerank: int = 128,
        hubs: int = 2048,
        lazy: bool | None = None,
    ) -> None:
        """As :class:`ExactIndex`; copies the embedding unless a CPU has all of it. ``UsageError`` for l1 too.

        ``m``: links of a vector in the graph (twice as many at its base). ``ef_construction``, ``ef``: candidates
        compared while building, and in a search, of which ``rerank`` are scored. ``hubs``: compared with every query.
        """
        if metric == "l1":
            raise UsageError("metric='l1': an HNSW graph knows cosine, l2 and dot; take ExactIndex for l1.")
        settings = {"m": m, "ef_construction": ef_construction, "ef": ef, "rerank": rerank, "hubs": hubs}
        for name, low in _SETTINGS.items():
            if settings[name] < low:
                raise UsageError(f"{name}={settings[name]}: must be at least {low}.")
        self.metric, self._settings = metric, settings
        shard = Shard.of(embedding)
        self._embedding = shard.whole().cpu()
        self._pairs = PairScores(Shard.of(self._embedding), metric)
        super().__init__(shard.size, shard.rows.device, exclude, lazy)
        self._exact = ExactIndex(self._embedding, metric, exclude)
        self._kept = (~self._excluded.cpu()).nonzero().flatten()

    @cached_property
    def _graph(self) -> Any:
        """The graph; its vectors are in the order of ``_kept``."""
        faiss, settings = _library(), self._settings
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.cat([self._directions(part) for part in self._embedding.split(4096)])
            self._mean = whole.mean(dim=0)
            self._lengths = (whole - self._mean).norm(dim=-1)
            rank = -self._pairs.norms.float() if self.metric == "dot" else self._lengths
            near_everything = self._kept[rank[self._kept].argsort(stable=True)[: settings["hubs"]]]
            self._hubs = near_everything.sort().values
            self._hub_rows = self._embedding[self._hubs].float()
            graph = faiss.IndexHNSWFlat(whole.shape[1], settings["m"])
            graph.hnsw.efConstruction = settings["ef_construction"]
            with _one_thread(faiss):
                for part in self._kept.split(4096):
                    graph.add(self._placed(part).numpy())
        return graph

    def search(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As :meth:`TableIndex.search`; ``ImportError`` where faiss is not installed."""
        pairs = [self._search_block(block, k) for block in tokens.cpu().split(_BLOCK)]
        ids, scores = (torch.cat(part) for part in zip(*pairs))
        return ids.to(self._device), scores.to(self._device)

    def _search_block(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        ids = self._candidates(tokens, k)
        if ids is None:
            return self._exact.search(tokens, k)
        ids = ids.sort(dim=-1).values
        pairs = torch.arange(len(ids)).repeat_interleave(ids.shape[1])
        scores = self._pairs.of(tokens, self._embedding[tokens], pairs, ids.reshape(-1)).view_as(ids)
        scores[:, 1:].masked_fill_(ids[:, 1:] == ids[:, :-1], -torch.inf)
        ids, scores = order(ids, scores.masked_fill(ids == tokens.unsqueeze(-1), -torch.inf))
        return ids[:, :k], scores[:, :k]

    def _candidates(self, tokens: Tensor, k: int) -> Tensor | None:
        """(Q, C) ids, with repetitions; None where the graph cannot name enough."""
        count = max(self._settings["rerank"], k + _MARGIN) + 1
        if count + self._settings["hubs"] >= len(self._kept):
            return None  # the exact search compares fewer pairs
        graph = self._graph
        graph.hnsw.efSearch = max(self._settings["ef"], count)
        with _one_thread(_library()):
            places = torch.from_numpy(graph.search(self._placed(tokens).numpy(), count)[1])
        if (places < 0).any():
            return None  # vectors that are equal by the hundreds can fall apart into islands
        ids = self._kept[places]
        if not len(self._hubs):
            return ids
        near = self._hub_scores(tokens).topk(min(k + _MARGIN, len(self._hubs)), dim=-1).indices
        return torch.cat([ids, self._hubs[near]], dim=-1)

    def _hub_scores(self, tokens: Tensor) -> Tensor:
        """Ordered as the hubs of each token, (Q, hubs) float32; the token itself is last."""
        products = self._embedding[tokens].float() @ self._hub_rows.T
        norms = self._pairs.norms[self._hubs].float()
        if self.metric == "cosine":
            products.div_(norms.clamp_min(torch.finfo(torch.float32).tiny))
        elif self.metric == "l2":
            products.mul_(2.0).sub_(norms.square())
        return products.masked_fill_(self._hubs == tokens.unsqueeze(-1), -torch.inf)

    def _directions(self, rows: Tensor) -> Tensor:
        return torch.nn.functional.normalize(rows.float(), dim=-1) if self.metric == "cosine" else rows.float()

    def _placed(self, tokens: Tensor) -> Tensor:
        """Where tokens lie in the graph's space, (Q, D) float32."""
        directions = self._directions(self._embedding[tokens]) - self._mean
        return directions / self._lengths[tokens].clamp_min(_TINY).pow(_POWER[self.metric]).unsqueeze(-1)


@contextmanager
def _one_thread(faiss: ModuleType) -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _library() -> ModuleType:
    try:
        import faiss
    except ImportError as error:
        raise ImportError("HnswIndex needs faiss: pip install 'ngrpo[hnsw]', or take the exact index.") from error
    return faiss
