# SPDX-License-Identifier: Apache-2.0
"""Records on their way from the device: the words of a packed one by hand, and sixteen steps written as one."""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import decode_step
from benchmarks.decoding import Decoding, counting
from ngrpo.rollout import step_graphs
from ngrpo.rollout.async_scheduling import STEPS_AT_ONCE, HostBuffers
from ngrpo.rollout.batch import Rows
from ngrpo.rollout.step_records import PackedRecord, RecordLayout, SeparateRecord, pack
from ngrpo.rollout.trajectories import DrawnStep, TrajectoryStore
from perturbations import create, streams
from perturbations.gates.default import GateOptions

FIELDS = {
    "fed": torch.tensor([True, False, True]),
    "agreed": torch.tensor([True, True, False]),
    "ids": torch.tensor([[7, 8], [9, 10], [11, -1]], dtype=torch.int32),
    "weights": torch.tensor([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]),
    "sigma": torch.tensor([0.0, 2.0, -1.0]),
}
LOG_PROBS = torch.tensor([-0.5, -1.0, -2.0])


def test_the_words_of_a_record_by_hand() -> None:
    words = pack(LOG_PROBS, FIELDS)
    assert words.shape == (3, 7)
    assert words.dtype == torch.int32
    assert words[:, 0].tolist() == [3, 2, 1], "bit 0: fed; bit 1: agreed"
    assert words[:, 1].tolist() == [-1090519040, -1082130432, -1073741824], "float32 of -0.5, -1 and -2"
    assert words[:, 2:4].tolist() == FIELDS["ids"].tolist()
    floats = words[:, 4:].view(torch.float32)
    assert floats[:, :2].tolist() == [[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]], "the weights"
    assert floats[:, 2].tolist() == [0.0, 2.0, -1.0], "sigma"


def test_both_kinds_of_record_say_the_same() -> None:
    packed = PackedRecord(pack(LOG_PROBS, FIELDS), RecordLayout(FIELDS))
    separate = SeparateRecord(LOG_PROBS, np.arange(3), FIELDS)
    assert packed.log_probs().tolist() == [-0.5, -1.0, -2.0]
    assert separate.log_probs().tolist() == [-0.5, -1.0, -2.0]

    packed_rows, packed_edits = packed.edits()
    separate_rows, separate_edits = separate.edits()
    assert packed_rows.tolist() == [0, 2]
    assert separate_rows.tolist() == [0, 2]
    assert packed_edits.keys() == FIELDS.keys() - {"fed"}
    assert separate_edits.keys() == FIELDS.keys() - {"fed"}
    for name, field in packed_edits.items():
        assert field.dtype == separate_edits[name].dtype
        assert np.array_equal(field, separate_edits[name]), name


def steps_of(count: int, draws: np.random.Generator) -> list[DrawnStep]:
    """Two trajectories that are drawn in each step, of which the first is edited in every third."""
    steps = []
    for number in range(count):
        edited_slots = np.array([], dtype=np.int64)
        edits = {}
        if number % 3 == 0:
            edited_slots = np.array([0], dtype=np.int64)
            edits = {"weights": draws.random((1, 2), dtype=np.float32)}
        step = DrawnStep(
            slots=np.array([0, 1]),
            positions=np.array([4 + number, 9 + number]),
            log_probs=draws.random(2, dtype=np.float32),
            edited_slots=edited_slots,
            edited_positions=edited_slots + 4 + number,
            edits=edits,
        )
        steps.append(step)
    return steps


def store_of_two() -> TrajectoryStore:
    """A store in which the trajectories of `steps_of` have begun."""
    store = TrajectoryStore(2, 256)
    assert store.open("a", 1, 4, True) == 0
    assert store.open("b", 2, 9, True) == 1
    return store


def test_steps_that_are_written_together_are_those_written_one_by_one() -> None:
    steps = steps_of(100, np.random.default_rng(0))
    one_by_one = store_of_two()
    for step in steps:
        one_by_one.write_steps([step])
    together = store_of_two()
    for start in range(0, 100, STEPS_AT_ONCE):
        together.write_steps(steps[start : start + STEPS_AT_ONCE])

    for slot in (0, 1):
        for chunks in ("_tokens", "_edits"):
            expected = getattr(one_by_one, chunks).read(slot)
            content = getattr(together, chunks).read(slot)
            assert content.keys() == expected.keys()
            for name, rows in expected.items():
                assert np.array_equal(content[name], rows), (slot, chunks, name)
    assert together.edits(0, 0, 256)["positions"].tolist() == [*range(4, 104, 3)]


@pytest.mark.parametrize("options", [{"rate": 0.3}, {"rate": 1.0, "every": 3, "burn_in": 5}, {"rate": 0.9, "every": 2}])
def test_the_device_selects_what_the_host_selects(options: dict[str, Any]) -> None:
    draws = np.random.default_rng(1)
    generated = draws.integers(0, 1000, 5000)
    keys = streams.keys(draws.integers(0, 1 << 62, 5000), generated, streams.Stream.GATE)
    gate = GateOptions(**options)
    host = gate.scheduled(generated, keys)
    device = gate.scheduled(torch.from_numpy(generated), torch.from_numpy(keys))
    assert np.array_equal(host, device.numpy())
    assert 0 < host.sum() < 5000


@pytest.mark.parametrize("with_logits", [False, True])
def test_a_step_is_one_graph_one_upload_and_one_download(monkeypatch: pytest.MonkeyPatch, with_logits: bool) -> None:
    """Four copies beside the replay: the upload; the logits, or the last hidden states that a graph computes them from,
    to their address; the tokens from theirs; the download. The placeholder of logits is no launch.
    """
    monkeypatch.setattr(step_graphs, "available", lambda device: True)
    monkeypatch.setattr(step_graphs, "CudaGraph", decode_step._NoGraph)
    with torch.inference_mode():
        decoding = Decoding(create("gumbel", rate=0.4), 16, with_logits=with_logits)
        for _ in range(3 * STEPS_AT_ONCE):
            decoding.step()
        with counting(decoding.perturber) as counts:
            for _ in range(2 * STEPS_AT_ONCE):
                decoding.step()
    assert counts.steps == 2 * STEPS_AT_ONCE
    assert counts.uploads == counts.downloads == counts.steps
    assert counts.launches == (1 + 4) * counts.steps
    assert not counts.waits


def test_rows_beyond_the_batch_belong_to_the_scratch_row() -> None:
    rows = Rows(
        names=["a", "b"],
        perturbed=np.ones(2, dtype=bool),
        slots=np.array([3, 5]),
        seeds=np.array([7, 8]),
        first=np.array([2, 9]),
    )
    columns = rows.columns_of(size=4, scratch=11)
    assert columns.slots.tolist() == [3, 5, 11, 11]
    assert columns.seeds.tolist() == [7, 8, 0, 0]
    assert columns.first.tolist() == [2, 9, 0, 0]

    columns.positions[:] = 1

    assert rows.columns_of(size=4, scratch=11).positions.tolist() == [1, 1, 1, 1], "one matrix for all of its steps"


def test_buffers_are_used_again() -> None:
    buffers = HostBuffers((4,), torch.int64, torch.device("cpu"))
    first = buffers.take()
    assert buffers.take() is not first, "it is in use"
    first.give_back()
    assert buffers.take() is first
    target = torch.zeros(6, dtype=torch.int64)
    for number in range(3):
        buffers.upload(np.array([number, 7]), target)
        assert target.tolist() == [number, 7, 0, 0, 0, 0]
