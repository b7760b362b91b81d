# SPDX-License-Identifier: Apache-2.0
"""Draws of steps that are still on their way to the host: what is waited for, and what is written, by hand."""

from typing import Any

import numpy as np
import torch

from ngrpo.rollout.async_scheduling import HostBuffers, Note, Notes
from ngrpo.rollout.step_records import SeparateRecord
from ngrpo.rollout.trajectories import TrajectoryStore


class Arrival:
    """Stands for a CUDA event: what was copied is there once somebody has waited for it."""

    def __init__(self) -> None:
        self.has_arrived = False

    def query(self) -> bool:
        return self.has_arrived

    def synchronize(self) -> None:
        self.has_arrived = True


def note_of(
    slots: list[int], positions: list[int], log_probs: list[float], fed: list[bool] | None = None, **parts: Any
) -> Note:
    """A step that edits each of its rows, or those of ``fed``, with its token's log π as the weight."""
    fields = {
        "fed": torch.tensor([True] * len(slots) if fed is None else fed),
        "agreed": torch.ones(len(slots), dtype=torch.bool),
        "ids": torch.zeros(len(slots), 1, dtype=torch.int32),
        "weights": torch.tensor(log_probs).unsqueeze(1),
    }
    record = SeparateRecord(torch.tensor(log_probs), np.arange(len(slots)), fields)
    values = {"ready": None, "kept_rows": None, "record": record, "support": None, **parts}
    return Note(slots=np.array(slots), positions=np.array(positions), **values)


def notes_of_two() -> tuple[TrajectoryStore, Notes]:
    """A store of two requests, in the slots 0 and 1, with prompts of 4 tokens."""
    store = TrajectoryStore(2, 64)
    assert [store.open(name, 1, 4, True) for name in ("a", "b")] == [0, 1]
    return store, Notes(store, masks=None, routed=None, event=lambda: None)


def test_what_a_preempted_request_draws_again_replaces_the_first_draws() -> None:
    store, notes = notes_of_two()
    for number, position in enumerate((4, 5, 6, 5, 6, 7)):
        notes.add(note_of([0], [position], [-float(number)]))
    notes.drain()
    record, log_probs = store.record("a")
    assert log_probs.tolist() == [0.0, -3.0, -4.0, -5.0]
    assert record.positions.tolist() == [4, 5, 6, 7]
    assert record.weights.ravel().tolist() == [0.0, -3.0, -4.0, -5.0]


def test_a_slot_waits_for_its_newest_note_and_for_none_after_it() -> None:
    store, notes = notes_of_two()
    arrivals = [Arrival() for _ in range(3)]
    for ready, slots, positions in zip(arrivals, ([0, 1], [0], [1]), ([4, 4], [5], [5])):
        notes.add(note_of(slots, positions, [-1.0] * len(slots), ready=ready))
    notes.drain()
    assert not any(ready.has_arrived for ready in arrivals) and notes.written == 0
    notes.drain_slot(0)
    assert [ready.has_arrived for ready in arrivals] == [True, True, False]
    assert notes.written == 2 and len(store.record("a")[1]) == 2 and len(store.record("b")[1]) == 1


def test_a_row_whose_token_belongs_to_no_response_is_left_out() -> None:
    """The prompt of slot 0 is not complete, so that its row's token is thrown away."""
    store, notes = notes_of_two()
    notes.add(note_of([0, 1], [2, 4], [-1.0, -2.0], fed=[False, True], kept_rows=np.array([1])))
    notes.drain()
    assert store.record("a")[1].tolist() == [] and not len(store.record("a")[0])
    record, log_probs = store.record("b")
    assert log_probs.tolist() == [-2.0]
    assert record.positions.tolist() == [4] and record.weights.tolist() == [[-2.0]]


def test_an_edit_goes_to_the_slot_of_its_row() -> None:
    store, notes = notes_of_two()
    notes.add(note_of([0, 1], [4, 4], [-1.0, -2.0], fed=[False, True]))
    notes.drain()
    assert store.record("a")[0].positions.tolist() == [] and store.record("a")[1].tolist() == [-1.0]
    assert store.record("b")[0].positions.tolist() == [4] and store.record("b")[1].tolist() == [-2.0]


def test_an_upload_takes_no_buffer_that_is_still_copied_from() -> None:
    buffers, target = HostBuffers((2,), torch.int64, torch.device("cpu")), torch.zeros(2, dtype=torch.int64)
    buffers.upload(np.array([1, 2]), target)
    (first,) = buffers._uploading
    arrival: Any = Arrival()
    first.event = arrival
    buffers.upload(np.array([3, 4]), target)
    assert first.array.tolist() == [1, 2]
    arrival.synchronize()
    buffers.upload(np.array([5, 6]), target)
    assert {tuple(buffer.array.tolist()) for buffer in buffers._uploading} & {(5, 6)}
    assert len(buffers.free) + len(buffers._uploading) == 2, "the first buffer is used again"
