# SPDX-License-Identifier: Apache-2.0
"""What a decode step costs beside the model: no waiting, no loops over requests, few copies and launches."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.decode_step import Decoding, counting, loops
from ngrpo.rollout.chunks import Chunks
from ngrpo.rollout.perturber import RolloutPerturber
from perturbations import available, create

NAMES = sorted(name for name in available() if name != "none")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rate", [0.4, 1.0])
def test_a_decode_step_waits_for_nothing(name: str, rate: float) -> None:
    """One copy to the device: all that the host knows of the step. The last one's vectors stay where they are."""
    decoding = Decoding(create(name, rate=rate, burn_in=0), 16)
    allowed = {"neighbor": {"_local_scalar_dense", "index"}}.get(name, set())
    if name == "neighbor":  # on a CPU, rows of its table are computed when they are first asked for
        decoding.perturber._embeddings.index("cosine").precompute(2)
    for _ in range(2):
        decoding.step()
    with counting(decoding.perturber) as counts:
        for _ in range(6):
            decoding.step()
    assert counts.steps == 6 and set(counts.waits) <= allowed
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
    made: list[int] = []

    def event(_: RolloutPerturber, buffer: Any = None) -> Any:
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
    decoding.perturber.notes.drain(until=decoding.perturber.notes.taken)
    store, sources = decoding.perturber._store, decoding.perturber._override._module.override_sources
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
        assert (sources[:50] >= 0).nonzero()[:, 0].tolist() == (inside - first).tolist()
