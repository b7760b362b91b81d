# SPDX-License-Identifier: Apache-2.0
"""The graph index against the exact one."""

import sys

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
def test_the_hubs_that_are_scored_are_the_nearest_ones(metric: str) -> None:
    """Of vectors whose lengths differ much, so that products, cosines and distances order them differently."""
    embedding = matrix("random") * torch.rand(SIZE, 1, generator=torch.Generator().manual_seed(2))
    graph, exact, tokens = HnswIndex(embedding, metric), ExactIndex(embedding, metric), torch.arange(0, SIZE, 100)
    candidates = graph._candidates(tokens, 2)
    assert candidates is not None
    pairs = torch.arange(len(tokens)).repeat_interleave(graph.hubs)
    scores = exact.score(tokens, embedding[tokens], pairs, graph._hubs.repeat(len(tokens))).view(len(tokens), -1)
    nearest = scores.masked_fill(graph._hubs == tokens.unsqueeze(-1), -torch.inf).topk(10, dim=-1).indices
    assert torch.equal(candidates[:, -10:].sort(dim=-1).values, graph._hubs[nearest].sort(dim=-1).values)


def test_a_small_vocabulary_is_served_exactly() -> None:
    """Where the graph would look at everything anyway."""
    embedding, tokens = matrix("clustered")[:150], torch.arange(150)
    for k in (149, 5):
        want = ExactIndex(embedding).query(tokens, k)[0]
        assert torch.equal(HnswIndex(embedding).query(tokens, k)[0], want)


def test_zero_and_equal_vectors_give_no_nan() -> None:
    embedding = matrix("random")
    embedding[100:400] = 0.0
    embedding[400:900] = embedding[400]
    for metric in ("cosine", "l2", "dot"):
        ids, scores = HnswIndex(embedding, metric).query(torch.arange(SIZE), 3)
        assert torch.isfinite(scores).all()
        assert (ids.sort(dim=-1).values.diff(dim=-1) > 0).all(), "three different tokens"


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
