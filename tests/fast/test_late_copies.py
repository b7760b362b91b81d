# SPDX-License-Identifier: Apache-2.0
"""Rows that are computed again: which copies from the device they wait for, and which edits they read."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.decode_step import Decoding
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.trajectories import Chunks
from perturbations import create


def decode(decoding: Decoding, steps: int, *requests: str) -> None:
    decoding.requests = list(requests)
    for _ in range(steps):
        decoding.step()


def test_a_row_computed_again_waits_for_its_own_newest_note_and_for_none_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[int] = []
    made: list[int] = []

    def event(_: RolloutPerturber) -> Any:
        number = len(made)
        made.append(number)
        return SimpleNamespace(query=lambda: number in waited, synchronize=lambda: waited.append(number))

    monkeypatch.setattr(RolloutPerturber, "_event", event)
    decoding = Decoding(create("gumbel", rate=0.6), 64)
    decode(decoding, 40, "request-0", "request-1")
    decode(decoding, 20, "request-1")  # the other one was preempted
    assert waited == [], "no step waits"
    starts, counts = np.array([0, decoding._position]), np.array([50, 1])
    decoding.perturber.begin(["request-0", "request-1"], starts, counts, np.array([True, False]))
    assert waited == [*range(40)] and decoding.perturber.notes.written == 40, "the other twenty are on their way"


def test_a_chunk_copies_the_range_that_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, read, spans = Decoding(create("gumbel", rate=0.6), 64), Chunks.read, []
    decode(decoding, 380, "request-0")
    store, overridden = decoding.perturber._store, decoding.perturber._override._module.overridden
    positions = store._edits.read(store.live["request-0"])["positions"]
    assert len(positions) > 200

    def logged(self: Chunks, slot: int, first: int = 0, last: int | None = None) -> dict[str, np.ndarray]:
        found = read(self, slot, first, last)
        spans.append(len(next(iter(found.values()), ())))
        return found

    monkeypatch.setattr(Chunks, "read", logged)
    for first in range(0, 400, 50):
        decoding.perturber.begin(["request-0"], np.array([first]), np.array([50]), np.array([True]))
        inside = positions[(positions >= first) & (positions < first + 50)]
        assert spans.pop() == len(inside) and not spans
        assert overridden[:50, 0].nonzero()[:, 0].tolist() == (inside - first).tolist()


def test_the_range_of_a_slot_is_found_at_every_border() -> None:
    draws = np.random.default_rng(0)
    for count in (0, 1, 63, 64, 65, 128, 300):
        chunks = Chunks(2)
        positions = np.sort(draws.choice(1000, count, replace=False)).astype(np.int32)
        for i, position in enumerate(positions):  # two slots in turns, so that their chunks alternate
            chunks.write(np.array([1, 0]), np.array([i, i]), {"positions": np.array([position, 7], dtype=np.int32)})
        for value in range(1001):
            assert chunks.find(1, "positions", value) == np.searchsorted(positions, value), (count, value)
