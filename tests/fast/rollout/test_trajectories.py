# SPDX-License-Identifier: Apache-2.0
"""The worker's memory of live trajectories, against a dictionary of lists."""

import numpy as np
import pytest

from ngrpo.rollout.chunks import Chunks
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import ReplayRecord


def test_chunks_hold_what_was_written_whoever_had_them_before() -> None:
    """1,200 steps of up to nine slots: rows are appended, slots are cleared, reused and added."""
    draws = np.random.default_rng(0)
    slots = 4
    chunks = Chunks(slots)
    weights: dict[int, list[float]] = {slot: [] for slot in range(slots)}
    ids: dict[int, list[list[int]]] = {slot: [] for slot in range(slots)}
    for step in range(1200):
        if step in (300, 700):
            for new_slot in range(slots, slots + 3):
                weights[new_slot] = []
                ids[new_slot] = []
            slots += 3
            chunks.grow(slots)
        for slot in range(slots):
            is_full = len(weights[slot]) == 300
            if is_full or draws.random() < 0.004:
                chunks.clear(slot)
                weights[slot] = []
                ids[slot] = []
        written_slots = np.flatnonzero(draws.random(slots) < 0.6)
        new_weights = draws.random(len(written_slots))
        new_ids = draws.integers(0, 99, (len(written_slots), 3))
        rows = chunks.counts[written_slots]
        chunks.write(written_slots, rows, {"weights": new_weights, "ids": new_ids})
        for slot, weight, row in zip(written_slots, new_weights, new_ids):
            weights[slot].append(weight)
            ids[slot].append(row.tolist())

    assert sum(map(len, weights.values())) > 500
    for slot in range(slots):
        content = chunks.read(slot)
        if weights[slot]:
            assert content["weights"].tolist() == weights[slot]
            assert content["ids"].tolist() == ids[slot]
        else:
            assert not content


def test_a_large_engine_with_dense_edits_needs_memory_for_what_was_edited_only() -> None:
    """1,032 slots of 32,768 positions and 4,096 dimensions would be 567 TB; two edits take one pool of chunks."""
    store = TrajectoryStore(1032, 32_768)
    slots = np.array([store.open(name, 1, 10, True) for name in "ab"])
    positions = np.array([10, 10])
    edits = {
        "ids": np.zeros((2, 1), np.int32),
        "weights": np.zeros((2, 1), np.float32),
        "agreed": np.ones(2, bool),
        "vectors": np.ones((2, 4096), np.float32),
    }

    store.write_tokens(slots, positions, np.zeros(2, np.float32))
    store.write_edits(slots, positions, edits)

    size = 0
    for chunks in (store._edits, store._tokens):
        size += chunks.table.nbytes + sum(array.nbytes for array in chunks._arrays.values())
    assert size < 100 << 20
    record, _ = store.record("b")
    assert np.array_equal(record.vectors, edits["vectors"][:1])


@pytest.mark.parametrize("back", [1, 3])
def test_a_position_that_is_drawn_again_replaces_what_came_after_it(back: int) -> None:
    """Positions 5 to 14, the even ones edited; then the last ``back`` ones again, of which 14 alone is edited."""
    store = TrajectoryStore(1, 64)
    slot = np.array([store.open("a", 7, 5, True)])

    def draw(position: int, edited: bool) -> None:
        store.write_tokens(slot, np.array([position]), np.array([-position], np.float32))
        if edited:
            edit = {
                "ids": np.array([[position]], np.int32),
                "weights": np.ones((1, 1), np.float32),
                "agreed": np.ones(1, bool),
            }
            store.write_edits(slot, np.array([position]), edit)

    for position in range(5, 15):
        draw(position, edited=position % 2 == 0)
    for position in range(15 - back, 15):
        draw(position, edited=position == 14)

    record, log_probs = store.record("a")
    edited_before = [position for position in range(5, 15 - back) if position % 2 == 0]
    assert record.positions.tolist() == [*edited_before, 14]
    assert record.ids[:, 0].tolist() == [*edited_before, 14]
    assert log_probs.tolist() == [-position for position in range(5, 15)]
    assert record.num_tokens == 15


def test_a_record_of_earlier_turns_is_cut_at_the_prompt() -> None:
    """Of edits at positions 4, 8 and 15 the prompt, of 15 tokens, has the first two."""
    earlier = ReplayRecord(
        seed=9,
        prompt_tokens=3,
        num_tokens=20,
        positions=np.array([4, 8, 15], np.int32),
        ids=np.array([[1, 2], [3, 4], [5, 6]], np.int32),
        weights=np.full((3, 2), 0.5, np.float32),
        sigma=None,
        agreed=np.ones(3, bool),
    )
    store = TrajectoryStore(1, 64)
    slot = store.open("a", 9, 15, True)

    store.load(slot, earlier)

    assert store.edits(slot, 5, 15)["ids"].tolist() == [[3, 4]]
    assert store.edits(slot, 9, 15) == {}
    record, _ = store.record("a")
    assert record.positions.tolist() == [4, 8]
