# SPDX-License-Identifier: Apache-2.0
"""Weight versions from the engine to the trainer, and ``--sampling.max_staleness`` on OpenRLHF's asynchronous queue."""

import asyncio
import pickle
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.config import run_notes
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.trainers.openrlhf import experience_maker
from ngrpo.trainers.openrlhf.async_trainer import training_actor
from ngrpo.trainers.openrlhf.fresh_rollouts import VERSION, FreshRollouts, WaitingResponses, take_versions, with_version
from ngrpo.trainers.openrlhf.rollout_actor import rollout_actor
from tests.support import openrlhf_doubles
from tests.support.run import check_flags, run_of, run_with

ASYNCHRONOUS = ("--train.async_enable",)


def sample(name: str, version: int) -> Any:
    info = {VERSION: torch.tensor([version]), "reward": torch.tensor([1.0])}
    return SimpleNamespace(name=name, info=info, action_mask=torch.ones(1, 2))


def samples(names: str, version: int) -> list[Any]:
    return [sample(name, version) for name in names]


class Queue(deque[Any]):
    """Ray's queue, in one process."""

    def get(self, block: bool) -> Any:
        return self.popleft()

    def put(self, entry: Any, block: bool) -> None:
        self.append(entry)


# ---- the version of a response -------------------------------------------------------------------------------------


class Engine:
    """OpenRLHF's rollout actor, in whose call weight syncs may come."""

    syncs_within_a_call = 0

    async def update_weight(self, name: str, *, empty_cache: bool = False) -> None:
        """One weight of a sync, the last one with ``empty_cache``."""

    async def generate_responses(self, prompt: str) -> list[dict[str, Any]]:
        for _ in range(self.syncs_within_a_call):
            await self.update_weight("a", empty_cache=True)  # type: ignore[attr-defined]
        return [{"prompt": prompt}, {"prompt": prompt, "extra_logs": {"turns": 2}}]


def engine() -> Any:
    made = rollout_actor(Engine)
    return made.__new__(made)


def test_a_response_has_the_number_of_syncs_that_its_engine_has_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, openrlhf=ASYNCHRONOUS)
    actor = engine()

    async def drawn_after_two_syncs() -> list[dict[str, Any]]:
        for name in ("a", "b"):
            await actor.update_weight(name, empty_cache=name == "b")
        await actor.update_weight("a", empty_cache=False)
        await actor.update_weight("b", empty_cache=True)
        await actor.update_weight("a", empty_cache=False)  # a third one has begun
        return await actor.generate_responses("p")

    assert [response["extra_logs"] for response in asyncio.run(drawn_after_two_syncs())] == [
        {VERSION: 2},
        {"turns": 2, VERSION: 2},
    ]


def test_a_sync_by_a_file_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, openrlhf=ASYNCHRONOUS)

    async def call(*args: Any, **kwargs: Any) -> None:
        """A call of the engine's workers."""

    actor = engine()
    actor.llm = SimpleNamespace(collective_rpc=call)
    asyncio.run(actor.load_weights_file("weights"))
    assert actor.weight_version == 1


def test_a_sync_between_the_tokens_of_a_response_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, openrlhf=ASYNCHRONOUS)
    actor = engine()
    actor.syncs_within_a_call = 1
    with pytest.raises(RuntimeError, match="weight sync 1 came while responses of sync 0 were drawn"):
        asyncio.run(actor.generate_responses("p"))


@pytest.mark.parametrize("flags", [(), (*ASYNCHRONOUS, "--train.partial_rollout_enable")])
def test_other_runs_have_no_versions(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """In partial rollouts a response has several versions, and a synchronous run has one for all."""
    run_with(monkeypatch, openrlhf=flags)
    actor = engine()
    actor.syncs_within_a_call = 1
    assert asyncio.run(actor.generate_responses("p"))[0] == {"prompt": "p"}


def test_versions_leave_no_trace_in_what_openrlhf_logs() -> None:
    batch = samples("ab", version=3)
    assert take_versions(batch) == [3, 3]
    assert all(set(of_batch.info) == {"reward"} for of_batch in batch)
    with pytest.raises(RuntimeError, match="without the version of the weights"):
        take_versions(batch)


def test_the_version_joins_what_a_response_logs() -> None:
    assert with_version({"reward": 1.0, "extra_logs": None}, 4) == {"reward": 1.0, "extra_logs": {VERSION: 4}}


# ---- the metrics of a step -----------------------------------------------------------------------------------------


def test_a_step_s_tokens_by_age_in_the_order_of_its_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three responses with versions 2, 1 and 2 under a trainer of two syncs; micro-batches have them in another order.

    They have 2, 1 and 3 tokens; the differences of log-probabilities are 0.25, 1 and 0.5.
    """
    run_with(monkeypatch, openrlhf=ASYNCHRONOUS)
    monkeypatch.setattr(experience_maker.rewards, "refuse_untrained", lambda samples: None)
    monkeypatch.setattr(experience_maker.MeasuringExperienceMaker, "warn_of_cuts", lambda maker, samples: None)

    def micro_batch(index: list[int], mask: list[list[int]], differences: list[float]) -> Any:
        action_mask = torch.tensor(mask)
        return SimpleNamespace(
            index=index,
            action_mask=action_mask,
            mm_train_inputs=None,
            action_log_probs=torch.full(action_mask.shape, -1.0),
            rollout_log_probs=torch.full(action_mask.shape, -1.0) - torch.tensor(differences)[:, None],
        )

    experiences = [micro_batch([2], [[1, 1, 1]], [0.5]), micro_batch([0, 1], [[1, 1], [0, 1]], [0.25, 1.0])]
    monkeypatch.setattr(
        openrlhf_doubles._RemoteExperienceMaker, "make_experience_batch", lambda maker, samples: experiences
    )
    maker = openrlhf_doubles.maker(weight_version=2)
    maker.make_experience_batch([sample("a", 2), sample("b", 1), sample("c", 2)])
    assert maker.step_measures == {
        "generated_tokens": 6.0,
        "staleness/mean": pytest.approx(1 / 6),
        "staleness/max": 1.0,
        "staleness/tokens_0": 5.0,
        "staleness/gap_0": pytest.approx((2 * 0.25 + 3 * 0.5) / 5),
        "staleness/tokens_1": 1.0,
        "staleness/gap_1": pytest.approx(1.0),
        "staleness/tokens_2_up": 0.0,
    }


def test_without_log_probabilities_of_the_rollout_a_step_has_counts_alone() -> None:
    experience = SimpleNamespace(index=[0], action_mask=torch.ones(1, 2), rollout_log_probs=None)
    measures = experience_maker.staleness_measures([experience], np.array([1]), None)
    assert measures["staleness/tokens_1"] == 2.0 and not any("gap" in name for name in measures)


# ---- --sampling.max_staleness --------------------------------------------------------------------------------------


class FreshCase:
    """A queue with a limit, whose trainer's version a test sets."""

    def __init__(
        self, max_staleness: int, batch: int = 4, version: int = 0, waiting: WaitingResponses | None = None
    ) -> None:
        self.queue = Queue()
        self.slots = Queue()
        self.version = version
        self.fresh = FreshRollouts(
            self.queue,
            self.slots,
            max_staleness=max_staleness,
            batch=batch,
            trainer_version=lambda: self.version,
            step=lambda: 7,
            waiting=waiting,
        )

    def add(self, names: str, version: int, seconds: float = 1.0) -> None:
        self.queue.append((samples(names, version), {"last": names[-1]}, None, seconds))

    def taken(self) -> Any:
        entry = self.fresh.get(block=True)
        return entry if isinstance(entry, str) else "".join(taken.name for taken in entry[0])


def test_batches_of_few_syncs_pass_as_they_came() -> None:
    case = FreshCase(max_staleness=1)
    case.version = 3
    case.add("abcd", version=2)
    case.add("ef", version=3)  # the short last batch of an epoch
    case.queue.append("done")
    assert [case.taken() for _ in range(3)] == ["abcd", "ef", "done"]
    assert case.fresh.take_left_out() == 0 and not case.slots


def test_an_older_batch_is_left_out_and_its_token_returned() -> None:
    """So that the generator draws the next one, with the trainer's step for its evaluations."""
    case = FreshCase(max_staleness=1)
    case.version = 3
    case.add("abcd", version=1, seconds=2.0)
    case.add("efgh", version=2, seconds=5.0)
    taken, states, _, seconds = case.fresh.get(block=True)
    assert [of_batch.name for of_batch in taken] == list("efgh")
    assert states == {"last": "h"} and seconds == 7.0
    assert list(case.slots) == [7]
    assert case.fresh.take_left_out() == 4 and case.fresh.take_left_out() == 0


def test_remaining_groups_wait_until_they_fill_a_batch() -> None:
    """An engine that draws ahead leaves groups of several versions in a batch: c and d of sync 1, e to h of sync 2."""
    case = FreshCase(max_staleness=1)
    case.version = 2
    case.queue.append(([*samples("ab", 0), *samples("cd", 1)], {}, None, 1.0))
    case.add("efgh", version=2)
    assert case.taken() == "cdef"
    case.version = 3
    case.add("ijkl", version=3)
    assert case.taken() == "ghij"
    assert case.fresh.take_left_out() == 2
    assert len(case.slots) == 1, "one batch was taken without a step"


def test_the_age_of_a_group_that_waits_is_checked_again() -> None:
    case = FreshCase(max_staleness=0)
    case.version = 1
    case.queue.append(([*samples("ab", 1), *samples("cd", 0)], {}, None, 1.0))
    case.add("efgh", version=1)
    assert case.taken() == "abef"
    case.version = 2  # g and h are of sync 1
    case.add("ijkl", version=2)
    assert case.taken() == "ijkl"
    assert case.fresh.take_left_out() == 4


@pytest.mark.parametrize(("syncs", "trained"), [(0, "ghij"), (1, "ijkl")])
def test_groups_that_wait_are_part_of_a_checkpoint_with_their_age(syncs: int, trained: str) -> None:
    """The resumed run counts its syncs from 0 on, and has made one before its first batch: the checkpoint's weights."""
    before = FreshCase(max_staleness=0, version=8)
    before.queue.append(([*samples("ab", 8), *samples("cd", 7)], {}, None, 1.0))
    before.add("efgh", version=8)
    assert before.taken() == "abef"
    waiting = before.fresh.waiting()
    assert repr(waiting) == "2 responses that wait", "OpenRLHF prints the states"
    resumed = FreshCase(max_staleness=0, version=1, waiting=pickle.loads(pickle.dumps(waiting)))
    resumed.version += syncs
    resumed.add("ijkl", version=resumed.version)
    assert resumed.taken() == trained


def test_where_no_group_waits_a_checkpoint_has_none() -> None:
    case = FreshCase(max_staleness=0)
    case.add("abcd", version=0)
    assert case.taken() == "abcd"
    assert case.fresh.waiting() is None


def test_the_end_names_what_is_not_trained(capsys: pytest.CaptureFixture[str]) -> None:
    case = FreshCase(max_staleness=0)
    case.version = 1
    case.queue.append(([*samples("ab", 1), *samples("cd", 0)], {}, None, 1.0))
    case.queue.append("done")
    assert case.taken() == "done"
    assert "the last 2 responses are not trained" in capsys.readouterr().out


class AsyncTrainer:
    """OpenRLHF's ``TrainingActor``: it takes a batch, returns its token, trains and syncs."""

    def __init__(self, queue: Queue, slots: Queue) -> None:
        self.rollout_queue: Any = queue
        self.rollout_slots = slots
        self.args = SimpleNamespace(rollout=SimpleNamespace(batch_size=2, n_samples_per_prompt=2))
        self.experience_maker = openrlhf_doubles.makers_state()
        self.kl_ctl = SimpleNamespace(value=0.0)
        self.trained: list[tuple[str, int]] = []
        self.statuses: list[dict[str, Any]] = []

    def fit(self, global_step: int = 0) -> None:
        while True:
            entry = self.rollout_queue.get(block=True)
            if entry == "done":
                break
            self.rollout_slots.put(global_step, block=True)
            status, global_step = self.train_step(entry[0], global_step)
            self.statuses.append(status)

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict[str, Any], int]:
        names = "".join(of_batch.name for of_batch in rollout_samples)
        self.trained.append((names, self.experience_maker.weight_version))
        self.broadcast_to_vllm()
        return {}, global_step + 1

    def broadcast_to_vllm(self) -> None:
        """A weight sync."""


def test_the_trainer_leaves_out_what_is_older_than_its_own_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that is two batches ahead draws "ijkl" before the first sync; two came before its turn."""
    run_with(monkeypatch, openrlhf=ASYNCHRONOUS, sampling={"max_staleness": 1})
    queue = Queue()
    for names, version in (("abcd", 0), ("efgh", 0), ("ijkl", 0), ("mnop", 1)):
        queue.append((samples(names, version), {}, None, 1.0))
    queue.append("done")
    slots = Queue()
    made = training_actor(AsyncTrainer)(queue, slots)
    made.fit(0)
    assert made.trained == [("abcd", 0), ("efgh", 1), ("mnop", 2)]
    assert [status["staleness/left_out"] for status in made.statuses] == [0.0, 0.0, 4.0]
    assert list(slots) == [0, 1, 2, 2], "a token for each of the four batches"


def test_a_resumed_trainer_begins_with_the_groups_that_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two steps k and l wait, of sync 1; the checkpoint has the weights of sync 2."""
    run_with(monkeypatch, openrlhf=ASYNCHRONOUS, sampling={"max_staleness": 1})
    before = training_actor(AsyncTrainer)(Queue(), Queue())
    before.rollout_queue.append((samples("abcd", 0), {}, None, 1.0))
    before.rollout_queue.append(([*samples("ef", 1), *samples("gh", -1)], {}, None, 1.0))
    before.rollout_queue.append((samples("ijkl", 1), {}, None, 1.0))
    before.rollout_queue.append("done")
    before.fit(0)
    assert before.trained == [("abcd", 0), ("efij", 1)]
    states = before.our_states()

    resumed = training_actor(AsyncTrainer)(Queue(), Queue())
    resumed.restore(pickle.loads(pickle.dumps(states)))
    resumed.broadcast_to_vllm()
    resumed.rollout_queue.append((samples("mnop", 1), {}, None, 1.0))
    resumed.rollout_queue.append("done")
    resumed.fit(2)
    assert resumed.trained == [("klmn", 1)]

    with_larger_groups = training_actor(AsyncTrainer)(Queue(), Queue())
    with_larger_groups.args.rollout.n_samples_per_prompt = 4
    with_larger_groups.restore(states)
    with_larger_groups.rollout_queue.append("done")
    with_larger_groups.fit(2)
    assert with_larger_groups.trained == []
    assert with_larger_groups.rollout_queue.waiting() is None


# ---- the flag ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "greatest"),
    [
        ("", 1),
        ("--train.async_queue_size 3", 3),
        ("--train.async_queue_size 2 --rollout.batch_size 8 --rollout.vllm_generate_batch_size 24", 4),
        ("--rollout.batch_size 8 --rollout.vllm_generate_batch_size 4", 1),
    ],
)
def test_the_greatest_age_that_openrlhf_s_queue_allows(flags: str, greatest: int) -> None:
    assert run_notes.greatest_staleness(Flags([*ASYNCHRONOUS, *flags.split()])) == greatest


@pytest.mark.parametrize(
    ("limit", "queue", "said"),
    [(1, "1", "leaves nothing out"), (0, "1", "every second one"), (1, "2", ""), (None, "1", "")],
)
def test_a_start_says_what_a_limit_leaves_out(limit: int | None, queue: str, said: str) -> None:
    run = run_of(sampling={"max_staleness": limit})
    complete = SimpleNamespace(run=run, flags=Flags([*ASYNCHRONOUS, "--train.async_queue_size", queue]))
    notes = list(run_notes.staleness_notes(complete))
    assert len(notes) == bool(said) and all(said in note for note in notes)


def test_a_limit_of_zero_is_on() -> None:
    run = run_of(sampling={"max_staleness": 0})
    assert run.sampling.given() == {"max_staleness": 0}
    assert run.flags()["sampling.max_staleness"] == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--sampling.max_staleness 0 cannot be used with no --train.async_enable"),
        ([*ASYNCHRONOUS, "--train.partial_rollout_enable"], "the version of the weights for each token"),
    ],
)
def test_where_no_response_has_an_age_the_limit_is_refused(flags: list[str], said: str) -> None:
    run = run_of(sampling={"max_staleness": 0})
    with pytest.raises(ValueError, match=said):
        check_flags(["--actor.model_name_or_path", "m", *flags], run)
    check_flags(["--actor.model_name_or_path", "m", *ASYNCHRONOUS], run)
