# SPDX-License-Identifier: Apache-2.0
"""The graph index against the exact one."""

import sys

import pytest
import torch
from torch import Tensor

from perturbations import create
from perturbations.neighbors import ExactIndex, HnswIndex, create_index

pytest.importorskip("faiss", reason="faiss is not installed: pip install 'ngrpo[hnsw]'")

SIZE = 2500


@pytest.fixture(autouse=True)
def _few_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all hubs the exact search would compare fewer pairs of so small a vocabulary."""
    monkeypatch.setattr(HnswIndex, "hubs", 100)


def matrix(kind: str) -> Tensor:
    """Random directions around a large common one, as token embeddings have; or 50 clusters of them."""
    draws = torch.Generator().manual_seed(1)
    rows = torch.randn(SIZE, 24, generator=draws)
    if kind == "clustered":
        centers = 3.0 * torch.randn(50, 24, generator=draws)
        cluster_of_row = torch.arange(SIZE) % 50
        rows = centers[cluster_of_row] + 0.3 * rows
    return rows + 2.0


def agreement(ids: Tensor, expected_ids: Tensor) -> float:
    """The share of the expected neighbors that are there."""
    is_there = (ids.unsqueeze(-1) == expected_ids.unsqueeze(1)).any(dim=1)
    return is_there.float().mean().item()


@pytest.mark.parametrize("metric", ["cosine", "l2", "dot"])
@pytest.mark.parametrize("kind", ["random", "clustered"])
def test_finds_what_the_exact_index_finds(metric: str, kind: str) -> None:
    embedding = matrix(kind)
    tokens = torch.arange(SIZE)
    excluded = [0, 7, 1200]
    ids, scores = HnswIndex(embedding, metric, excluded).query(tokens, 2)
    exact_ids, exact_scores = ExactIndex(embedding, metric, excluded).query(tokens, 2)
    assert ids.dtype == torch.int64
    assert scores.dtype == torch.float32
    assert agreement(ids, exact_ids) >= 0.98
    assert not (ids == tokens.unsqueeze(-1)).any()
    assert not torch.isin(ids, torch.tensor(excluded)).any()
    is_same = (ids == exact_ids).all(dim=-1)
    assert torch.equal(scores[is_same], exact_scores[is_same]), "the same pairs have the same scores, bit for bit"
    assert (scores <= exact_scores).all()


@pytest.mark.parametrize("metric", ["cosine", "l2", "dot"])
def test_the_hubs_that_are_scored_are_the_nearest_ones(metric: str) -> None:
    """Of vectors whose lengths differ much, so that products, cosines and distances order them differently."""
    lengths = torch.rand(SIZE, 1, generator=torch.Generator().manual_seed(2))
    embedding = matrix("random") * lengths
    tokens = torch.arange(0, SIZE, 100)
    graph = HnswIndex(embedding, metric)
    candidates = graph._candidates(tokens, 2)
    assert candidates is not None

    hubs = graph._hubs
    pairs = torch.arange(len(tokens)).repeat_interleave(graph.hubs)
    exact = ExactIndex(embedding, metric)
    scores = exact.score(tokens, embedding[tokens], pairs, hubs.repeat(len(tokens))).view(len(tokens), -1)
    is_token_itself = hubs == tokens.unsqueeze(-1)
    nearest = scores.masked_fill(is_token_itself, -torch.inf).topk(10, dim=-1).indices
    nearest_hubs = hubs[nearest].sort(dim=-1).values
    assert torch.equal(candidates[:, -10:].sort(dim=-1).values, nearest_hubs)


@pytest.mark.parametrize("k", [149, 5])
def test_a_small_vocabulary_is_served_exactly(k: int) -> None:
    """Where the graph would look at everything anyway."""
    embedding = matrix("clustered")[:150]
    tokens = torch.arange(150)
    ids, _ = HnswIndex(embedding).query(tokens, k)
    exact_ids, _ = ExactIndex(embedding).query(tokens, k)
    assert torch.equal(ids, exact_ids)


@pytest.mark.parametrize("metric", ["cosine", "l2", "dot"])
def test_zero_and_equal_vectors_give_no_nan(metric: str) -> None:
    embedding = matrix("random")
    embedding[100:400] = 0.0
    embedding[400:900] = embedding[400]
    ids, scores = HnswIndex(embedding, metric).query(torch.arange(SIZE), 3)
    assert torch.isfinite(scores).all()
    assert (ids.sort(dim=-1).values.diff(dim=-1) > 0).all(), "three different tokens"


def test_the_factory_makes_the_index_that_is_asked_for() -> None:
    """L1 has no graph."""
    embedding = matrix("random")[:50]
    assert type(create_index(embedding)) is ExactIndex
    assert type(create_index(embedding, "hnsw", "dot")) is HnswIndex
    assert type(create_index(embedding, "hnsw", "l1")) is ExactIndex


def test_wrong_names_are_refused() -> None:
    embedding = matrix("random")[:50]
    with pytest.raises(ValueError, match=r"index='hsnw'.*exact, hnsw.*Did you mean 'hnsw'"):
        create_index(embedding, "hsnw")
    with pytest.raises(ValueError, match=r"metric='l1'.*cosine, l2 and dot.*ExactIndex"):
        HnswIndex(embedding, "l1")


def test_an_index_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"pip install 'ngrpo\[hnsw\]'"):
        HnswIndex(matrix("random")).query(torch.tensor([0]), 2)


def test_a_perturbation_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perturbations.methods.neighbor.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"index='hnsw'.*pip install"):
        create("neighbor", index="hnsw").check_model(100)
    create("neighbor", index="hnsw", metric="l1").check_model(100)
