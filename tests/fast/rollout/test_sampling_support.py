# SPDX-License-Identifier: Apache-2.0
"""The tokens that sampling left, from logits on the device to the store: the same sets, little memory, and a bound."""

import re

import numpy as np
import pytest
import torch

from ngrpo.rollout import sampling_support
from ngrpo.rollout.sampling_support import SamplingMaskStore, SamplingSupport
from perturbations.replay.sampling_mask import SamplingMask

Dense = dict[int, dict[int, np.ndarray]]  # slot, position: which tokens were left, (V,) bool


def a_step(kept: np.ndarray) -> SamplingSupport:
    """Logits that are -inf where a token was cut, (B, V), as far as :meth:`SamplingSupport.read`."""
    logits = torch.where(torch.from_numpy(kept), 0.5, -torch.inf)
    left = SamplingSupport(logits, torch.Tensor.clone)
    left.ask()
    return left


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


def check(store: SamplingMaskStore, wanted: Dense, size: int) -> None:
    for slot, rows in wanted.items():
        held = {position: np.flatnonzero(kept) for position, kept in sorted(rows.items()) if not kept.all()}
        data = store.read(slot).to_bytes()
        mask = SamplingMask.from_bytes(data)
        assert len(data) <= 14 + len(held) * (size + 6)
        with pytest.raises(ValueError, match="sampling mask is damaged"):
            SamplingMask.from_bytes(data[:-3])
        assert mask.size == size and mask.positions.tolist() == list(held)
        assert all(np.array_equal(found, ids) for found, ids in zip(mask.left(), held.values(), strict=True))
        assert mask.cut.tolist() == [2 * len(ids) > size for ids in held.values()]


@pytest.mark.parametrize("size", [64, 203, 4096, 70_001, 151_936])
def test_every_set_comes_back(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve slots over several steps, in changing orders, with one slot that begins anew, and slots that are added."""
    monkeypatch.setattr(sampling_support, "PICKED_AT_ONCE", size)  # several blocks, of one row or of many
    draws = np.random.default_rng(size)
    store, wanted = SamplingMaskStore(size, 8), {slot: {} for slot in range(12)}
    store.grow(12)
    for position in range(3 if size > 10_000 else 12):
        kept, slots = rows_of(size, draws), draws.permutation(12)
        some = np.sort(draws.choice(12, 9, replace=False))  # the others' prefill is not complete
        store.write(slots[some], np.full(9, position), *a_step(kept).read(some))
        for row in some:
            wanted[int(slots[row])][position] = kept[row]
        if position == 2:
            store.clear(4)
            wanted[4] = {}
    check(store, wanted, size)
    assert store.bytes >= sum(store.read(slot).words.nbytes for slot in wanted)
    for slot in wanted:
        store.clear(slot)
    assert store.bytes == 0


def test_a_position_that_is_drawn_again_replaces_what_came_after_it() -> None:
    draws, store, wanted = np.random.default_rng(0), SamplingMaskStore(1000, 2), {0: {}, 1: {}}
    for position in (*range(60), *range(20, 90), *range(85, 95), 95):
        kept = draws.random((2, 1000)) < draws.choice([0.05, 0.5, 1.0], (2, 1))
        store.write([1, 0], [position, position], *a_step(kept).read(None))
        for slot, row in zip((1, 0), kept):
            wanted[slot] = {at: seen for at, seen in wanted[slot].items() if at < position} | {position: row}
    check(store, wanted, 1000)


def test_turns_and_truncation_keep_whole_positions() -> None:
    sets = {2: (False, np.array([1, 70_000])), 3: (True, np.array([5])), 5: (False, np.zeros(0, dtype=np.int64))}
    mask = SamplingMask.of(100_000, sets)
    assert [len(mask.truncate(n)) for n in range(1, 7)] == [0, 0, 1, 2, 2, 3]
    joined = mask.truncate(5).joined(SamplingMask.of(100_000, {3: (False, np.array([9])), 9: sets[2]}), turn=5)
    assert list(joined.by_position()) == [2, 3, 9]
    assert [ids.tolist() for _, ids in joined.by_position().values()] == [[1, 70_000], [5], [1, 70_000]]


def forty_tokens(positions: int, limit: int | None = None) -> SamplingMaskStore:
    """32 requests of a vocabulary of 151,936, each position with 40 tokens left."""
    draws, store = np.random.default_rng(1), SamplingMaskStore(151_936, 32, limit)
    ids = np.sort(draws.integers(0, 151_936, (32, 40)), axis=1) // 40 * 40 + np.arange(40)
    ids = np.sort(ids, axis=1).astype(np.int32).reshape(-1)
    for position in range(positions):
        store.write(np.arange(32), np.full(32, position), np.full(32, 40), ids)
    return store


def test_a_position_takes_less_than_100_bytes() -> None:
    store = forty_tokens(200)
    assert store.bytes / (200 * 32) < 100
    assert len(store.read(3).to_bytes()) / 200 < 100


def test_the_memory_is_bounded_and_the_error_says_what_to_do() -> None:
    limit = 1 << 20
    with pytest.raises(RuntimeError, match=r"--sampling\.top_k.*--sampling\.mask_gib") as caught:
        forty_tokens(1000, limit)
    said = re.search(r"at (\d+) positions of 32 running requests take .* 40 words a position", str(caught.value))
    assert 0.9 * limit < 88 * int(said[1]) < limit
    full = forty_tokens(300, limit)
    assert full.bytes <= limit
    for slot in range(16):
        full.clear(slot)
    full.write([0], [0], np.array([1]), np.array([5], dtype=np.int32))  # what has ended makes room again
    assert full.read(0).left()[0].tolist() == [5]
