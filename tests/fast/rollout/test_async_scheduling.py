# SPDX-License-Identifier: Apache-2.0
"""Draws of steps that are still on their way to the host: what is waited for, and what is written, by hand."""

from typing import Any

import numpy as np
import torch

from ngrpo.rollout.async_scheduling import HostBuffers, PendingStep, PendingSteps
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


def step_of(
    slots: list[int],
    positions: list[int],
    log_probs: list[float],
    fed: list[bool] | None = None,
    ready: Any = None,
    kept_rows: np.ndarray | None = None,
) -> PendingStep:
    """A step that edits each of its rows, or those of ``fed``, with its token's log π as the weight."""
    rows = len(slots)
    fields = {
        "fed": torch.tensor([True] * rows if fed is None else fed),
        "agreed": torch.ones(rows, dtype=torch.bool),
        "ids": torch.zeros(rows, 1, dtype=torch.int32),
        "weights": torch.tensor(log_probs).unsqueeze(1),
    }
    return PendingStep(
        slots=np.array(slots),
        positions=np.array(positions),
        record=SeparateRecord(torch.tensor(log_probs), np.arange(rows), fields),
        ready=ready,
        kept_rows=kept_rows,
        support=None,
    )


def two_slots() -> tuple[TrajectoryStore, PendingSteps]:
    """A store of two requests, in the slots 0 and 1, with prompts of 4 tokens."""
    store = TrajectoryStore(2, 64)
    assert store.open("a", 1, 4, True) == 0
    assert store.open("b", 1, 4, True) == 1
    return store, PendingSteps(store, masks=None, routed=None, event=lambda: None)


def test_what_a_preempted_request_draws_again_replaces_the_first_draws() -> None:
    store, pending = two_slots()
    for number, position in enumerate((4, 5, 6, 5, 6, 7)):
        pending.add(step_of([0], [position], [-float(number)]))
    pending.drain()
    record, log_probs = store.record("a")
    assert log_probs.tolist() == [0.0, -3.0, -4.0, -5.0]
    assert record.positions.tolist() == [4, 5, 6, 7]
    assert record.weights.ravel().tolist() == [0.0, -3.0, -4.0, -5.0]


def test_a_slot_waits_for_its_newest_step_and_for_none_after_it() -> None:
    store, pending = two_slots()
    of_both = Arrival()
    of_slot_0 = Arrival()
    of_slot_1 = Arrival()
    pending.add(step_of([0, 1], [4, 4], [-1.0, -1.0], ready=of_both))
    pending.add(step_of([0], [5], [-1.0], ready=of_slot_0))
    pending.add(step_of([1], [5], [-1.0], ready=of_slot_1))

    pending.drain()
    assert not any(arrival.has_arrived for arrival in (of_both, of_slot_0, of_slot_1))
    assert pending.written == 0

    pending.drain_slot(0)
    assert of_both.has_arrived
    assert of_slot_0.has_arrived
    assert not of_slot_1.has_arrived
    assert pending.written == 2
    _, log_probs = store.record("a")
    assert len(log_probs) == 2
    _, log_probs = store.record("b")
    assert len(log_probs) == 1


def test_a_row_whose_token_belongs_to_no_response_is_left_out() -> None:
    """The prompt of slot 0 is not complete, so that its row's token is thrown away."""
    store, pending = two_slots()
    second_row = np.array([1])
    pending.add(step_of([0, 1], [2, 4], [-1.0, -2.0], fed=[False, True], kept_rows=second_row))
    pending.drain()

    record, log_probs = store.record("a")
    assert log_probs.tolist() == []
    assert len(record) == 0
    record, log_probs = store.record("b")
    assert log_probs.tolist() == [-2.0]
    assert record.positions.tolist() == [4]
    assert record.weights.tolist() == [[-2.0]]


def test_an_edit_goes_to_the_slot_of_its_row() -> None:
    store, pending = two_slots()
    pending.add(step_of([0, 1], [4, 4], [-1.0, -2.0], fed=[False, True]))
    pending.drain()

    record, log_probs = store.record("a")
    assert record.positions.tolist() == []
    assert log_probs.tolist() == [-1.0]
    record, log_probs = store.record("b")
    assert record.positions.tolist() == [4]
    assert log_probs.tolist() == [-2.0]


def test_an_upload_takes_no_buffer_that_is_still_copied_from() -> None:
    buffers = HostBuffers((2,), torch.int64, torch.device("cpu"))
    target = torch.zeros(2, dtype=torch.int64)
    buffers.upload(np.array([1, 2]), target)
    (first,) = buffers._uploading
    arrival: Any = Arrival()
    first.event = arrival

    buffers.upload(np.array([3, 4]), target)
    assert first.array.tolist() == [1, 2]

    arrival.synchronize()
    buffers.upload(np.array([5, 6]), target)
    assert [5, 6] in [buffer.array.tolist() for buffer in buffers._uploading]
    assert len(buffers.free) + len(buffers._uploading) == 2, "the first buffer is used again"
