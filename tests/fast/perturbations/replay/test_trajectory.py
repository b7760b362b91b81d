# SPDX-License-Identifier: Apache-2.0
"""Records as bytes: lossless, small, and refused where they are damaged, hostile or of another model."""

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.rollout.trajectories import TrajectoryStore
from ngrpo.trainers.common import sample_records
from perturbations import ReplayRecord, UsageError, create, parameters, replaying
from perturbations.replay import packing
from perturbations.replay.packing import MOST_CANDIDATES
from perturbations.replay.sampling_mask import SamplingMask
from perturbations.replay.trajectory import FinishedTrajectory, model_fingerprint
from tests.support.replay_examples import Embedder, a_record, small

CASES = {
    "plain": a_record(),
    "empty": a_record(count=0),
    "one token each": a_record(k=1, weights=np.ones((4, 1), np.float32)),
    "one sigma": a_record(sigma=np.full(4, 0.03, np.float32)),
    "several sigmas": a_record(sigma=np.array([0.1, 0.2, 0.0, 1e-30], np.float32)),
    "wide ids": a_record(ids=np.full((4, 3), (1 << 24) - 1, np.int32)),
    "gaps of 126, 127 and 128": a_record(positions=np.array([426, 553, 681, 682], np.int32)),
    "earlier turns": a_record(positions=np.array([0, 20, 299, 300], np.int32)),
    "vectors": a_record(vectors=np.ones((4, 5), np.float32), normalizer=np.ones(4, np.float32)),
    "of a model": a_record(model=model_fingerprint(49152, 576)),
    "no candidate": a_record(0, 0),
}
WIDE = [a_record(count, width) for count in (0, 4) for width in (127, 128, 255, 256, MOST_CANDIDATES)]


@pytest.mark.parametrize("record", [*CASES.values(), *WIDE], ids=[*CASES, *(f"{each.ids.shape}" for each in WIDE)])
def test_round_trip_is_lossless(record: ReplayRecord) -> None:
    again = ReplayRecord.from_bytes(record.to_bytes())
    for field in dataclasses.fields(record):
        before, after = getattr(record, field.name), getattr(again, field.name)
        np.testing.assert_array_equal(before, after)
        if isinstance(before, np.ndarray):
            assert before.dtype == after.dtype and before.shape == after.shape


@pytest.mark.parametrize("answer", [12, 20, 100, 1000])
def test_at_most_three_bytes_per_token(answer: int) -> None:
    """Rate 0.1, k = 3: one edit in ten tokens of 3 × 2 + 3 × 4 + 1 bytes and a bit, a header of 13 and a checksum."""
    count = answer // 10
    positions = (60 + 10 * np.arange(count)).astype(np.int32)
    ids, weights = np.full((count, 3), 49151, np.int32), np.full((count, 3), 1 / 3, np.float32)
    record = ReplayRecord(1, 60, 60 + answer, positions, ids, weights, None, np.ones(count, bool))
    assert len(record.to_bytes()) <= 3 * answer


def test_too_many_candidates_are_refused_by_the_writer_and_by_the_options() -> None:
    with pytest.raises(ValueError, match=r"4097 candidates.*1 to 4096.*Mix fewer"):
        a_record(1, MOST_CANDIDATES + 1).to_bytes()
    for name in ("hrpo", "soft", "neighbor", "moi", "multiplex"):
        create(name, k=1000).check_model(49152)
        create(name, k=MOST_CANDIDATES - 1).check_model(49152)
        with pytest.raises(UsageError, match=r"k=4096: must be in \[[12], 4095\].*record"):
            create(name, k=MOST_CANDIDATES).check_model(49152)
    with pytest.raises(UsageError, match=r"k=1000: must be in \[1, 100\], the model's vocabulary"):
        create("hrpo", k=1000).check_model(100)
    create("multiplex", k=1000).check_model(100)  # draws may repeat


@pytest.mark.more
def test_any_altered_byte_and_any_cut_is_refused() -> None:
    """Each of the 255 other values of each byte."""
    tried = 0
    for record in CASES.values():
        data = record.to_bytes()
        others = [data[:place] for place in range(len(data))] + [data + b"\0"]
        for place, byte in enumerate(data):
            others += [data[:place] + bytes([byte ^ flip]) + data[place + 1 :] for flip in range(1, 256)]
        tried += len(others)
        for other in others:
            with pytest.raises(ValueError, match="record"):
                ReplayRecord.from_bytes(other)
    assert tried > 100_000


def test_what_travels_beside_a_record_has_a_checksum_too() -> None:
    mask = SamplingMask.of(49152, {2: (False, np.array([3, 7, 900])), 5: (True, np.array([1]))})
    packed = FinishedTrajectory(a_record(), np.arange(9, dtype=np.float32), mask).pack()
    (found,) = sample_records.unpack([packed])
    assert found.log_probs.tolist() == list(range(9)) and found.sampling_mask.by_position().keys() == {2, 5}
    assert {name for name, part in packed.items() if isinstance(part, bytes)} == packed.keys()
    for name, part in packed.items():
        for place in range(len(part)):
            altered = part[:place] + bytes([part[place] ^ 1]) + part[place + 1 :]
            for other in (altered, part[:place]):
                with pytest.raises(ValueError, match=r"damaged|version"):
                    sample_records.unpack([{**packed, name: other}])


def leb128(value: int) -> bytes:
    """A number of any size, as :func:`packing.varints` writes those below 2^35."""
    return bytes([value & 0x7F | 0x80]) + leb128(value >> 7) if value >= 0x80 else bytes([value])


def hostile(version: int = 5, **lengths: int) -> bytes:
    """The bytes of a record with a right checksum and lengths that are none."""
    fields = {"width": 1, "prompt": 3, "generated": 9, "count": 1, "size": 2, "flags": 0, **lengths}
    names = ("width", "prompt", "generated", "count", *(["size"] if fields["flags"] & 16 else []))
    numbers = b"".join(leb128(fields[name]) for name in names)
    return packing.sealed([bytes([fields["flags"], 0, 0]) + bytes(6), numbers, bytes([2, 7, 0]), bytes(8)], version)


@pytest.mark.parametrize(
    "lengths",
    [
        {"count": 1 << 62},
        {"count": 1 << 31, "width": 255},
        {"prompt": 1 << 62},
        {"generated": 1 << 31},
        {"flags": 16, "size": 1 << 40},
        {"flags": 16, "count": 0, "size": 1 << 62},
        {"width": 0},
        {"width": MOST_CANDIDATES},
        {"width": 1 << 62},
        {"width": MOST_CANDIDATES + 1, "count": 0},
        {"width": MOST_CANDIDATES, "count": 1 << 62, "flags": 1},
    ],
    ids=str,
)
def test_hostile_lengths_take_no_memory(lengths: dict[str, int]) -> None:
    """Nothing is allocated for a length before so many bytes are there."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="replay record"):
            ReplayRecord.from_bytes(hostile(**lengths))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_without_hostile_lengths_it_is_a_record_of_its_version() -> None:
    assert len(ReplayRecord.from_bytes(hostile(flags=16))) == 1
    with pytest.raises(ValueError, match="another version"):
        ReplayRecord.from_bytes(hostile(flags=16, version=4))


def test_positions_that_do_not_ascend_are_refused() -> None:
    for steps in ([2, 0], [2, 255]):  # twice the same position; a number without its last byte
        parts = [bytes(9), bytes([1, 3, 9, 2]), bytes(steps)]
        with pytest.raises(ValueError, match=r"ascend|cut short"):
            ReplayRecord.from_bytes(packing.sealed([*parts, bytes(4)] if steps[1] == 0 else parts, version=5))


def test_a_record_of_another_model_is_refused() -> None:
    record = a_record(ids=np.full((4, 3), 5, np.int32), model=model_fingerprint(49152, 576))
    again = ReplayRecord.from_bytes(record.to_bytes()).truncate(600)
    again.check_model(49152, 576)
    for shape in ((49152, 577), (49153, 576), (576, 49152)):
        with pytest.raises(ValueError, match="of another model, and cannot be replayed"):
            again.check_model(*shape)
    unnamed = a_record(ids=np.full((4, 3), 5, np.int32))  # nobody said what it is of
    unnamed.check_model(6, 3)
    with pytest.raises(ValueError, match="none of the model's: 0 to 4"):
        unnamed.check_model(5, 3)
    with pytest.raises(ValueError, match="vectors of 5 dimensions"):
        CASES["vectors"].check_model(49152, 6)


SHAPE = (10, 2)  # of the Embedder


def test_neither_side_replays_a_record_of_another_model() -> None:
    model = Embedder()
    right, wrong = (dataclasses.replace(small([1]), model=model_fingerprint(*shape)) for shape in (SHAPE, (10, 99)))
    with replaying(model, [right]):
        model(torch.tensor([[0, 1, 2]]))
    with pytest.raises(ValueError, match="another model"), replaying(model, [right, wrong]):
        pytest.fail("replayed")
    store = TrajectoryStore(1, 64, SHAPE)
    store.load(store.open("a", 9, 8, True), right)
    assert store.record("a")[0].model == right.model
    with pytest.raises(ValueError, match="another model"):
        store.load(store.open("b", 9, 8, True), wrong)


def test_a_record_of_a_learned_module_is_replayed_with_the_module_alone() -> None:
    model, hrpo = Embedder(), create("hrpo", k=2)
    stores = [TrajectoryStore(1, 64, SHAPE, module) for module in (False, hrpo.has_parameters)]
    for store in stores:
        store.load(store.open("a", 9, 8, True), small([1]))
    bare, learned = (store.record("a")[0] for store in stores)
    no_module = pytest.raises(ValueError, match=r"learned module, and this model has none.*parameters\.attach")
    with no_module, replaying(model, [learned]):
        pytest.fail("replayed")
    parameters.attach(model, hrpo)
    with replaying(model, [learned]):
        model(torch.tensor([[0, 1, 2]]))
    detach = pytest.raises(ValueError, match=r"no learned module, and this model has one\. Detach it")
    with detach, replaying(model, [bare]):
        pytest.fail("replayed")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"seed": -1}, "seed -1 must be in"),
        ({"seed": 1 << 48}, f"seed {1 << 48} must be in"),
        ({"ids": np.full((4, 3), 1 << 24, np.int32)}, "token id 16777216 is too large"),
    ],
)
def test_what_the_bytes_cannot_hold_is_refused(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        a_record(**parts).to_bytes()
