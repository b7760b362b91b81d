# SPDX-License-Identifier: Apache-2.0
"""What a decode step costs beside the model: no waiting, no loops over requests, few copies and launches."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.decode_step import loops
from benchmarks.decoding import Decoding, counting
from ngrpo.rollout.chunks import Chunks
from ngrpo.rollout.perturber import RolloutPerturber
from perturbations import available, create

NAMES = sorted(name for name in available() if name != "none")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rate", [0.4, 1.0])
def test_a_decode_step_waits_for_nothing(name: str, rate: float) -> None:
    """One copy to the device: all that the host knows of the step. The last one's vectors stay where they are."""
    decoding = Decoding(create(name, rate=rate, burn_in=0), 16)
    allowed_waits = set()
    if name == "neighbor":  # on a CPU, rows of its table are computed when they are first asked for
        allowed_waits = {"_local_scalar_dense", "index"}
        decoding.perturber._embeddings.index("cosine").precompute(2)
    for _ in range(2):
        decoding.step()
    with counting(decoding.perturber) as counts:
        for _ in range(6):
            decoding.step()
    assert counts.steps == 6
    assert set(counts.waits) <= allowed_waits
    assert counts.uploads == counts.steps
    assert counts.downloads <= 7 * counts.steps
    assert counts.launches < 200 * counts.steps


@pytest.mark.parametrize("name", sorted({*NAMES} - {"neighbor"}))  # whose table on a CPU is filled by what is asked for
def test_a_decode_step_does_not_loop_over_requests(name: str) -> None:
    # Below rate 1, a small batch has steps in which nothing is perturbed.
    assert loops(create(name, rate=1.0, burn_in=0)) == 0


# --- rows that are computed again: which copies they wait for, and which edits they read ------------------------------


def decode(decoding: Decoding, steps: int, *requests: str) -> None:
    decoding.requests = list(requests)
    for _ in range(steps):
        decoding.step()


def test_a_row_computed_again_waits_for_its_own_newest_note_and_for_none_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[int] = []
    recorded: list[int] = []

    def event(_: RolloutPerturber, buffer: Any = None) -> Any:
        number = len(recorded)
        recorded.append(number)
        return SimpleNamespace(query=lambda: number in waited, synchronize=lambda: waited.append(number))

    monkeypatch.setattr(RolloutPerturber, "_event", event)
    decoding = Decoding(create("gumbel", rate=0.6), 64)
    decode(decoding, 40, "request-0", "request-1")
    decode(decoding, 20, "request-1")  # the other one was preempted
    assert waited == [], "no step waits"
    starts = np.array([0, decoding._position])
    counts = np.array([50, 1])
    discarded = np.array([True, False])
    decoding.perturber.begin(["request-0", "request-1"], starts, counts, discarded)
    assert waited == list(range(40))
    assert decoding.perturber.pending.written == 40, "the other twenty are on their way"


def test_a_chunk_copies_the_range_that_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding(create("gumbel", rate=0.6), 64)
    perturber = decoding.perturber
    decode(decoding, 380, "request-0")
    perturber.pending.drain(until=perturber.pending.added)
    store = perturber._store
    sources = perturber._override._module.override_sources
    positions = store._edits.read(store.live["request-0"])["positions"]
    assert len(positions) > 200
    original_read = Chunks.read
    lengths: list[int] = []

    def read(self: Chunks, slot: int, first: int = 0, last: int | None = None) -> dict[str, np.ndarray]:
        columns = original_read(self, slot, first, last)
        lengths.append(len(next(iter(columns.values()), ())))
        return columns

    monkeypatch.setattr(Chunks, "read", read)
    for first in range(0, 400, 50):
        perturber.begin(["request-0"], np.array([first]), np.array([50]), np.array([True]))
        inside = positions[(positions >= first) & (positions < first + 50)]
        assert lengths == [len(inside)]
        lengths.clear()
        replaced_rows = (sources[:50] >= 0).nonzero()[:, 0]
        assert replaced_rows.tolist() == (inside - first).tolist()
