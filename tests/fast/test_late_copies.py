# SPDX-License-Identifier: Apache-2.0
"""Copies from the device that arrive late: who waits, for what, and that nothing is read before it is there."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngrpo.rollout.input_override import InputOverride
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.requests import RunningRequests
from ngrpo.rollout.trajectories import Chunks, TrajectoryStore
from perturbations import create, registry
from perturbations.embeddings import matrix_embeddings
from perturbations.gates.default import BoundGate

V, D, PROMPT = 100, 8, 4


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


class Copies:
    """Downloads of a perturber, which hold rubbish until an event that was recorded after them has arrived.

    An event arrives ``lag`` further events later, or when it is waited for; waiting for one brings all before it.
    """

    def __init__(self, lag: float) -> None:
        self.lag, self.waited, self.events = lag, [], []
        self._coming: list[tuple[Tensor, Tensor]] = []

    def download(self, part: Tensor) -> Tensor:
        rubbish = torch.full_like(part, 1) if part.dtype == torch.bool else torch.full_like(part, 77)
        self._coming.append((rubbish, part.clone()))
        return rubbish

    def event(self) -> Any:
        mine, self._coming = self._coming, []
        number = len(self.events)

        def arrive() -> None:
            with torch.inference_mode():
                for rubbish, part in mine:
                    rubbish.copy_(part)
            mine.clear()

        def query() -> bool:
            if len(self.events) <= number + self.lag:
                return not mine
            arrive()
            return True

        def synchronize() -> None:
            self.waited.append(number)
            for event in self.events[: number + 1]:
                event.arrive()

        self.events.append(SimpleNamespace(query=query, synchronize=synchronize, arrive=arrive))
        return self.events[-1]


class Worker:
    """A perturber, its requests, and logits that are a function of request and position."""

    def __init__(self, lag: float | None) -> None:
        """``lag`` None: copies are there at once, as on a CPU."""
        perturbation, device = create("gumbel", rate=0.6, until=None), torch.device("cpu")
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, D).requires_grad_(False)
        self.store = TrajectoryStore(3, 512, (V, D))
        gate = BoundGate(perturbation, lambda: [b"a", b"</think>", *[b"a"] * (V - 2)], V, self.store.slots, device)
        self.perturber = RolloutPerturber(
            perturbation, self.store, gate, matrix_embeddings(self.embedding.weight),
            InputOverride(self.embedding, 512, D, torch.float32, device), device,
        )  # fmt: skip
        if lag is not None:
            self.copies = Copies(lag)
            self.perturber._download, self.perturber._event = self.copies.download, self.copies.event
        self.requests = RunningRequests(perturbation, self.store, self.perturber, registry.buffers.create("memory"))

    def tell(self, new: dict[str, int] | None = None, finished: tuple[str, ...] = ()) -> None:
        opened = [
            SimpleNamespace(
                req_id=name, prompt_token_ids=[1] * PROMPT,
                sampling_params=SimpleNamespace(extra_args={"perturbation": {"seed": seed}}, seed=None),
            )
            for name, seed in (new or {}).items()
        ]  # fmt: skip
        self.requests.update(SimpleNamespace(finished_req_ids=set(finished), scheduled_new_reqs=opened))

    def step(self, partial: str = "", **computed: tuple[int, int]) -> Tensor:
        """One forward: of each request the first position and how many; what the override holds, (rows, D).

        ``partial`` is the request whose prefill is not complete with that, so that its draw is thrown away.
        """
        starts, counts = (np.array([span[i] for span in computed.values()]) for i in (0, 1))
        with torch.inference_mode():
            self.perturber.begin(list(computed), starts, counts, np.array([name == partial for name in computed]))
            rows = int(counts.sum())
            fed = self.embedding.override[:rows].where(self.embedding.overridden[:rows], torch.nan)
            logits = torch.stack(
                [
                    torch.randn(V, generator=torch.Generator().manual_seed(1000 * ord(name[0]) + int(start + count)))
                    for name, start, count in zip(computed, starts, counts)
                ]
            )
            drawable = logits.where(logits >= logits.topk(9, dim=-1).values[:, -1:], -torch.inf)
            self.perturber.finish(logits, torch.ones(len(counts)), drawable, None)
        return fed


def decode(worker: Worker, steps: range, *names: str) -> None:
    for at in steps:
        worker.step(**{name: (at, 1) for name in names})


def test_a_row_computed_again_waits_for_its_own_newest_note_and_for_none_after_it() -> None:
    fed = []
    for lag in (None, math.inf):
        worker = Worker(lag)
        worker.tell({"a": 1, "b": 2})
        worker.step(a=(0, PROMPT), b=(0, PROMPT))
        decode(worker, range(PROMPT, 40), "a", "b")
        decode(worker, range(40, 60), "b")  # a was preempted
        worker.tell()
        if lag is not None:
            assert worker.copies.waited == [], "no step waits"
        fed.append(worker.step(a=(0, 30), b=(60, 1), partial="a"))
        if lag is not None:
            # Prompt and 36 positions were 37 steps; the twenty of b alone are still on their way.
            assert set(worker.copies.waited) == set(range(37))
            assert worker.perturber.notes.written == 37
    assert torch.equal(*(part.nan_to_num(7.0) for part in fed)) and not fed[0].isnan().all()
    assert 10 < int((~fed[0][:30].isnan().any(dim=1)).sum()) < 26


def test_a_chunk_copies_the_range_that_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, read, spans = Worker(None), Chunks.read, []
    worker.tell({"a": 1})
    worker.step(a=(0, PROMPT))
    decode(worker, range(PROMPT, 400), "a")
    whole = worker.store._edits.read(worker.store.live["a"])
    assert len(whole["positions"]) > 200

    def logged(self: Chunks, slot: int, first: int = 0, last: int | None = None) -> dict[str, np.ndarray]:
        found = read(self, slot, first, last)
        spans.append(len(next(iter(found.values()), ())))
        return found

    monkeypatch.setattr(Chunks, "read", logged)
    for first in range(0, 400, 50):
        fed = worker.step("a", a=(first, 50))
        inside = (whole["positions"] >= first) & (whole["positions"] < first + 50)
        assert spans.pop() == inside.sum() and not spans
        assert (~fed.isnan().any(dim=1)).nonzero()[:, 0].tolist() == (whole["positions"][inside] - first).tolist()


def test_the_range_of_a_slot_is_found_at_every_border() -> None:
    draws = np.random.default_rng(0)
    for count in (0, 1, 63, 64, 65, 128, 300):
        chunks = Chunks(2)
        positions = np.sort(draws.choice(1000, count, replace=False)).astype(np.int32)
        for i, position in enumerate(positions):  # two slots in turns, so that their chunks alternate
            chunks.write(np.array([1, 0]), np.array([i, i]), {"positions": np.array([position, 7], dtype=np.int32)})
        for value in range(1001):
            assert chunks.find(1, "positions", value) == np.searchsorted(positions, value), (count, value)
