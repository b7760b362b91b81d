# SPDX-License-Identifier: Apache-2.0
"""What a decode step costs beside the model: no waiting, no loops over requests, few copies and launches."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import decode_step
from benchmarks.decode_step import Decoding, count, counting, loops
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.requests import RunningRequests
from perturbations import FinishedTrajectory, available, create, registry

NAMES = sorted(name for name in available() if name != "none")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rate", [0.4, 1.0])
def test_a_decode_step_waits_for_nothing(name: str, rate: float) -> None:
    """Two copies to the device: all that the host knows of the step, and where the last one's vectors belong."""
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
    assert counts.uploads == 2 * counts.steps
    assert counts.downloads <= 7 * counts.steps
    assert counts.launches < 200 * counts.steps


@pytest.mark.parametrize("name", sorted({*NAMES} - {"neighbor"}))  # whose table on a CPU is filled by what is asked for
def test_a_decode_step_does_not_loop_over_requests(name: str) -> None:
    # Below rate 1, a small batch has steps in which nothing is perturbed.
    assert loops(create(name, rate=1.0, burn_in=0)) == 0


def test_the_count_sees_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits in four ways, loops over its requests, and copies once more."""
    begin = RolloutPerturber.begin

    def slow(self, names, starts, counts, discard) -> None:
        begin(self, names, starts, counts, discard)
        some = torch.arange(len(names))
        some.max().item(), some.nonzero(), some[some > 1]
        some[some > 1] = 0
        self._upload(np.zeros(1))
        _wasted(names)

    monkeypatch.setattr(RolloutPerturber, "begin", slow)
    monkeypatch.setattr(decode_step, "_OURS", (*decode_step._OURS, "test_decode_step"))
    seen = count(create("soft"), batch=4, steps=3)
    assert len(seen.waits) == 3 * 4 and set(seen.waits) == {"_local_scalar_dense", "nonzero", "index", "index_put_"}
    assert seen.uploads == 3 * 3
    assert loops(create("soft")) == 2  # two lines for each request


def _wasted(names: list[str]) -> None:
    for name in names:
        str(name)


# --- requests that finish ---------------------------------------------------------------------------------------------


class _Copies:
    """Stands for CUDA's event of copies on their way."""

    def __init__(self) -> None:
        self.arrived = False
        self.waited = 0

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        self.waited += 1
        self.arrived = True


def test_a_finished_request_waits_for_its_own_notes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of three steps are on their way: nothing waits until a record is asked for, then up to the last of it."""
    copies: list[_Copies] = []

    def event(_: RolloutPerturber) -> _Copies:
        copies.append(_Copies())
        return copies[-1]

    monkeypatch.setattr(RolloutPerturber, "_event", event)
    decoding = Decoding(create("gumbel"), 2)
    perturber, buffer = decoding.perturber, registry.buffers.create("memory")
    requests = RunningRequests(create("gumbel"), perturber._store, perturber, buffer)

    def told(*finished: str) -> None:
        requests.update(SimpleNamespace(finished_req_ids=set(finished), scheduled_new_reqs=[]))

    decoding.step(), decoding.step()
    told("request-0")
    decoding.requests = ["request-1"]
    decoding.step()
    told()
    assert [one.waited for one in copies] == [0, 0, 0] and requests.running == 1
    (taken,) = requests.take(["request-0"]).values()
    taken = FinishedTrajectory.unpack(taken)
    assert len(taken.record) == 2 and len(taken.log_probs) == 2
    assert [one.waited for one in copies] == [1, 1, 0]
    copies[2].arrived = True
    told("request-1")
    assert requests.running == 0 and len(decoding.perturber._store.live) == 0
    (taken,) = requests.take(None).values()
    assert len(FinishedTrajectory.unpack(taken).log_probs) == 3 and copies[2].waited == 0
