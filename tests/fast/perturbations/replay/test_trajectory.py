# SPDX-License-Identifier: Apache-2.0
"""Records as bytes: lossless, small, and refused where they are damaged, hostile or of another model."""

import dataclasses
import tracemalloc
from collections.abc import Iterator
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


def assert_lossless(record: ReplayRecord) -> None:
    """Asserts that a record comes back from its bytes with the same values, dtypes and shapes."""
    read = ReplayRecord.from_bytes(record.to_bytes())
    for field in dataclasses.fields(record):
        written_value = getattr(record, field.name)
        read_value = getattr(read, field.name)
        np.testing.assert_array_equal(written_value, read_value)
        if isinstance(written_value, np.ndarray):
            assert written_value.dtype == read_value.dtype
            assert written_value.shape == read_value.shape


@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_lossless(case: str) -> None:
    assert_lossless(CASES[case])


@pytest.mark.parametrize("count", [0, 4])
@pytest.mark.parametrize("width", [127, 128, 255, 256, MOST_CANDIDATES])
def test_round_trip_of_many_candidates_is_lossless(count: int, width: int) -> None:
    assert_lossless(a_record(count, width))


@pytest.mark.parametrize("tokens", [12, 20, 100, 1000])
def test_at_most_three_bytes_per_token(tokens: int) -> None:
    """Rate 0.1, k = 3: one edit in ten tokens of 3 × 2 + 3 × 4 + 1 bytes and a bit, a header of 13 and a checksum."""
    count = tokens // 10
    record = ReplayRecord(
        seed=1,
        prompt_tokens=60,
        num_tokens=60 + tokens,
        positions=(60 + 10 * np.arange(count)).astype(np.int32),
        ids=np.full((count, 3), 49151, np.int32),
        weights=np.full((count, 3), 1 / 3, np.float32),
        sigma=None,
        agreed=np.ones(count, bool),
    )
    assert len(record.to_bytes()) <= 3 * tokens


def test_too_many_candidates_are_refused_by_the_writer() -> None:
    with pytest.raises(ValueError, match=r"4097 candidates.*1 to 4096.*Mix fewer"):
        a_record(1, MOST_CANDIDATES + 1).to_bytes()


@pytest.mark.parametrize("name", ["hrpo", "soft", "neighbor", "moi", "multiplex"])
def test_too_many_candidates_are_refused_by_the_options(name: str) -> None:
    create(name, k=1000).check_model(49152)
    create(name, k=MOST_CANDIDATES - 1).check_model(49152)
    with pytest.raises(UsageError, match=r"k=4096: must be in \[[12], 4095\].*record"):
        create(name, k=MOST_CANDIDATES).check_model(49152)


def test_more_candidates_than_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match=r"k=1000: must be in \[1, 100\], the model's vocabulary"):
        create("hrpo", k=1000).check_model(100)
    create("multiplex", k=1000).check_model(100)  # draws may repeat


# --- damaged bytes -----------------------------------------------------------------------------------


def with_byte(data: bytes, place: int, byte: int) -> bytes:
    """The data with another byte at a place."""
    return data[:place] + bytes([byte]) + data[place + 1 :]


def damaged(data: bytes) -> Iterator[bytes]:
    """Every cut of the data, a byte too many, and each of the 255 other values of each byte."""
    for end in range(len(data)):
        yield data[:end]
    yield data + b"\0"
    for place, byte in enumerate(data):
        for flipped_bits in range(1, 256):
            yield with_byte(data, place, byte ^ flipped_bits)


@pytest.mark.more
def test_any_altered_byte_and_any_cut_is_refused() -> None:
    tried = 0
    for record in CASES.values():
        for data in damaged(record.to_bytes()):
            tried += 1
            with pytest.raises(ValueError, match="record"):
                ReplayRecord.from_bytes(data)
    assert tried > 100_000


def packed_with_mask() -> dict[str, bytes]:
    """What travels of a trajectory with nine log-probabilities and a sampling mask at positions 2 and 5."""
    mask = SamplingMask.of(
        49152,
        {
            2: (False, np.array([3, 7, 900])),
            5: (True, np.array([1])),
        },
    )
    log_probs = np.arange(9, dtype=np.float32)
    return FinishedTrajectory(a_record(), log_probs, mask).pack()


def test_what_travels_beside_a_record_comes_back() -> None:
    packed = packed_with_mask()
    for name, data in packed.items():
        assert isinstance(data, bytes), name
    (trajectory,) = sample_records.unpack([packed])
    assert trajectory.log_probs.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert trajectory.sampling_mask.by_position().keys() == {2, 5}


def test_what_travels_beside_a_record_has_a_checksum_too() -> None:
    packed = packed_with_mask()
    for name, data in packed.items():
        for place in range(len(data)):
            altered = with_byte(data, place, data[place] ^ 1)
            cut = data[:place]
            for wrong in (altered, cut):
                with pytest.raises(ValueError, match=r"damaged|version"):
                    sample_records.unpack([{**packed, name: wrong}])


# --- hostile bytes -----------------------------------------------------------------------------------

HAS_VECTORS = 16  # the flag of a record whose header ends with the vectors' size


def leb128(value: int) -> bytes:
    """A number of any size, as :func:`packing.varints` writes those below 2^35."""
    if value < 0x80:
        return bytes([value])
    return bytes([value & 0x7F | 0x80]) + leb128(value >> 7)


def hostile(
    version: int = 5,
    flags: int = 0,
    width: int = 1,
    prompt: int = 3,
    generated: int = 9,
    count: int = 1,
    size: int = 2,
) -> bytes:
    """The bytes of a record with a right checksum, and with lengths that may be none."""
    lengths = [width, prompt, generated, count]
    if flags & HAS_VECTORS:
        lengths.append(size)
    header = bytes([flags, 0, 0]) + bytes(6)
    body = bytes([2, 7, 0])
    return packing.sealed([header, b"".join(map(leb128, lengths)), body, bytes(8)], version)


@pytest.mark.parametrize(
    "lengths",
    [
        {"count": 1 << 62},
        {"count": 1 << 31, "width": 255},
        {"prompt": 1 << 62},
        {"generated": 1 << 31},
        {"flags": HAS_VECTORS, "size": 1 << 40},
        {"flags": HAS_VECTORS, "count": 0, "size": 1 << 62},
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
    data = hostile(**lengths)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="replay record"):
            ReplayRecord.from_bytes(data)
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 1 << 20
    finally:
        tracemalloc.stop()


def test_without_hostile_lengths_it_is_a_record_of_its_version() -> None:
    assert len(ReplayRecord.from_bytes(hostile(flags=HAS_VECTORS))) == 1
    with pytest.raises(ValueError, match="another version"):
        ReplayRecord.from_bytes(hostile(flags=HAS_VECTORS, version=4))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param([bytes([2, 0]), bytes(4)], "ascend", id="the same position twice"),
        pytest.param([bytes([2, 255])], "cut short", id="a number without its last byte"),
    ],
)
def test_positions_that_do_not_ascend_are_refused(body: list[bytes], message: str) -> None:
    header = bytes(9)
    lengths = bytes([1, 3, 9, 2])
    with pytest.raises(ValueError, match=message):
        ReplayRecord.from_bytes(packing.sealed([header, lengths, *body], version=5))


# --- of another model --------------------------------------------------------------------------------

IDS_OF_5 = np.full((4, 3), 5, np.int32)


@pytest.mark.parametrize(
    ("vocabulary", "hidden_size"),
    [
        (49152, 577),
        (49153, 576),
        (576, 49152),
    ],
)
def test_a_record_of_another_model_is_refused(vocabulary: int, hidden_size: int) -> None:
    """Its bytes and a truncated record still name the model."""
    written = a_record(ids=IDS_OF_5, model=model_fingerprint(49152, 576))
    record = ReplayRecord.from_bytes(written.to_bytes()).truncate(600)
    record.check_model(49152, 576)
    with pytest.raises(ValueError, match="of another model, and cannot be replayed"):
        record.check_model(vocabulary, hidden_size)


def test_a_record_without_a_model_needs_its_ids_alone() -> None:
    record = a_record(ids=IDS_OF_5)
    record.check_model(6, 3)
    with pytest.raises(ValueError, match="none of the model's: 0 to 4"):
        record.check_model(5, 3)


def test_a_record_of_vectors_needs_their_size() -> None:
    with pytest.raises(ValueError, match="vectors of 5 dimensions"):
        CASES["vectors"].check_model(49152, 6)


SHAPE = (10, 2)  # of the Embedder
OF_EMBEDDER = dataclasses.replace(small([1]), model=model_fingerprint(*SHAPE))
OF_ANOTHER_MODEL = dataclasses.replace(small([1]), model=model_fingerprint(10, 99))
TOKENS = torch.tensor([[0, 1, 2]])


def test_a_trainer_replays_no_record_of_another_model() -> None:
    model = Embedder()
    with replaying(model, [OF_EMBEDDER]):
        model(TOKENS)
    with pytest.raises(ValueError, match="another model"), replaying(model, [OF_EMBEDDER, OF_ANOTHER_MODEL]):
        pytest.fail("replayed")


def test_a_rollout_continues_no_record_of_another_model() -> None:
    store = TrajectoryStore(1, 64, SHAPE)
    store.load(store.open("a", 9, 8, True), OF_EMBEDDER)
    stored, _ = store.record("a")
    assert stored.model == OF_EMBEDDER.model
    with pytest.raises(ValueError, match="another model"):
        store.load(store.open("b", 9, 8, True), OF_ANOTHER_MODEL)


def stored_record(learned: bool) -> ReplayRecord:
    """A record from the store of an engine with or without a learned module."""
    store = TrajectoryStore(1, 64, SHAPE, learned)
    store.load(store.open("a", 9, 8, True), small([1]))
    record, _ = store.record("a")
    return record


def test_a_record_of_a_learned_module_is_not_replayed_without_the_module() -> None:
    message = r"learned module, and this model has none.*parameters\.attach"
    with pytest.raises(ValueError, match=message), replaying(Embedder(), [stored_record(learned=True)]):
        pytest.fail("replayed")


def test_a_record_of_a_learned_module_is_replayed_with_the_module_alone() -> None:
    model = Embedder()
    hrpo = create("hrpo", k=2)
    assert hrpo.has_parameters
    parameters.attach(model, hrpo)
    with replaying(model, [stored_record(learned=True)]):
        model(TOKENS)
    message = r"no learned module, and this model has one\. Detach it"
    with pytest.raises(ValueError, match=message), replaying(model, [stored_record(learned=False)]):
        pytest.fail("replayed")


def test_a_record_is_replayed_with_and_without_a_module_where_its_fingerprint_does_not_tell() -> None:
    shape = (1215, 39)
    assert model_fingerprint(*shape) == model_fingerprint(*shape, module=True)
    record = dataclasses.replace(small([1]), model=model_fingerprint(*shape))
    record.check_model(*shape, module=True)
    record.check_model(*shape, module=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"seed": -1}, "seed -1 must be in", id="negative seed"),
        pytest.param({"seed": 1 << 48}, f"seed {1 << 48} must be in", id="large seed"),
        pytest.param(
            {"ids": np.full((4, 3), 1 << 24, np.int32)},
            "token id 16777216 is too large",
            id="large token id",
        ),
    ],
)
def test_what_the_bytes_cannot_hold_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        a_record(**fields).to_bytes()
