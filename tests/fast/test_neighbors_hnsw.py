# SPDX-License-Identifier: Apache-2.0
"""The graph index against the exact one."""

import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from perturbations import create
from perturbations.neighbors import ExactIndex, HnswIndex, create_index

pytest.importorskip("faiss", reason="faiss is not installed: pip install 'ngrpo[hnsw]'")

SIZE = 2500


@pytest.fixture(autouse=True)
def _few_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all hubs the exact search would compare fewer pairs of so small a vocabulary."""
    monkeypatch.setattr(HnswIndex, "hubs", 100)


def matrix(kind: str) -> torch.Tensor:
    """Random directions around a large common one, as token embeddings have; or 50 clusters of them."""
    draws = torch.Generator().manual_seed(1)
    rows = torch.randn(SIZE, 24, generator=draws)
    if kind == "clustered":
        rows = 3.0 * torch.randn(50, 24, generator=draws)[torch.arange(SIZE) % 50] + 0.3 * rows
    return rows + 2.0


def agreement(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return (found.unsqueeze(-1) == wanted.unsqueeze(1)).any(dim=1).float().mean().item()


@pytest.mark.parametrize("metric", ["cosine", "l2", "dot"])
@pytest.mark.parametrize("kind", ["random", "clustered"])
def test_finds_what_the_exact_index_finds(metric: str, kind: str) -> None:
    embedding, tokens, excluded = matrix(kind), torch.arange(SIZE), [0, 7, 1200]
    exact, graph = ExactIndex(embedding, metric, excluded), HnswIndex(embedding, metric, excluded)
    ids, scores = graph.query(tokens, 2)
    want, best = exact.query(tokens, 2)
    assert agreement(ids, want) >= 0.98
    assert ids.dtype == torch.int64 and scores.dtype == torch.float32
    assert not (ids == tokens.unsqueeze(-1)).any()
    assert not torch.isin(ids, torch.tensor(excluded)).any()
    same = (ids == want).all(dim=-1)
    assert torch.equal(scores[same], best[same]), "the same pairs have the same scores, bit for bit"
    assert (scores <= best).all()


@pytest.mark.parametrize("metric", ["cosine", "l2", "dot"])
def test_equal_rows_come_by_id_and_repetitions_once(metric: str) -> None:
    """Rows 2000 to 2007 are equal, and hubs as well as found by the graph: for dot they are the longest."""
    embedding = matrix("random")
    embedding[2000:2008] = 5.0 * embedding[10] if metric == "dot" else embedding.mean(0)
    ids, scores = HnswIndex(embedding, metric).query(torch.tensor([2003]), 7)
    assert ids[0].tolist() == [2000, 2001, 2002, 2004, 2005, 2006, 2007]
    assert len(set(scores[0].tolist())) == 1


def test_a_small_vocabulary_and_islands_are_served_exactly() -> None:
    """Where the graph would look at everything anyway, or cannot name enough tokens."""
    embedding, tokens = matrix("clustered")[:150], torch.arange(150)
    for k in (149, 5):
        want = ExactIndex(embedding).query(tokens, k)[0]
        assert torch.equal(HnswIndex(embedding).query(tokens, k)[0], want)
    graph = HnswIndex(embedding)
    graph.hubs, graph.rerank = 0, 20
    assert graph._candidates(tokens, 5) is not None

    class Torn:
        hnsw = SimpleNamespace(efSearch=0)

        def search(self, rows: np.ndarray, count: int) -> tuple[None, np.ndarray]:
            return None, np.full((len(rows), count), -1)

    graph._graph = Torn()
    assert torch.equal(graph.query(tokens, 5)[0], want)


def test_zero_and_equal_vectors_give_no_nan() -> None:
    embedding = matrix("random")
    embedding[100:400] = 0.0
    embedding[400:900] = embedding[400]
    for metric in ("cosine", "l2", "dot"):
        ids, scores = HnswIndex(embedding, metric).query(torch.arange(SIZE), 3)
        assert torch.isfinite(scores).all()
        assert (ids.sort(dim=-1).values.diff(dim=-1) > 0).all(), "three different tokens"


@pytest.mark.parametrize("cls", [ExactIndex, HnswIndex])
def test_an_index_can_be_pickled(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rows that it has computed, and its graph, which takes minutes to build."""
    index = cls(matrix("random"), "l2", [4])
    asked = torch.tensor([9, 4, 77])
    want = index.query(asked, 2)
    loaded = pickle.loads(pickle.dumps(index))
    monkeypatch.setattr("perturbations.neighbors.hnsw.HnswIndex._graph", None)
    everything, again = index.query(torch.arange(SIZE), 2), loaded.query(torch.arange(SIZE), 2)
    assert torch.equal(again[0], everything[0]) and torch.equal(again[1], everything[1])
    loaded = pickle.loads(pickle.dumps(index))
    monkeypatch.setattr(cls, "search", None)
    assert torch.equal(loaded.query(asked, 2)[0], want[0]), "known rows are not sought again"


def test_the_factory() -> None:
    embedding = matrix("random")[:50]
    assert type(create_index(embedding)) is ExactIndex
    assert type(create_index(embedding, "hnsw", "dot")) is HnswIndex
    assert type(create_index(embedding, "hnsw", "l1")) is ExactIndex
    with pytest.raises(ValueError, match=r"index='hsnw'.*exact, hnsw.*Did you mean 'hnsw'"):
        create_index(embedding, "hsnw")
    with pytest.raises(ValueError, match=r"metric='l1'.*cosine, l2 and dot.*ExactIndex"):
        HnswIndex(embedding, "l1")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"pip install 'ngrpo\[hnsw\]'"):
        HnswIndex(matrix("random")).query(torch.tensor([0]), 2)
    monkeypatch.setattr("perturbations.methods.neighbor.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"index='hnsw'.*pip install"):
        create("neighbor", index="hnsw").check_model(100)
    create("neighbor", index="hnsw", metric="l1").check_model(100)
