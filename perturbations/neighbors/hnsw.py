"""Approximate nearest neighbors by a graph (HNSW, Malkov and Yashunin, arXiv 1603.09320), scored exactly."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perturbations.errors import UsageError
from perturbations.neighbors import files
from perturbations.neighbors.exact import ExactIndex
from perturbations.neighbors.scores import PairScores, order
from perturbations.neighbors.table import TableIndex

_MARGIN = 8
_BLOCK = 64  # tokens scored at once
_SEED = 100  # of the graph's levels
_SETTINGS = {"m": 2, "ef_construction": 1, "ef": 1, "rerank": 1, "hubs": 0}  # lowest values
# At 0 the graph's order is the wanted one and its search gets lost, at 1 its search is easy and its order another.
_POWER = {"cosine": 0.65, "l2": 0.75, "dot": 0.75}
_TINY = 1e-12


class HnswIndex(TableIndex):
    """The k nearest tokens among candidates that a graph proposes, scored and ordered as by :class:`ExactIndex`.

    Token embeddings share a large common part, and a graph over the plain vectors finds few of their neighbors: the
    tokens close to the common part are near everything, and hide the rest. So the two are looked for apart:

    - the graph holds the vectors (for cosine normalised first) after the mean is taken away, each divided by a power
      of its length, so that no token is near everything;
    - the ``hubs`` tokens that are near everything (the closest to the mean; for dot the longest) are compared with
      every query by one matrix product.

    The graph is built by one thread in the order of the ids, so the same embedding gives the same graph; several
    threads would build another one each time, and the ranks of a tensor-parallel group must agree. It lies in the
    host's memory, whatever the embedding's device.
    """

    def __init__(
        self,
        embedding: Tensor,
        metric: str = "cosine",
        exclude: Sequence[int] = (),
        m: int = 32,
        ef_construction: int = 300,
        ef: int = 256,
        rerank: int = 128,
        hubs: int = 2048,
        lazy: bool | None = None,
    ) -> None:
        """
        Args:
            embedding: (V, D), any float dtype; kept by reference on CPU, copied there from elsewhere.
            metric: cosine, l2 or dot.
            exclude: ids that are never neighbors; they may still be queried.
            m: links of a vector in the graph (twice as many at its base).
            ef_construction: candidates looked at for each vector while building.
            ef: candidates looked at in a search.
            rerank: candidates of a search that are scored.
            hubs: tokens compared with every query.
            lazy: as in :class:`TableIndex`.

        Raises:
            UsageError: as :class:`ExactIndex`, for l1, and for a number that is out of range.
            ImportError: where hnswlib is not installed.
        """
        settings = {"m": m, "ef_construction": ef_construction, "ef": ef, "rerank": rerank, "hubs": hubs}
        self._set_up(embedding, metric, exclude, settings, lazy)
        self._graph = _library().Index("l2", embedding.shape[1])
        kept = (~self._excluded.cpu()).nonzero().flatten()
        self._graph.init_index(len(kept), M=m, ef_construction=ef_construction, random_seed=_SEED)
        for part in kept.split(4096):
            self._graph.add_items(self._placed(part).numpy(), part.numpy(), num_threads=1)

    def _set_up(
        self, embedding: Tensor, metric: str, exclude: Sequence[int], settings: dict[str, int], lazy: bool | None
    ) -> None:
        """All but the graph."""
        if metric == "l1":
            raise UsageError("metric='l1': an HNSW graph knows cosine, l2 and dot; take ExactIndex for l1.")
        for name, low in _SETTINGS.items():
            if settings[name] < low:
                raise UsageError(f"{name}={settings[name]}: must be at least {low}.")
        self._pairs = PairScores(embedding.detach().cpu(), metric)
        super().__init__(embedding.shape[0], embedding.device, exclude, lazy)
        self.metric = metric
        self._settings = settings
        self._exact = ExactIndex(self._pairs.embedding, metric, exclude)
        with torch.inference_mode(False), torch.no_grad():
            parts = self._pairs.embedding.split(4096)
            whole = torch.cat([self._directions(part) for part in parts])
            self._mean = whole.mean(dim=0)
            self._lengths = (whole - self._mean).norm(dim=-1)
            rank = -self._pairs.norms.float() if metric == "dot" else self._lengths
            kept = (~self._excluded.cpu()).nonzero().flatten()
            near_everything = kept[rank[kept].argsort(stable=True)[: settings["hubs"]]]
            self._hubs = near_everything.sort().values
            self._hub_rows = self._pairs.embedding[self._hubs].float()

    def search(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See :meth:`TableIndex.search`."""
        found = [self._search_block(block, k) for block in tokens.cpu().split(_BLOCK)]
        ids, scores = (torch.cat(part) for part in zip(*found))
        return ids.to(self._device), scores.to(self._device)

    def _search_block(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        ids = self._candidates(tokens, k)
        if ids is None:
            return self._exact.search(tokens, k)
        ids = ids.sort(dim=-1).values
        rows = tokens.unsqueeze(-1).expand_as(ids)
        scores = self._pairs.of(rows.reshape(-1), ids.reshape(-1)).view_as(rows)
        scores[:, 1:].masked_fill_(ids[:, 1:] == ids[:, :-1], -torch.inf)
        ids, scores = order(ids, scores.masked_fill(ids == rows, -torch.inf))
        return ids[:, :k], scores[:, :k]

    def _candidates(self, tokens: Tensor, k: int) -> Tensor | None:
        """(Q, C) ids, with repetitions; None where the graph cannot name enough."""
        count = self._graph.element_count
        wanted = max(self._settings["rerank"], k + _MARGIN) + 1
        if wanted + self._settings["hubs"] >= count:
            return None  # the exact search looks at fewer pairs
        self._graph.set_ef(max(self._settings["ef"], wanted))
        try:
            labels, _ = self._graph.knn_query(self._placed(tokens).numpy(), k=wanted, num_threads=1)
        except RuntimeError:
            return None  # vectors that are equal by the hundreds can fall apart into islands
        found = torch.from_numpy(labels.astype("int64"))
        if not len(self._hubs):
            return found
        near = self._hub_scores(tokens).topk(min(k + _MARGIN, len(self._hubs)), dim=-1).indices
        return torch.cat([found, self._hubs[near]], dim=-1)

    def _hub_scores(self, tokens: Tensor) -> Tensor:
        """What orders the hubs for each token, (Q, hubs) float32; the token itself is last."""
        products = self._pairs.embedding[tokens].float() @ self._hub_rows.T
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
        moved = self._directions(self._pairs.embedding[tokens]) - self._mean
        return moved / self._lengths[tokens].clamp_min(_TINY).pow(_POWER[self.metric]).unsqueeze(-1)

    # --- files ----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes graph and table to one file, whole or not at all.

        Args:
            path: the file; it holds the graph's own copy of the vectors, 4 bytes per element.
        """
        header, arrays = self._state()
        header |= {"metric": self.metric, **self._settings}
        with tempfile.TemporaryDirectory() as folder:
            graph = os.path.join(folder, "graph")
            self._graph.save_index(graph)
            arrays["graph"] = np.fromfile(graph, dtype=np.uint8)
        files.write(path, "HnswIndex", self._pairs.embedding, header, arrays)

    @classmethod
    def load(cls, path: str | Path, embedding: Tensor, lazy: bool | None = None) -> HnswIndex:
        """An index with the graph, the settings and the rows that were saved.

        Args:
            path: what :meth:`save` wrote.
            embedding: (V, D), the same values as then.
            lazy: as in :class:`TableIndex`.

        Raises:
            UsageError: where the file is no saved HnswIndex, or the embedding another one.
            ImportError: where hnswlib is not installed.
        """
        header, arrays = files.read(path, "HnswIndex", embedding)
        index = cls.__new__(cls)
        settings = {name: header[name] for name in _SETTINGS}
        index._set_up(embedding, header["metric"], header["exclude"], settings, lazy)
        index._graph = _library().Index("l2", embedding.shape[1])
        with tempfile.TemporaryDirectory() as folder:
            graph = os.path.join(folder, "graph")
            arrays["graph"].tofile(graph)
            index._graph.load_index(graph)
        index._restore(header, arrays)
        return index


def _library() -> Any:
    try:
        import hnswlib
    except ImportError as error:
        raise ImportError("HnswIndex needs hnswlib: pip install 'ngrpo[hnsw]', or take the exact index.") from error
    return hnswlib
