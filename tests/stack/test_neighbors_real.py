# SPDX-License-Identifier: Apache-2.0
"""Neighbors on a real model's embeddings and tokens, and across a weight sync of a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ngrpo.rollout import neighbor_drift, set_perturbation
from perturbations.neighbors import ExactIndex, HnswIndex, word_numbers
from tests.stack.harness import Rollout, chat_prompts, gaps, sample, sync

pytest.importorskip("faiss", reason="faiss is not installed: pip install 'ngrpo[hnsw]'")


@pytest.fixture(scope="module")
def model(smollm2: str) -> str:
    return smollm2


@pytest.fixture(scope="module")
def embedding(hf_model: Any) -> Tensor:
    return hf_model.get_input_embeddings().weight.detach().clone()


def recall(embedding: Tensor, metric: str, tokens: Tensor, **options: Any) -> float:
    exact, graph = ExactIndex(embedding, metric), HnswIndex(embedding, metric, **options)
    want = torch.cat([exact.search(block, 2)[0] for block in tokens.split(64)])
    found = torch.cat([graph.search(block, 2)[0] for block in tokens.split(64)])
    return (found.unsqueeze(-1) == want.unsqueeze(1)).any(dim=1).float().mean().item()


def test_recall_on_a_sixth_of_the_vocabulary(embedding: Tensor) -> None:
    """8,192 of 49,152 rows, and a sixth of the hubs."""
    part = embedding[::6].contiguous()
    assert recall(part, "cosine", torch.arange(0, len(part), 16), hubs=2048 // 6) >= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["cosine", "l2", "dot"])
def test_recall_on_the_whole_vocabulary(embedding: Tensor, metric: str) -> None:
    assert recall(embedding.bfloat16(), metric, torch.arange(0, len(embedding), 24)) >= 0.99


def test_real_spellings_of_one_word(engine: Any) -> None:
    tokenizer = engine.get_tokenizer()
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    numbers = dict(zip(texts, word_numbers(texts, len(texts)).tolist()))
    for group in [
        [" apple", "apple", " apples", " Apple"],
        [" city", " City", "city", " cities"],
        [" run", " runs", " running", " Run"],
        [" walked", " walks", " walk", " walking"],
        [" because", "because", " Because"],
    ]:
        assert len({numbers[text] for text in group}) == 1, group
    different = [" apple", " banana", " thus", " therefore", " town", " city", " large", " small", "1", "2", " since"]
    assert len({numbers[text] for text in different}) == len(different)


@pytest.fixture
def weights(engine: Any, hf_model: Any, embedding: Tensor, tmp_path: Path) -> Iterator[Any]:
    """Gives rollout and trainer another embedding matrix, by the way of the CPU profile's weight sync."""
    parameter = hf_model.get_input_embeddings().weight

    def replace(rows: Tensor) -> None:
        parameter.data.copy_(rows)
        sync(engine, hf_model, tmp_path)

    yield replace
    replace(embedding)


def assert_sets(rollouts: list[Rollout], index: ExactIndex) -> None:
    """Each recorded set is the anchor and its two nearest by this index."""
    ids = torch.cat([torch.from_numpy(r.record.ids.astype("int64")) for r in rollouts])
    assert len(ids) > 20
    assert torch.equal(ids[:, 1:], index.query(ids[:, 0], 2)[0])


def test_a_weight_sync_changes_the_sets_as_the_policy_says(
    engine: Any, hf_model: Any, embedding: Tensor, weights: Any
) -> None:
    """Noise of half the embeddings' size moves most sets. Replay stays exact under every policy."""
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(2))
    moved = embedding + 0.5 * embedding.square().mean().sqrt() * noise
    before, after = ExactIndex(embedding), ExactIndex(moved)
    prompts = chat_prompts(engine, copies=2)
    options = {"rate": 0.5, "mix_temperature": 3.0}

    def rollouts(refresh: str) -> list[Rollout]:
        set_perturbation(engine, "neighbor", refresh=refresh, **options)
        done = sample(engine, prompts, max_tokens=12)
        assert gaps(hf_model, done).max() <= 1e-4
        return done

    for refresh in ("never", "every_sync"):
        assert_sets(rollouts(refresh), before)
    weights(moved)
    drift = neighbor_drift(engine)
    assert drift.tokens == drift.compared > 20
    assert drift.changed == drift.changed_since_start > drift.tokens // 4
    assert_sets(rollouts("every_sync"), after)
    assert_sets(rollouts("never"), before)
    set_perturbation(engine, "neighbor", skip_same_word=True, **options)
    assert gaps(hf_model, sample(engine, prompts, max_tokens=12)).max() <= 1e-4
