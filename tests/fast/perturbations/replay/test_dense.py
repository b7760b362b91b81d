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
    return dataclasses.replace(
        small([1]),
        weights=np.full((1, 2), weight, np.float32),
        vectors=np.array([vector], np.float32),
    )


@pytest.mark.parametrize(
    ("weight", "fed", "has_gradient"),
    [
        pytest.param(0.0, [0.25, -1.0], False, id="alone"),
        # 0.5 (2, 3) + 0.5 (6, 7) + (0.25, -1).
        pytest.param(0.5, [4.25, 4.0], True, id="added"),
    ],
)
def test_vectors_are_fed_as_they_are_and_are_constants(weight: float, fed: list[float], has_gradient: bool) -> None:
    """A record without vectors stands beside it."""
    model = Embedder()
    tokens = torch.tensor([[0, 5, 6], [7, 8, 9]])
    with replaying(model, [dense([0.25, -1.0], weight), small([2])]) as stats:
        output = model(tokens)
    assert output[0, 1].tolist() == fed
    assert output[1, 2].tolist() == [4, 5]
    assert stats.count() == 2
    output[0, 1].sum().backward()
    assert bool(model.embedding.weight.grad.any()) == has_gradient


def replay_ones(model: Embedder) -> tuple[list[float], list[float]]:
    """What the model is fed for a vector (1, 1), and what a density sees of it."""
    scope = ReplayScope(model.embedding)
    with scope([dense([1.0, 1.0])], None):
        output = model(torch.tensor([[0, 5, 6]]))
        seen_by_density, _ = scope.replayed(torch.zeros(3, 10), torch.zeros(3), 1.0)
    return output[0, 1].tolist(), seen_by_density.edit.vectors[0].tolist()


def test_vectors_are_scaled_as_the_embedding_is() -> None:
    """Gemma multiplies its embeddings by s; the rollout's override lies before that, so vectors are multiplied too."""
    model = Embedder()
    model.embedding.scalar_embed_scale = 3.0
    fed, seen_by_density = replay_ones(model)
    assert fed == [3, 3]
    assert seen_by_density == [3, 3], "a density sees what was fed"


def test_the_scale_is_rounded_as_the_model_rounds_it() -> None:
    model = Embedder().bfloat16()
    model.embedding.scalar_embed_scale = 25.298
    _, seen_by_density = replay_ones(model)
    assert seen_by_density == [25.25, 25.25]


def test_a_matrix_that_is_no_parameter() -> None:
    """Within a forward of FSDP1 the matrix is a plain tensor, and the module has no parameters."""
    model = Embedder().bfloat16()
    model.embedding.scalar_embed_scale = 25.298
    matrix = model.embedding.weight.detach()
    del model.embedding.weight
    model.embedding.weight = matrix
    _, seen_by_density = replay_ones(model)
    assert seen_by_density == [25.25, 25.25]


def test_realise_by_hand() -> None:
    """The embeddings of tokens 1 and 2 are (2, 3) and (4, 5)."""
    lookup = torch.nn.Embedding.from_pretrained(torch.arange(6.0).view(3, 2))
    vectors = torch.tensor([[7.0, 8.0], [9.0, 10.0]])
    alone = dense_edit(torch.tensor([2, 0]), vectors)
    assert torch.equal(realise(alone, lookup, None), vectors)

    added = InputEdit(ids=torch.tensor([[1], [2]]), weights=torch.ones(2, 1), vectors=vectors)
    assert realise(added, lookup, None).tolist() == [[9, 11], [13, 15]]


def test_the_store_keeps_what_arrives() -> None:
    """Vectors are there once an edit has some; a trajectory's record of earlier turns lies in the same chunks."""
    store = TrajectoryStore(2, 16)
    record = dense([5.0, 7.0])
    store.load(store.open("a", record.seed, 3, True), record)
    stored, _ = store.record("a")
    assert stored == dataclasses.replace(record, prompt_tokens=3)
