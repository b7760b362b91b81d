# SPDX-License-Identifier: Apache-2.0
"""A worker's notes of each token's experts, step by step: shared prompts, chunks, preemption, tokens drawn again."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.rollout import routed_experts
from ngrpo.rollout.routed_experts import RoutedExperts
from ngrpo.rollout.trajectories import TrajectoryStore

BLOCK = 2


class Layer:
    """A layer of vLLM, one of two, that sends a token to one of 300 experts."""

    def __init__(self, chosen: int = 1, *, is_monolithic: bool = False, experts: int = 300) -> None:
        self.moe_config = SimpleNamespace(experts_per_token=chosen, num_logical_experts=experts)
        self.is_monolithic = is_monolithic
        self._quant_method = None
        self.router = self
        self.take = None

    def set_capture_fn(self, take: Callable[[torch.Tensor], None]) -> None:
        self.take = take


@pytest.mark.parametrize(("experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_an_id_below_256_takes_one_byte(experts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_experts, "_layers", lambda model: [Layer(experts=experts)])
    runner = SimpleNamespace(get_model=lambda: None, max_num_tokens=4, device="cpu")
    assert RoutedExperts(runner)._step.dtype == dtype


class Worker:
    """Runs steps in which the token at position p of the n-th forward goes to expert 10 n + p of both layers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caching: bool = True) -> None:
        self.layers = [Layer(), Layer()]
        monkeypatch.setattr(routed_experts, "_layers", lambda model: self.layers)
        monkeypatch.setattr(RoutedExperts, "_group", lambda self: 0)
        spec = SimpleNamespace(block_size=BLOCK)
        caches = SimpleNamespace(num_blocks=20, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=caching))
        runner = SimpleNamespace(
            get_model=lambda: None, max_num_tokens=16, device="cpu", vllm_config=config, kv_cache_config=caches
        )
        self.routed = RoutedExperts(runner)
        self.store = TrajectoryStore(4, 64)
        self.step = 0
        self.routed.restart(self.store)

    def open(self, name: str, prompt: int, blocks: Sequence[int]) -> int:
        slot = self.store.open(name, 0, prompt, True)
        self.routed.clear(slot)
        self.schedule(new={name: blocks})
        return slot

    def schedule(
        self,
        new: Mapping[str, Sequence[int]] = MappingProxyType({}),
        more: Mapping[str, Sequence[int] | None] = MappingProxyType({}),
        again: Sequence[str] = (),
    ) -> None:
        """A step of the scheduler.

        Args:
            new: by the name of a new request, its blocks.
            more: by the name of a running request, its further blocks or None.
            again: the names of those that go on after a preemption.
        """
        further_blocks = [None if blocks is None else (blocks,) for blocks in more.values()]
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=(blocks,)) for name, blocks in new.items()],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(more), new_block_ids=further_blocks, resumed_req_ids=set(again)
            ),
        )
        self.routed.follow(output, self.store.live)

    def run(self, *rows: tuple[int, int, int, bool]) -> Any:
        """A forward of rows (slot, first position, tokens, whether a token is drawn); its step, on its way."""
        slots, starts, counts, drawn = (np.array(column) for column in zip(*rows))
        self.routed.begin(slots, starts, counts, drawn)
        self.step += 10
        positions = [np.arange(start, start + count) for start, count in zip(starts, counts)]
        ids = self.step + np.concatenate(positions)
        for layer in self.layers:
            layer.take(torch.from_numpy(ids)[:, None])
        return self.routed.take(lambda tensor: tensor)

    def write(self, *rows: tuple[int, int, int, bool]) -> None:
        self.routed.write(self.run(*rows))

    def experts(self, slot: int) -> list[int]:
        """The expert of each token, the same in both layers."""
        by_layer = self.routed.read(slot)
        assert by_layer.dtype == np.uint16
        assert by_layer.shape[1:] == (2, 1)
        assert (by_layer[:, 0] == by_layer[:, 1]).all()
        return by_layer[:, 0, 0].tolist()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


def test_a_shared_prompt_has_the_experts_of_the_forward_that_computed_it(worker: Worker) -> None:
    """Chunks of the first prompt; the second finds two blocks in the cache, one of them computed in its own step."""
    one = worker.open("one", 5, [7, 3])
    steps = [worker.run((one, 0, 2, False))]
    two = worker.open("two", 5, [7, 3, 8])
    worker.schedule(more={"one": [4]})
    steps.append(worker.run((one, 2, 3, True), (two, 4, 1, True)))
    worker.schedule(more={"one": None, "two": None})
    steps.append(worker.run((one, 5, 1, True), (two, 5, 1, True)))
    for step in steps:  # they arrive later than they are made
        worker.routed.write(step)
    assert worker.experts(one) == [10, 11, 22, 23, 24, 35]
    assert worker.experts(two) == [10, 11, 22, 23, 24, 35]


def test_a_block_that_is_used_again_belongs_to_its_new_prompt(worker: Worker) -> None:
    one = worker.open("one", 3, [7, 3])
    worker.write((one, 0, 3, True))
    worker.store.close("one")
    two = worker.open("two", 3, [5, 7])
    assert two == one
    worker.write((two, 0, 3, True))
    three = worker.open("three", 3, [5, 9])
    worker.write((three, 2, 1, True))
    assert worker.experts(two) == [20, 21, 22]
    assert worker.experts(three) == [20, 21, 32]


def test_a_preempted_request_keeps_what_its_tokens_were_drawn_with(worker: Worker) -> None:
    """Computed again in two chunks, in other blocks; the last token, drawn again, has its new forward's experts."""
    one = worker.open("one", 2, [7, 3])
    for first, count in ((0, 2), (2, 1), (3, 1)):
        worker.write((one, first, count, True))
    assert worker.experts(one) == [10, 11, 22, 33]
    worker.schedule(more={"one": [1, 2]}, again=["one"])
    worker.write((one, 0, 2, False))
    assert worker.experts(one) == [10, 11, 22, 33]
    worker.write((one, 2, 1, True))
    assert worker.experts(one) == [10, 11, 52], "the token at position 3 is drawn again, and what came after it is gone"
    other = worker.open("other", 3, [1, 9])
    worker.write((other, 2, 1, True))
    assert worker.experts(other) == [40, 41, 62], "the cache holds the newest forward"


def test_without_a_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, caching=False)
    one = worker.open("one", 3, [])
    worker.routed.grow(40)
    worker.write((one, 0, 3, True))
    assert worker.experts(one) == [10, 11, 12]
    worker.routed.clear(one)
    assert len(worker.routed.read(one)) == 0
