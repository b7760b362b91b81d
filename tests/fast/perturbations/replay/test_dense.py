# SPDX-License-Identifier: Apache-2.0
"""Perturbations that return vectors: their records, their replay without gradient, their place in the store."""

import dataclasses

import numpy as np
import pytest
import torch

from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import ReplayRecord, replaying
from perturbations.edit import InputEdit, dense_edit, realise
from perturbations.replay.scope import ReplayScope
from tests.support.replay_examples import Embedder, small


def dense(vector: list[float], weight: float = 0.0) -> ReplayRecord:
    """Feeds a vector at position 1, alone or added to the mixture with these weights."""
    weights = np.full((1, 2), weight, np.float32)
    return dataclasses.replace(small([1]), weights=weights, vectors=np.array([vector], np.float32))


@pytest.mark.parametrize(("weight", "want"), [(0.0, [0.25, -1.0]), (0.5, [4.25, 4.0])], ids=["alone", "added"])
def test_vectors_are_fed_as_they_are_and_are_constants(weight: float, want: list[float]) -> None:
    """Added to a mixture: 0.5 (2, 3) + 0.5 (6, 7) + (0.25, -1) = (4.25, 4); a record without any beside it."""
    model = Embedder()
    with replaying(model, [dense([0.25, -1.0], weight), small([2])]) as stats:
        output = model(torch.tensor([[0, 5, 6], [7, 8, 9]]))
    assert output[0, 1].tolist() == want and output[1, 2].tolist() == [4, 5]
    assert stats.count() == 2
    output[0, 1].sum().backward()
    assert bool(model.embedding.weight.grad.any()) == (weight > 0.0)


def test_a_scaled_embedding() -> None:
    """Gemma multiplies its embeddings by s; the rollout's override lies before that, so vectors are multiplied too."""
    model = Embedder()
    model.embedding.scalar_embed_scale = 3.0
    scope = ReplayScope(model.embedding)
    with scope([dense([1.0, 1.0])], None):
        assert model(torch.tensor([[0, 5, 6]]))[0, 1].tolist() == [3, 3]
        seen, _ = scope.replayed(torch.zeros(3, 10), torch.zeros(3), 1.0)
    assert seen.edit.vectors.tolist() == [[3, 3]], "a density sees what was fed"
    model.bfloat16().embedding.scalar_embed_scale = 25.298
    with (scope := ReplayScope(model.embedding))([dense([1.0, 1.0])], None):
        model(torch.tensor([[0, 5, 6]]))
        seen, _ = scope.replayed(torch.zeros(3, 10), torch.zeros(3), 1.0)
    assert seen.edit.vectors.tolist() == [[25.25, 25.25]], "as the model rounds it"


def test_realise_by_hand() -> None:
    lookup = torch.nn.Embedding.from_pretrained(torch.arange(6.0).view(3, 2))
    tokens, vectors = torch.tensor([2, 0]), torch.tensor([[7.0, 8.0], [9.0, 10.0]])
    assert torch.equal(realise(dense_edit(tokens, vectors), lookup, None), vectors)
    on_top = InputEdit(torch.tensor([[1], [2]]), torch.ones(2, 1), None, vectors)
    assert realise(on_top, lookup, None).tolist() == [[9, 11], [13, 15]]


def test_the_store_keeps_what_arrives() -> None:
    """Vectors are there once an edit has some; a trajectory's record of earlier turns lies in the same chunks."""
    store, record = TrajectoryStore(2, 16), dense([5.0, 7.0])
    store.load(store.open("a", record.seed, 3, True), record)
    again, _ = store.record("a")
    assert again == dataclasses.replace(record, prompt_tokens=3)
