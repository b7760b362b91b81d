# SPDX-License-Identifier: Apache-2.0
"""Requests of a worker: their seeds and slots while they run, and what is left of them when they have finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.settings import request_arguments
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations.base import Perturbation
from perturbations.replay import ReplayRecord
from perturbations.replay.buffers.base import FinishedTrajectory, ReplayBuffer
from perturbations.streams import trajectory_seed

# The record, the log-probabilities, and the tokens that sampling left, empty where these are not recorded.
Taken = tuple[bytes, bytes, bytes]


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
        # Data-parallel ranks count a prompt's samples each for itself, so each counts in a range of its own.
        self._first = rank << 32
        self._dropped: set[str] = set()
        # Finished, with the number of notes that may hold something of them; their slots are not free yet.
        self._finished: dict[str, int] = {}
        self._seen: Counter[int] = Counter()

    @property
    def running(self) -> int:
        """Requests alive: those not told of as finished, except where their record has been handed over."""
        return sum(name not in self._dropped and name not in self._finished for name in self._store.live)

    def update(self, scheduler_output: Any) -> None:
        """Takes in one ``SchedulerOutput`` of vLLM, before the step runs, without waiting for the device."""
        for name in scheduler_output.finished_req_ids:
            if name in self._store.live:
                self._finished[name] = self._perturber.noted
        self._settle()
        for new in scheduler_output.scheduled_new_reqs:
            self._open(new)

    def _settle(self, names: Iterable[str] = ()) -> None:
        """Puts finished trajectories into the buffer: those whose notes have arrived, and ``names``, waited for."""
        self._perturber.drain(until=max((self._finished.get(name, 0) for name in names), default=0))
        for name in [name for name, noted in self._finished.items() if noted <= self._perturber.written]:
            del self._finished[name]
            self._finish(name)

    def _open(self, new: Any) -> None:
        self._settle([new.req_id])
        if new.req_id in self._store.live:
            return
        params, prompt = new.sampling_params, new.prompt_token_ids
        given = request_arguments(params)
        earlier = ReplayRecord.from_bytes(given["record"]) if given.get("record") else None
        # A further turn goes on with its trajectory's seed, so that one record covers all turns.
        seed = earlier.seed if earlier is not None else self._seed(given, params, prompt)
        step = max(int(given.get("training_step", 0)), 0) if given.get("scheduled", True) else -1
        trajectory = self._store.open(new.req_id, seed, len(prompt), bool(given.get("enabled", True)), step)
        if earlier is not None:
            self._store.load(trajectory, earlier)
        self._perturber.opened(new.req_id)

    def _seed(self, given: dict[str, Any], params: Any, prompt: list[int]) -> int:
        """The trajectory's seed.

        Given with the request, or else derived from the engine's seed, the prompt, and how many times this prompt
        has been asked: so a run repeats, and the members of a group differ.
        """
        seed = given.get("seed", getattr(params, "seed", None))
        if seed is not None:
            return trajectory_seed(self._perturbation.seed, int(seed), int(given.get("sample", 0)))
        tokens = np.asarray(prompt, dtype=np.int64).tobytes()
        asked = trajectory_seed(tokens)
        self._seen[asked] += 1
        return trajectory_seed(self._perturbation.seed, asked, self._first + self._seen[asked])

    def _finish(self, name: str) -> None:
        slot = self._store.live[name].slot
        if name in self._dropped:
            self._dropped.discard(name)
        else:
            self._buffer.add(name, self._extract(name))
        self._store.close(name)
        self._perturber.closed(slot)

    def _extract(self, name: str) -> FinishedTrajectory:
        mask = self._perturber.sampling_mask(self._store.live[name].slot)
        return FinishedTrajectory(*self._store.record(name), b"" if mask is None else mask.to_bytes())

    def _here(self) -> Iterable[str]:
        """The internal request ids of all held or alive."""
        return dict.fromkeys([*self._buffer.names(), *self._store.live])

    def _matching(self, names: list[str]) -> list[str]:
        """Those held or alive whose internal or external request id is among the names."""
        wanted = set(names)
        return [name for name in self._here() if name in wanted or external_id(name) in wanted]

    def take(self, names: list[str] | None, unfinished: list[str] | None = None) -> dict[str, Taken]:
        """Hands over records, once.

        Args:
            names: internal or external request ids; None for all but ``unfinished``.
            unfinished: internal ids of requests still running, left alone.

        Returns:
            Internal request id to the bytes of the record, of the rollout's log-probabilities (float32), and of its
            :class:`SamplingMask`.
        """
        self._settle(self._finished if names is None else self._matching(names))
        running, held = set(unfinished or ()), set(self._buffer.names())
        if names is None:
            names = [*held, *self._store.live]
        taken = {}
        for name in self._matching(names):
            if name in running or (name in self._dropped and name not in held):
                continue
            if name in held:
                finished = self._buffer.take(name)
            else:
                # The scheduler tells of the end only with the next step; the record must not come a second time.
                self._dropped.add(name)
                self._perturber.drain(until=self._perturber.noted)
                finished = self._extract(name)
            taken[name] = finished.record.to_bytes(), finished.log_probs.tobytes(), finished.sampling_mask
        return taken

    def drop(self, names: list[str]) -> None:
        """Forgets the records of aborted requests; names as in :meth:`take`.

        The samples of one request go together: vLLM calls them ``0_<its internal id>``, ``1_...``.
        """
        parents = {name.partition("_")[2] for name in names} - {""}
        samples = (name for name in self._here() if name.partition("_")[2] in parents)
        matching = {*self._matching(names), *samples}
        self._buffer.drop(matching)
        self._dropped.update(name for name in matching if name in self._store.live)


def external_id(name: str) -> str:
    """The request id that the caller knows: vLLM appends '-' and eight characters to it inside the engine."""
    stem, _, suffix = name.rpartition("-")
    return stem if len(suffix) == 8 and stem else name
