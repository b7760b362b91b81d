# SPDX-License-Identifier: Apache-2.0
"""Requests are found by what their callers know, forgotten if nobody asks for them, and have seeds of their own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.cuda_without_gpu.simulated_engine import Engine, Plan
from ngrpo.rollout.requests import RequestNames, RunningRequests, external_id
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import FinishedTrajectory, create, seeds
from perturbations.registry import buffers

ONE = "a-12345678"
OTHER = "b_c-12345678"
SAMPLES = ["0_d-12345678", "1_d-12345678"]


def test_by_internal_and_external_id() -> None:
    names = RequestNames([ONE, OTHER, *SAMPLES, "a-87654321", "bare"])
    assert names.matching(["a", ONE, "b_c", "x", "bare"]) == [ONE, "a-87654321", OTHER, "bare"]
    assert names.matching(["0_d", SAMPLES[1]]) == SAMPLES
    assert [external_id(name) for name in (ONE, SAMPLES[0], "bare", "-12345678")] == ["a", "0_d", "bare", "-12345678"]
    names.discard(ONE)
    names.discard("never there")
    assert names.matching(["a"]) == ["a-87654321"]
    assert len(names) == 5


def test_of_several_requests_of_one_id_the_newest_comes_last() -> None:
    """A client may use an id again, and the caller's dictionary by external ids keeps what comes last."""
    names = RequestNames(["a-99999999"])
    names.add("a-11111111")
    names.add("a-55555555")
    assert names.matching(["a"]) == ["a-99999999", "a-11111111", "a-55555555"]


def test_the_samples_of_a_request_go_together() -> None:
    """vLLM aborts one sample, or, where a client goes away, the request by the internal id that it gave it."""
    names = RequestNames([ONE, OTHER, *SAMPLES, "0_e-12345678"])
    assert names.with_samples([SAMPLES[1]]) == [SAMPLES[1], SAMPLES[0]]
    assert names.with_samples(["d-12345678"]) == SAMPLES
    assert names.with_samples(["a", "x"]) == [ONE]


class Books:
    """Requests of a worker without an engine: each is of one token, and finished as soon as the next one comes."""

    def __init__(self, rank: int = 0) -> None:
        self.store = TrajectoryStore(4, 64)
        perturber = SimpleNamespace(
            opened=lambda name, prompt: None, closed=lambda slot: None, masks=None, routed=None,
            pending=SimpleNamespace(drain=lambda **kwargs: None, added=0, written=0),
        )  # fmt: skip
        self.buffer = buffers.create("memory")
        self.requests = RunningRequests(create("gumbel", seed=3), self.store, perturber, self.buffer, rank)

    def run(self, *names: str, prompt: int = 5, seed: int | None = None, round_: int | None = None) -> None:
        extra_args = None if round_ is None else {"perturbation": {"round": round_}}
        params = SimpleNamespace(seed=seed, extra_args=extra_args)
        new = [SimpleNamespace(req_id=name, sampling_params=params, prompt_token_ids=[prompt, 6]) for name in names]
        self.requests.update(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=new))

    def end(self, *names: str) -> None:
        self.requests.update(SimpleNamespace(finished_req_ids=set(names), scheduled_new_reqs=[]))


def test_records_are_handed_over_once_and_dropped_with_all_samples() -> None:
    books = Books()
    books.run(ONE, *SAMPLES)
    assert list(books.requests.take(["a"])) == [ONE]
    assert books.requests.take(["a"]) == {}
    books.end(ONE, SAMPLES[0])
    assert books.buffer.names() == [SAMPLES[0]]
    assert len(books.requests._names) == 2
    books.requests.drop(["d-12345678"])
    books.end(SAMPLES[1])
    assert not books.buffer.names()
    assert not books.store.live
    assert not books.requests._without_claim
    assert len(books.requests._names) == 0


def test_what_the_buffer_has_dropped_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books()
    object.__setattr__(books.buffer, "max_bytes", 20_000)
    for i in range(3000):
        books.run(f"{i}-12345678")
        books.end(f"{i}-12345678")
    assert 5 < len(books.buffer) < 20
    assert len(books.requests._names) <= 2 * 20 + 1024
    assert list(books.requests.take(["2999"])) == ["2999-12345678"]
    # An engine that is given another perturbation keeps its buffer.
    again = RunningRequests(create("gumbel"), books.store, books.requests._perturber, books.buffer)
    assert list(again.take(["2998"])) == ["2998-12345678"]


# --- which trajectory a request is --------------------------------------------------------------------------


def seeds_of(books: Books, names: str) -> list[int]:
    return books.store.seeds[[books.store.live[name] for name in names]].tolist()


def drawn_seeds(rank: int, seed: int | None = None) -> list[int]:
    """The seeds of four requests for one prompt on a data-parallel rank."""
    books = Books(rank)
    books.run(*"abcd", seed=seed)
    return seeds_of(books, "abcd")


def test_the_samples_of_a_prompt_differ_on_a_rank_and_between_ranks() -> None:
    assert len({seed for rank in range(3) for seed in drawn_seeds(rank)}) == 12
    assert drawn_seeds(1) == drawn_seeds(1), "a rank draws as before"


def test_a_seed_is_the_same_trajectory_on_every_rank() -> None:
    assert len({seed for rank in range(3) for seed in drawn_seeds(rank, seed=11)}) == 1


def test_a_resumed_training_draws_as_one_that_was_not_interrupted() -> None:
    """Each round numbers the responses to a prompt afresh, so it does not matter what the engine has drawn before."""
    uninterrupted, resumed = Books(), Books()
    uninterrupted.run(*"ab", round_=0)
    first = seeds_of(uninterrupted, "ab")
    uninterrupted.run(*"cd", round_=1)
    resumed.run(*"cd", round_=1)
    second = seeds_of(uninterrupted, "cd")
    assert seeds_of(resumed, "cd") == second
    assert len({*first, *second}) == 4


def test_engines_have_seeds_of_their_own() -> None:
    assert len({seeds.of_engine(3, engine) for engine in range(4)}) == 4


def test_a_request_with_the_id_of_the_last_one_is_another_trajectory() -> None:
    """vLLM's VLLM_DISABLE_REQUEST_ID_RANDOMIZATION leaves a caller's ids as they are."""

    def last_of(*names: str) -> FinishedTrajectory:
        """The last of some requests of one step each, with prompts of 1, 2, ... tokens."""
        plan = Plan()
        engine = Engine(create("gaussian", rate=1.0), "cpu", plan)
        finished: set[str] = set()
        packed: dict[str, bytes] = {}
        for number, name in enumerate(names, start=1):
            params = SimpleNamespace(seed=number, extra_args=None)
            new = SimpleNamespace(req_id=name, sampling_params=params, prompt_token_ids=[1] * number)
            engine.requests.update(SimpleNamespace(finished_req_ids=finished, scheduled_new_reqs=[new]))
            engine.perturber.begin([name], np.array([0]), np.array([number]), np.array([False]))
            logits = torch.zeros(1, plan.vocabulary)
            engine.perturber.finish(logits, torch.ones(1), None, None)
            packed = engine.requests.take([name])[name]
            finished = {name}
        return FinishedTrajectory.unpack(packed)

    with_own_id = last_of("a", "b")
    with_same_id = last_of("a", "a")
    assert len(with_own_id.record) == 1
    assert with_same_id.record == with_own_id.record
    assert np.array_equal(with_same_id.log_probs, with_own_id.log_probs)
