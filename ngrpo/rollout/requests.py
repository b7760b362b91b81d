# SPDX-License-Identifier: Apache-2.0
"""Requests of a worker: their names, their seeds and slots while they run, and their records afterwards."""

from collections.abc import Iterable
from contextlib import suppress

from ngrpo.machine.upstream.types import NewRequestData, SchedulerOutput
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.settings import request_arguments
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import FinishedTrajectory, Perturbation, ReplayBuffer, ReplayRecord, seeds
from perturbations.errors import require


class RequestNames:
    """Internal request ids, found by a caller's names without going through all of them, in the order of arrival."""

    # vLLM appends ``-`` and eight characters to the caller's id, and calls the samples of one request ``0_<its internal
    # id>``, ``1_...``.

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._all: set[str] = set()
        self._found: dict[tuple[str, str], dict[str, None]] = {}
        for name in names:
            self.add(name)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, name: str) -> None:
        """Takes in an internal id."""
        self._all.add(name)
        for key in self._keys(name):
            self._found.setdefault(key, {})[name] = None

    def discard(self, name: str) -> None:
        """Forgets an internal id."""
        self._all.discard(name)
        for key in self._keys(name):
            ids = self._found.get(key, {})
            ids.pop(name, None)
            if not ids:
                self._found.pop(key, None)

    def matching(self, requests: Iterable[str]) -> list[str]:
        """The internal ids of these external or internal ones, each once."""
        found: dict[str, None] = {}
        for one in requests:
            found |= self._found.get(("external", one), {})
            if one in self._all:
                found[one] = None
        return list(found)

    def with_samples(self, requests: Iterable[str]) -> list[str]:
        """As :meth:`matching`, with all samples of a request that is named by one of them or by its internal id."""
        requests = list(requests)
        parents = dict.fromkeys(parent for one in requests for parent in (one, _parent(one)))
        samples = (name for parent in parents for name in sorted(self._found.get(("parent", parent), ())))
        return list(dict.fromkeys([*self.matching(requests), *samples]))

    @staticmethod
    def _keys(name: str) -> list[tuple[str, str]]:
        parent = _parent(name)
        return [("external", external_id(name)), *([("parent", parent)] if parent else [])]


def external_id(name: str) -> str:
    """The request id that the caller knows: vLLM appends '-' and eight characters to it inside the engine."""
    stem, _, suffix = name.rpartition("-")
    return stem if len(suffix) == 8 and stem else name


def _parent(name: str) -> str:
    return name.partition("_")[2]


class RunningRequests:
    """Follows vLLM's scheduler: opens a slot for a new request, puts the record of a finished one into the buffer."""

    def __init__(
        self,
        perturbation: Perturbation,
        store: TrajectoryStore,
        perturber: RolloutPerturber,
        buffer: ReplayBuffer,
        rank: int = 0,
    ) -> None:
        self._perturbation, self._store, self._perturber, self._buffer = perturbation, store, perturber, buffer
        self._counts = seeds.PromptCounts(rank)
        self._dropped: set[str] = set()
        # Requests that the scheduler reported as finished, and how many notes had been taken by then: these must all
        # be in the stores.
        self._ended: dict[str, int] = {}
        # All alive, all in the buffer, and some that the buffer has dropped since, until there are as many.
        self._names, self._names_most = RequestNames([*buffer.names(), *store.live]), 1024

    @property
    def running(self) -> int:
        """Requests alive: those not reported as finished, except where their record has been handed over."""
        return sum(name not in self._dropped and name not in self._ended for name in self._store.live)

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Takes in one ``SchedulerOutput`` of vLLM, before the step runs, without waiting for the device."""
        for name in scheduler_output.finished_req_ids:
            if name in self._store.live:
                self._ended[name] = self._perturber.notes.taken
        self._finish()
        for new in scheduler_output.scheduled_new_reqs:
            self._open(new)
        if self._perturber.routed is not None:
            self._perturber.routed.follow(scheduler_output, self._store.live)

    def _finish(self, names: Iterable[str] = ()) -> None:
        """Puts finished trajectories into the buffer: those with arrived notes, and ``names``, waited for."""
        if not self._ended:
            return
        self._perturber.notes.drain(until=max((self._ended.get(name, 0) for name in names), default=0))
        for name in [name for name, noted in self._ended.items() if noted <= self._perturber.notes.written]:
            del self._ended[name]
            slot = self._store.live[name]
            if name in self._dropped:
                self._dropped.discard(name)
                self._names.discard(name)
            else:
                self._buffer.add(name, self._extract(name))
            self._store.close(name)
            self._perturber.closed(slot)

    def _open(self, new: NewRequestData) -> None:
        self._finish([new.req_id])
        if new.req_id in self._store.live:
            return
        params, prompt = new.sampling_params, require(new.prompt_token_ids, "the prompt's tokens")
        arguments = request_arguments(params)
        earlier = ReplayRecord.from_bytes(arguments["record"]) if arguments.get("record") else None
        given = arguments.get("seed", getattr(params, "seed", None))
        if earlier is not None:  # a further turn keeps its trajectory's seed, so that one record covers all turns
            seed = earlier.seed
        elif given is not None:
            seed = seeds.trajectory_seed(self._perturbation.seed, int(given), int(arguments.get("sample", 0)))
        else:
            prompt_seed = seeds.of_prompt(prompt)
            seed = seeds.trajectory_seed(self._perturbation.seed, prompt_seed, self._counts.next(prompt_seed))
        step = max(int(arguments.get("training_step", 0)), 0) if arguments.get("scheduled", True) else -1
        answer = int(arguments.get("answer", 0)), int(arguments.get("answers", 1))
        slot = self._store.open(new.req_id, seed, len(prompt), bool(arguments.get("enabled", True)), step, answer)
        if earlier is not None:
            self._store.load(slot, earlier, ahead=arguments.get("ahead", False))
        self._names.add(new.req_id)
        if len(self._names) > self._names_most:
            self._names = RequestNames([*self._buffer.names(), *self._store.live])
            self._names_most = 2 * len(self._names) + 1024
        self._perturber.opened(new.req_id, prompt)

    def _extract(self, name: str) -> FinishedTrajectory:
        slot = self._store.live[name]
        masks, routed = self._perturber.masks, self._perturber.routed
        mask = None if masks is None else masks.read(slot)
        experts = None if routed is None else routed.read(slot)
        return FinishedTrajectory(*self._store.record(name), mask, experts=experts)

    def take(self, names: list[str] | None, unfinished: list[str] | None = None) -> dict[str, dict[str, bytes]]:
        """Hands over records, once: internal request id to the parts of its :class:`FinishedTrajectory`.

        ``names``: internal or external ids, None for all but ``unfinished``, internal ids of requests still running.
        """
        ids = None if names is None else self._names.matching(names)
        self._finish(self._ended if ids is None else ids)
        if ids is None:
            ids = [*self._buffer.names(), *self._store.live]
        running, taken = set(unfinished or ()), {}
        for name in dict.fromkeys(ids):
            if name in running:
                continue
            with suppress(KeyError):
                taken[name] = self._buffer.take(name).pack()
                if name not in self._store.live:
                    self._names.discard(name)
                continue
            if name in self._store.live and name not in self._dropped:
                # The scheduler tells of the end only with the next step; the record must not come a second time.
                self._dropped.add(name)
                self._perturber.notes.drain(until=self._perturber.notes.taken)
                taken[name] = self._extract(name).pack()
        return taken

    def drop(self, names: list[str]) -> None:
        """Forgets the records of aborted requests, all samples of each; names as in :meth:`take`."""
        matching = self._names.with_samples(names)
        self._buffer.drop(matching)
        for name in matching:
            if name in self._store.live:
                self._dropped.add(name)
            else:
                self._names.discard(name)
