# SPDX-License-Identifier: Apache-2.0
"""The tokens that sampling left: packed on the device, kept by slot, sent as bytes, and put into log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ngrpo.rollout.sampling_support import SamplingMaskStore, SamplingSupport
from perturbations.replay.trajectory import SamplingMask

V = 203  # not a multiple of 8


def masked(rows: list[list[int]]) -> torch.Tensor:
    """Logits of which only the given tokens may be drawn, a row each."""
    logits = torch.full((len(rows), V), -torch.inf)
    for row, left in zip(logits, rows):
        row[left] = torch.randn(len(left))
    return logits


def stored(rows: list[list[int]], positions: list[int]) -> SamplingMask:
    """One trajectory with these tokens left at these positions, through the store."""
    store = SamplingMaskStore(V, 5, 1 << 17)
    for row, position in zip(rows, positions):
        write(store, [4], [position], [row])
    return store.read(4)


def write(store: SamplingMaskStore, slots: list[int], positions: list[int], rows: list[list[int]]) -> None:
    """A step that leaves these tokens at these positions of these slots."""
    left = SamplingSupport(masked(rows), lambda part: part)
    left.ask()
    store.write(slots, positions, *left.read(None))


ALL = list(range(V))
ROWS = [[7], ALL, [0, 8, V - 1], ALL[1:], ALL[: V // 2], ALL[: V // 2 + 1], [t for t in ALL if t % 3], ALL[:-1]]
POSITIONS = [3, 4, 5, 9, 300, 301, 70_000, 70_001]


def test_the_tokens_left_come_back() -> None:
    mask = stored(ROWS, POSITIONS)
    expected = {p: row for p, row in zip(POSITIONS, ROWS) if row != ALL}  # nothing cut, nothing recorded
    assert mask.positions.tolist() == list(expected)
    assert [left.tolist() for left in mask.left()] == list(expected.values())
    assert mask.lengths.max() <= V // 2


def test_bytes_are_lossless_and_bounded() -> None:
    mask = stored(ROWS, POSITIONS)
    data = mask.to_bytes()
    again = SamplingMask.from_bytes(data)
    assert again.size == V and [a.tolist() for a in again.left()] == [a.tolist() for a in mask.left()]
    assert again.positions.tolist() == mask.positions.tolist()
    assert len(data) <= 14 + len(mask) * (V + 6)
    nothing = stored([ALL], [3])
    assert len(nothing) == 0 and len(nothing.to_bytes()) == 3 + 4
    assert len(SamplingMask.from_bytes(nothing.to_bytes())) == 0
    with pytest.raises(ValueError, match="sampling mask is damaged"):
        SamplingMask.from_bytes(data[:-3])


@pytest.mark.parametrize("largest", [100, 49_152, 151_936, 1 << 27])
def test_bytes_at_any_vocabulary(largest: int) -> None:
    draw = np.random.default_rng(0)
    left = {p: (p % 2 == 1, np.unique(draw.integers(0, largest, 40))) for p in (2, 3, 900)}
    again = SamplingMask.from_bytes(SamplingMask.of(largest, left).to_bytes()).by_position()
    assert list(again) == list(left)
    assert all(again[p][0] == left[p][0] and again[p][1].tolist() == left[p][1].tolist() for p in left)


def test_a_store_keeps_slots_apart_and_takes_the_latest() -> None:
    store = SamplingMaskStore(V, 2, 100)
    write(store, [0, 1], [5, 5], [[1, 2], [3]])
    write(store, [0, 1], [6, 6], [[4], ALL])
    assert [left.tolist() for left in store.read(0).left()] == [[1, 2], [4]]
    assert [left.tolist() for left in store.read(1).left()] == [[3]]
    write(store, [0], [6], [[9, 10]])
    assert [left.tolist() for left in store.read(0).left()] == [[1, 2], [9, 10]]
    write(store, [0], [5], [ALL])  # what came after it was drawn from other logits
    assert store.read(0).positions.tolist() == []
    write(store, [0], [6], [[7]])
    assert store.read(0).positions.tolist() == [6]
    store.clear(0)
    assert len(store.read(0)) == 0 and len(store.read(1)) == 1


def test_turns_are_joined() -> None:
    first, second = stored([[1], [2], [3]], [4, 5, 6]), stored([[7], [8], [9]], [6, 10, 12])
    joined = first.joined(second, turn=6)
    assert {p: left.tolist() for p, left in zip(joined.positions.tolist(), joined.left())} == {
        4: [1],
        5: [2],
        6: [7],
        10: [8],
        12: [9],
    }
