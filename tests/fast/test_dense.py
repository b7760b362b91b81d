# SPDX-License-Identifier: Apache-2.0
"""Perturbations that return vectors: their records, their replay without gradient, their place in the store."""

import dataclasses

import numpy as np
import pytest
import torch

from ngrpo.rollout.trajectories import TrajectoryStore
from ngrpo.trainers.common.sample_records import records
from perturbations import ReplayRecord, replaying
from perturbations.edit import InputEdit, dense_edit, realise
from perturbations.replay.scope import ReplayScope
from perturbations.replay.trajectory import FinishedTrajectory
from tests.fast.replay_examples import Embedder, small


def a_record(vectors: np.ndarray | None) -> ReplayRecord:
    return ReplayRecord(
        5,
        2,
        9,
        np.array([3, 7], np.int32),
        np.array([[1, 2], [3, 4]], np.int32),
        np.array([[0.5, 0.5], [0.25, 0.75]], np.float32),
        np.array([0.5, 0.5], np.float32),
        np.array([True, False]),
        vectors,
    )


@pytest.mark.parametrize("size", [1, 3, 576])
def test_round_trip(size: int) -> None:
    """The vectors cost 4·D bytes a position, and one or two bytes say how many."""
    vectors = np.random.default_rng(0).normal(size=(2, size)).astype(np.float32)
    record = a_record(vectors)
    data = record.to_bytes()
    assert len(data) == len(a_record(None).to_bytes()) + 2 * 4 * size + (1 if size < 128 else 2)
    again = ReplayRecord.from_bytes(data)
    np.testing.assert_array_equal(again.vectors, vectors)
    assert again == record and again != a_record(None)
    short = record.truncate(7)
    np.testing.assert_array_equal(ReplayRecord.from_bytes(short.to_bytes()).vectors, vectors[:1])
    empty = record.truncate(2)
    assert ReplayRecord.from_bytes(empty.to_bytes()).vectors.shape == (0, size)
    (found,) = records([FinishedTrajectory(record, np.zeros(9, np.float32)).pack()], 1)
    assert found == record


def test_vectors_are_fed_as_they_are_and_are_constants() -> None:
    """Alone, with weight 0; and added to a mixture: 0.5 (2, 3) + 0.5 (6, 7) + (0.25, -1) = (4.25, 4)."""
    model = Embedder()
    added = np.array([[0.25, -1.0]], np.float32)
    for weights, want in ((np.zeros((1, 2), np.float32), [0.25, -1.0]), (np.full((1, 2), 0.5, np.float32), [4.25, 4])):
        record = dataclasses.replace(small([1]), weights=weights, vectors=added)
        model.zero_grad()
        with replaying(model, [record, None]) as stats:
            output = model(torch.tensor([[0, 5, 6], [7, 8, 9]]))
        assert output[0, 1].tolist() == want
        assert stats.count() == 1 and stats.mean_shift() > 0.0
        output[0, 1].sum().backward()
        assert bool(model.embedding.weight.grad.any()) == bool(weights.any())


def test_a_batch_of_dense_and_sparse_records() -> None:
    model = Embedder()
    first = dataclasses.replace(small([1]), weights=np.zeros((1, 2), np.float32), vectors=np.ones((1, 2), np.float32))
    with replaying(model, [first, small([2])]):
        output = model(torch.tensor([[0, 5, 6], [7, 8, 9]]))
    assert output[0, 1].tolist() == [1, 1] and output[1, 2].tolist() == [4, 5]


def test_a_scaled_embedding() -> None:
    """Gemma multiplies its embeddings by s; the rollout's override lies before that, so vectors are multiplied too."""
    model = Embedder()
    model.embedding.scalar_embed_scale = 3.0
    record = dataclasses.replace(small([1]), weights=np.zeros((1, 2), np.float32), vectors=np.ones((1, 2), np.float32))
    with replaying(model, [record]):
        assert model(torch.tensor([[0, 5, 6]]))[0, 1].tolist() == [3, 3]
    scope = ReplayScope(model.embedding)
    with scope([record], None):
        model(torch.tensor([[0, 5, 6]]))
        seen, _ = scope.replayed(torch.zeros(3, 10), torch.zeros(3), 1.0)
    assert seen.edit.vectors.tolist() == [[3, 3]], "a density sees what was fed"


def test_realise_by_hand() -> None:
    lookup = torch.nn.Embedding.from_pretrained(torch.arange(6.0).view(3, 2))
    tokens, vectors = torch.tensor([2, 0]), torch.tensor([[7.0, 8.0], [9.0, 10.0]])
    assert torch.equal(realise(dense_edit(tokens, vectors), lookup, None), vectors)
    on_top = InputEdit(torch.tensor([[1], [2]]), torch.ones(2, 1), None, vectors)
    assert realise(on_top, lookup, None).tolist() == [[9, 11], [13, 15]]


def test_the_store_keeps_what_arrives() -> None:
    """Vectors are there once an edit has some; a trajectory's record of earlier turns lies in the same chunks."""
    store = TrajectoryStore(2, 16)
    vectors = np.arange(8, dtype=np.float32).reshape(2, 4)
    record = dataclasses.replace(
        a_record(vectors), ids=np.array([[1], [3]], np.int32), weights=np.zeros((2, 1), np.float32), sigma=None
    )
    store.load(store.open("a", record.seed, 9, True), record)
    again, _ = store.record("a")
    assert again == dataclasses.replace(record, prompt_tokens=9)
