# SPDX-License-Identifier: Apache-2.0
"""Requests of a worker: their names, their seeds and slots while they run, and their records afterwards."""

from collections.abc import Iterable, Sequence

from ngrpo.machine.upstream.types import NewRequestData, SchedulerOutput
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.settings import request_arguments
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import FinishedTrajectory, Perturbation, ReplayBuffer, ReplayRecord, seeds
from perturbations.errors import require

# Names of requests below which the index is not worth building anew.
_MIN_NAMES = 1024


class RequestNames:
    """Internal request ids, found by a caller's names without going through all of them, in the order of arrival.

    vLLM appends ``-`` and eight characters to the caller's id. The samples of one request with ``n`` above 1 are
    requests ``0_<its internal id>``, ``1_<its internal id>`` and so on, and that request is their parent.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._all: set[str] = set()
        # Internal ids by the caller's id, and by the parent's id. A dictionary of None is a set in order of arrival.
        self._by_external: dict[str, dict[str, None]] = {}
        self._by_parent: dict[str, dict[str, None]] = {}
        for name in names:
            self.add(name)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, name: str) -> None:
        """Takes in an internal id."""
        self._all.add(name)
        self._by_external.setdefault(external_id(name), {})[name] = None
        parent = _parent(name)
        if parent:
            self._by_parent.setdefault(parent, {})[name] = None

    def discard(self, name: str) -> None:
        """Forgets an internal id."""
        self._all.discard(name)
        _discard_from(self._by_external, external_id(name), name)
        _discard_from(self._by_parent, _parent(name), name)

    def matching(self, requests: Iterable[str]) -> list[str]:
        """The internal ids of these external or internal ones, each once."""
        internal_ids: dict[str, None] = {}
        for request in requests:
            internal_ids |= self._by_external.get(request, {})
            if request in self._all:
                internal_ids[request] = None
        return list(internal_ids)

    def with_samples(self, requests: Iterable[str]) -> list[str]:
        """As :meth:`matching`, and all samples of each request that has several.

        Such a request is named by its own internal id, or by that of one of its samples.
        """
        requests = list(requests)
        internal_ids = dict.fromkeys(self.matching(requests))
        for request in requests:
            for parent in (request, _parent(request)):
                internal_ids |= dict.fromkeys(sorted(self._by_parent.get(parent, ())))
        return list(internal_ids)


def _discard_from(names_by_key: dict[str, dict[str, None]], key: str, name: str) -> None:
    """Removes a name from those of a key, and with its last name the key."""
    names = names_by_key.get(key, {})
    names.pop(name, None)
    if not names:
        names_by_key.pop(key, None)


def external_id(name: str) -> str:
    """The request id that the caller knows: vLLM appends '-' and eight characters to it inside the engine."""
    stem, _, suffix = name.rpartition("-")
    return stem if len(suffix) == 8 and stem else name


def _parent(name: str) -> str:
    """The internal id of the request that a sample belongs to; empty where it belongs to none."""
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
        """rank: of the worker's engine among data-parallel ones, which number their responses apart."""
        self._perturbation = perturbation
        self._store = store
        self._perturber = perturber
        self._buffer = buffer
        self._prompt_counts = seeds.PromptCounts(rank)
        # Live requests whose record nobody may take any more: it was handed over, or the request was aborted.
        self._without_claim: set[str] = set()
        # Requests that the scheduler reported as finished, with the number of steps that had been added by then. A
        # record is complete once all of these are in the stores.
        self._ended: dict[str, int] = {}
        # Names of all requests that are alive or in the buffer. A buffer may drop records without telling, so some
        # names lead nowhere: the index is built anew once it has `_rebuild_names_above` of them.
        self._names = RequestNames([*buffer.names(), *store.live])
        self._rebuild_names_above = _MIN_NAMES

    @property
    def running(self) -> int:
        """How many requests run: not those that vLLM has reported as finished or aborted, nor those whose record has
        been handed over.
        """
        return sum(name not in self._without_claim and name not in self._ended for name in self._store.live)

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Takes in one ``SchedulerOutput`` of vLLM, before the step runs.

        It waits for the device only where a new request has the id of one whose copies have not arrived.
        """
        for name in scheduler_output.finished_req_ids:
            if name in self._store.live:
                self._ended[name] = self._perturber.pending.added
        self._finish()
        for request in scheduler_output.scheduled_new_reqs:
            self._open(request)
        if self._perturber.routed is not None:
            self._perturber.routed.follow(scheduler_output, self._store.live)

    def _finish(self, names: Iterable[str] = ()) -> None:
        """Puts finished trajectories into the buffer: those whose draws have arrived, and ``names``, after a wait."""
        if not self._ended:
            return
        pending = self._perturber.pending
        awaited = max((self._ended.get(name, 0) for name in names), default=0)
        pending.drain(until=awaited)
        complete = [name for name, last_step in self._ended.items() if last_step <= pending.written]
        for name in complete:
            del self._ended[name]
            slot = self._store.live[name]
            if name in self._without_claim:
                self._without_claim.discard(name)
                self._names.discard(name)
            else:
                self._buffer.add(name, self._extract(name))
            self._store.close(name)
            self._perturber.closed(slot)

    def _open(self, request: NewRequestData) -> None:
        """Gives a new request its slot; one that comes back after a preemption has its slot still."""
        name = request.req_id
        self._finish([name])  # a caller may use an id again
        if name in self._store.live:
            return
        prompt = require(request.prompt_token_ids, "the prompt's tokens")
        arguments = request_arguments(request.sampling_params)
        earlier = ReplayRecord.from_bytes(arguments["record"]) if arguments.get("record") else None
        training_step = -1  # no schedule
        if arguments.get("scheduled", True):
            training_step = max(int(arguments.get("training_step", 0)), 0)
        slot = self._store.open(
            name,
            seed=self._seed(request, prompt, earlier),
            prompt_tokens=len(prompt),
            perturbed=bool(arguments.get("enabled", True)),
            training_step=training_step,
            response_number=int(arguments.get("answer", 0)),
            response_count=int(arguments.get("answers", 1)),
        )
        if earlier is not None:
            self._store.load(slot, earlier, ahead=arguments.get("ahead", False))
        self._names.add(name)
        if len(self._names) > self._rebuild_names_above:
            self._names = RequestNames([*self._buffer.names(), *self._store.live])
            self._rebuild_names_above = 2 * len(self._names) + _MIN_NAMES
        self._perturber.opened(name, prompt)

    def _seed(self, request: NewRequestData, prompt: Sequence[int], earlier: ReplayRecord | None) -> int:
        """The seed of a new trajectory: of its earlier turns, from the request, or from its prompt."""
        if earlier is not None:  # so that one record covers all turns
            return earlier.seed
        params = request.sampling_params
        arguments = request_arguments(params)
        requested = arguments.get("seed", getattr(params, "seed", None))
        if requested is not None:
            sample = int(arguments.get("sample", 0))
            return seeds.trajectory_seed(self._perturbation.seed, int(requested), sample)
        prompt_seed = seeds.of_prompt(prompt)
        if "round" in arguments:
            prompt_seed = seeds.of_prompt_and_number(prompt, int(arguments["round"]))
        sample = self._prompt_counts.next(prompt_seed)
        return seeds.trajectory_seed(self._perturbation.seed, prompt_seed, sample)

    def _extract(self, name: str) -> FinishedTrajectory:
        """All that is stored of a live request's trajectory."""
        slot = self._store.live[name]
        record, log_probs = self._store.record(name)
        masks = self._perturber.masks
        routed = self._perturber.routed
        return FinishedTrajectory(
            record=record,
            log_probs=log_probs,
            sampling_mask=None if masks is None else masks.read(slot),
            experts=None if routed is None else routed.read(slot),
        )

    def take(self, names: list[str] | None, unfinished: list[str] | None = None) -> dict[str, dict[str, bytes]]:
        """Hands over the records of requests, each record once.

        Args:
            names: internal or external ids; None for all requests.
            unfinished: internal ids of requests that still run, and whose records are left out.

        Returns:
            By internal id, the bytes of each :class:`FinishedTrajectory` as its ``pack`` returns them.
        """
        if names is None:
            self._finish(self._ended)
            internal_ids = [*self._buffer.names(), *self._store.live]
        else:
            internal_ids = self._names.matching(names)
            self._finish(internal_ids)
        running = set(unfinished or ())
        records: dict[str, dict[str, bytes]] = {}
        for name in dict.fromkeys(internal_ids):
            if name in running:
                continue
            trajectory = self._take_one(name)
            if trajectory is not None:
                records[name] = trajectory.pack()
        return records

    def _take_one(self, name: str) -> FinishedTrajectory | None:
        """The trajectory of a request; None where it is gone: handed over before, or dropped."""
        try:
            trajectory = self._buffer.take(name)
        except KeyError:
            if name not in self._store.live or name in self._without_claim:
                return None
            # vLLM's scheduler reports the end of a request only with the next step. The record is complete already,
            # and must not come a second time.
            self._without_claim.add(name)
            self._perturber.pending.drain(until=self._perturber.pending.added)
            return self._extract(name)
        if name not in self._store.live:
            self._names.discard(name)
        return trajectory

    def drop(self, names: list[str]) -> None:
        """Forgets the records of aborted requests, all samples of each; names as in :meth:`take`."""
        matching = self._names.with_samples(names)
        self._buffer.drop(matching)
        for name in matching:
            if name in self._store.live:
                self._without_claim.add(name)
            else:
                self._names.discard(name)
