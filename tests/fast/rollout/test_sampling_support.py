# SPDX-License-Identifier: Apache-2.0
"""The tokens that sampling left, from logits on the device to the store: the same sets, little memory, and a bound."""

import re

import numpy as np
import pytest
import torch

from ngrpo.rollout import sampling_support
from ngrpo.rollout.sampling_support import SamplingMaskStore, SamplingSupport
from perturbations.replay.sampling_mask import SamplingMask

Dense = dict[int, dict[int, np.ndarray]]
"""By slot and position, which tokens were left, (V,) bool."""


def support_of(kept: np.ndarray) -> SamplingSupport:
    """The support of logits that are -inf where a token was cut, (B, V), ready for :meth:`SamplingSupport.read`."""
    logits = torch.where(torch.from_numpy(kept), 0.5, -torch.inf)
    support = SamplingSupport(logits, torch.Tensor.clone)
    support.send_ids()
    return support


def rows_of(size: int, draws: np.random.Generator) -> np.ndarray:
    """Rows as top-k, top-p, a grammar, no filter at all and an impossible request leave them, (12, V) bool."""
    kept = np.zeros((12, size), dtype=bool)
    for row, count in enumerate((40, 1, size // 3, size // 2, size // 2 + 1, size - 1)):
        kept[row, draws.choice(size, count, replace=False)] = True
    kept[6] = True
    kept[7, [0, size - 1]] = True
    kept[8, 5:17] = True  # a grammar: the ids of a few words
    kept[9] = ~kept[8]
    kept[10, size // 2 :] = True  # and 11: nothing
    return kept


def assert_masks(store: SamplingMaskStore, kept_by_slot: Dense, size: int) -> None:
    """Asserts that the store has these tokens; a position at which nothing was cut is not stored."""
    for slot, kept_by_position in kept_by_slot.items():
        expected: dict[int, list[int]] = {}
        for position, kept in sorted(kept_by_position.items()):
            if not kept.all():
                expected[position] = np.flatnonzero(kept).tolist()
        packed = store.read(slot).to_bytes()
        assert len(packed) <= 14 + len(expected) * (size + 6)
        with pytest.raises(ValueError, match="sampling mask is damaged"):
            SamplingMask.from_bytes(packed[:-3])

        mask = SamplingMask.from_bytes(packed)
        assert mask.size == size
        assert mask.positions.tolist() == list(expected)
        assert [ids.tolist() for ids in mask.left()] == list(expected.values())
        assert mask.cut.tolist() == [2 * len(ids) > size for ids in expected.values()]


@pytest.mark.parametrize("size", [64, 203, 4096, 70_001, 151_936])
def test_every_set_comes_back(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve slots over several steps, in changing orders, with one slot that begins anew, and slots that are added."""
    monkeypatch.setattr(sampling_support, "PICKED_AT_ONCE", size)  # several blocks, of one row or of many
    draws = np.random.default_rng(size)
    store = SamplingMaskStore(size, 8)
    store.grow(12)
    kept_by_slot: Dense = {slot: {} for slot in range(12)}
    steps = 3 if size > 10_000 else 12
    for position in range(steps):
        kept = rows_of(size, draws)
        slots = draws.permutation(12)
        drawn_rows = np.sort(draws.choice(12, 9, replace=False))  # the prefill of the others is not complete
        store.write(slots[drawn_rows], np.full(9, position), *support_of(kept).read(drawn_rows))
        for row in drawn_rows:
            kept_by_slot[int(slots[row])][position] = kept[row]
        if position == 2:
            store.clear(4)
            kept_by_slot[4] = {}
    assert_masks(store, kept_by_slot, size)
    assert store.bytes >= sum(store.read(slot).words.nbytes for slot in kept_by_slot)

    for slot in kept_by_slot:
        store.clear(slot)
    assert store.bytes == 0


def test_a_position_that_is_drawn_again_replaces_what_came_after_it() -> None:
    draws = np.random.default_rng(0)
    store = SamplingMaskStore(1000, 2)
    kept_by_slot: Dense = {0: {}, 1: {}}
    for position in (*range(60), *range(20, 90), *range(85, 95), 95):
        shares = draws.choice([0.05, 0.5, 1.0], (2, 1))
        kept = draws.random((2, 1000)) < shares
        store.write([1, 0], [position, position], *support_of(kept).read(None))
        for slot, row in zip((1, 0), kept):
            for later in [p for p in kept_by_slot[slot] if p > position]:
                del kept_by_slot[slot][later]
            kept_by_slot[slot][position] = row
    assert_masks(store, kept_by_slot, 1000)


@pytest.fixture
def three_positions() -> SamplingMask:
    """Positions 2, 3 and 5, where two tokens were left, one was cut, and none was left."""
    sets = {
        2: (False, np.array([1, 70_000])),
        3: (True, np.array([5])),
        5: (False, np.zeros(0, dtype=np.int64)),
    }
    return SamplingMask.of(100_000, sets)


def test_truncation_keeps_complete_positions(three_positions: SamplingMask) -> None:
    assert [len(three_positions.truncate(length)) for length in (1, 2, 3, 4, 5, 6)] == [0, 0, 1, 2, 2, 3]


def test_a_further_turn_is_joined_from_its_first_position(three_positions: SamplingMask) -> None:
    """The turn begins at position 5: what it has of position 3 is not its own."""
    further_turn = SamplingMask.of(100_000, {3: (False, np.array([9])), 9: (False, np.array([1, 70_000]))})
    joined = three_positions.truncate(5).joined(further_turn, turn=5).by_position()
    assert {position: ids.tolist() for position, (_, ids) in joined.items()} == {
        2: [1, 70_000],
        3: [5],
        9: [1, 70_000],
    }


def forty_tokens(positions: int, limit: int | None = None) -> SamplingMaskStore:
    """32 requests of a vocabulary of 151,936, each position with 40 tokens left."""
    draws = np.random.default_rng(1)
    store = SamplingMaskStore(151_936, 32, limit)
    drawn = np.sort(draws.integers(0, 151_936, (32, 40)), axis=1)
    distinct = drawn // 40 * 40 + np.arange(40)  # the k-th of a row is k modulo 40
    ids = np.sort(distinct, axis=1).astype(np.int32).reshape(-1)
    for position in range(positions):
        store.write(np.arange(32), np.full(32, position), np.full(32, 40), ids)
    return store


def test_a_position_takes_less_than_100_bytes() -> None:
    store = forty_tokens(200)
    assert store.bytes / (200 * 32) < 100
    assert len(store.read(3).to_bytes()) / 200 < 100


LIMIT = 1 << 20


def test_the_error_of_a_full_store_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"--sampling\.top_k.*--sampling\.mask_gib") as error:
        forty_tokens(1000, LIMIT)
    message = re.search(r"at (\d+) positions of 32 running requests take .* 40 words a position", str(error.value))
    stored_positions = int(message[1])
    assert 0.9 * LIMIT < 88 * stored_positions < LIMIT


def test_requests_that_have_ended_make_room_again() -> None:
    store = forty_tokens(300, LIMIT)
    assert store.bytes <= LIMIT
    for slot in range(16):
        store.clear(slot)
    store.write([0], [0], np.array([1]), np.array([5], dtype=np.int32))
    assert store.read(0).left()[0].tolist() == [5]
