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
    chunks, slots = Chunks(4), 4
    want: dict[int, list[tuple[float, list[int]]]] = {slot: [] for slot in range(slots)}
    for step in range(1200):
        if step in (300, 700):
            slots += 3
            chunks.grow(slots)
            want |= {slot: [] for slot in range(slots) if slot not in want}
        for slot in range(slots):
            if len(want[slot]) == 300 or draws.random() < 0.004:
                chunks.clear(slot)
                want[slot] = []
        chosen = np.flatnonzero(draws.random(slots) < 0.6)
        values, ids = draws.random(len(chosen)), draws.integers(0, 99, (len(chosen), 3))
        chunks.write(chosen, chunks.counts[chosen], {"weights": values, "ids": ids})
        for slot, value, row in zip(chosen, values, ids):
            want[slot].append((value, row.tolist()))
    assert sum(map(len, want.values())) > 500
    for slot, rows in want.items():
        found = chunks.read(slot)
        assert found.get("weights", np.zeros(0)).tolist() == [value for value, _ in rows]
        assert [row for row in found["ids"].tolist()] == [ids for _, ids in rows] if rows else not found


def test_a_large_engine_with_dense_edits_needs_memory_for_what_was_edited_only() -> None:
    """1,032 slots of 32,768 positions and 4,096 dimensions would be 567 TB; two edits take one pool of chunks."""
    store = TrajectoryStore(1032, 32_768)
    slots = np.array([store.open(name, 1, 10, True) for name in "ab"])
    vectors = np.ones((2, 4096), dtype=np.float32)
    parts = {"ids": np.zeros((2, 1), np.int32), "weights": np.zeros((2, 1), np.float32), "agreed": np.ones(2, bool)}
    store.write_tokens(slots, np.array([10, 10]), np.zeros(2, np.float32))
    store.write_edits(slots, np.array([10, 10]), {**parts, "vectors": vectors})
    held = [array for chunks in (store._edits, store._tokens) for array in [chunks.table, *chunks._arrays.values()]]
    assert sum(array.nbytes for array in held) < 100 << 20
    assert np.array_equal(store.record("b")[0].vectors, vectors[:1])


@pytest.mark.parametrize("back", [1, 3])
def test_a_position_that_is_drawn_again_replaces_what_came_after_it(back: int) -> None:
    store = TrajectoryStore(1, 64)
    slot = np.array([store.open("a", 7, 5, True)])

    def draw(position: int, edited: bool) -> None:
        store.write_tokens(slot, np.array([position]), np.array([-position], np.float32))
        if edited:
            parts = {"ids": np.array([[position]], np.int32), "weights": np.ones((1, 1), np.float32)}
            store.write_edits(slot, np.array([position]), {**parts, "agreed": np.ones(1, bool)})

    for position in range(5, 15):
        draw(position, position % 2 == 0)
    for position in range(15 - back, 15):
        draw(position, position == 14)
    record, log_probs = store.record("a")
    before = [p for p in range(5, 15 - back) if p % 2 == 0]
    assert record.positions.tolist() == [*before, 14] and record.ids[:, 0].tolist() == [*before, 14]
    assert log_probs.tolist() == [-p for p in range(5, 15)] and record.num_tokens == 15


def test_a_record_of_earlier_turns_is_cut_at_the_prompt() -> None:
    ids = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    positions, weights = np.array([4, 8, 15], np.int32), np.full((3, 2), 0.5, np.float32)
    earlier = ReplayRecord(9, 3, 20, positions, ids, weights, None, np.ones(3, bool))
    store = TrajectoryStore(1, 64)
    slot = store.open("a", 9, 15, True)
    store.load(slot, earlier)
    assert store.edits(slot, 5, 15)["ids"].tolist() == [[3, 4]]
    assert store.edits(slot, 9, 15) == {}
    assert store.record("a")[0].positions.tolist() == [4, 8]
