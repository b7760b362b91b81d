"""Requests of a worker: seeds, slots, and the records of finished ones."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import numpy as np

from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.settings import KEY
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations.base import Perturbation
from perturbations.replay import ReplayRecord
from perturbations.streams import trajectory_seed

# The record, the log-probabilities, and the tokens that sampling left, empty where these are not recorded.
Taken = tuple[bytes, bytes, bytes]

logger = logging.getLogger("ngrpo.rollout")
# Records that nobody takes (vllm serve, say) must not fill the memory; no training step is this large.
_KEPT = 1 << 16


class RequestBook:
    """Follows vLLM's scheduler: opens a slot for a new request, keeps the record of a finished one."""

    def __init__(self, operator: Perturbation, store: TrajectoryStore, perturber: RolloutPerturber) -> None:
        self._operator, self._store, self._perturber = operator, store, perturber
        self._finished: dict[str, Taken] = {}
        self._dropped: set[str] = set()
        self._seen: Counter[int] = Counter()

    @property
    def running(self) -> int:
        """Requests alive: those not told of as finished, except where their record has been handed over."""
        return sum(name not in self._dropped for name in self._store.live)

    def update(self, scheduler_output: Any) -> None:
        """Takes in one ``SchedulerOutput`` of vLLM, before the step runs."""
        if scheduler_output.finished_req_ids:
            self._perturber.drain(wait=True)
            for name in scheduler_output.finished_req_ids:
                self._finish(name)
        for new in scheduler_output.scheduled_new_reqs:
            self._open(new)

    def _open(self, new: Any) -> None:
        if new.req_id in self._store.live:
            return
        params, prompt = new.sampling_params, new.prompt_token_ids
        wish = (getattr(params, "extra_args", None) or {}).get(KEY) or {}
        earlier = ReplayRecord.from_bytes(wish["record"]) if wish.get("record") else None
        # A further turn goes on with its trajectory's seed, so that one record covers all turns.
        seed = earlier.seed if earlier is not None else self._seed(wish, params, prompt)
        perturbed = bool(wish.get("enabled", True))
        trajectory = self._store.open(new.req_id, seed, len(prompt), perturbed)
        if earlier is not None:
            self._store.load(trajectory, earlier)
        self._perturber.opened(new.req_id)

    def _seed(self, wish: dict[str, Any], params: Any, prompt: list[int]) -> int:
        """The trajectory's seed.

        Given with the request, or else derived from the engine's seed, the prompt, and how many times this prompt
        has been asked: so a run repeats, and the members of a group differ.
        """
        given = wish.get("seed", getattr(params, "seed", None))
        if given is not None:
            return trajectory_seed(self._operator.seed, int(given), int(wish.get("sample", 0)))
        tokens = np.asarray(prompt, dtype=np.int64).tobytes()
        asked = trajectory_seed(tokens)
        self._seen[asked] += 1
        return trajectory_seed(self._operator.seed, asked, self._seen[asked])

    def _finish(self, name: str) -> None:
        trajectory = self._store.live.get(name)
        if trajectory is None:
            return
        if name in self._dropped:
            self._dropped.discard(name)
        else:
            if len(self._finished) == _KEPT:
                logger.warning("ngrpo: %d records were never taken; the oldest are dropped from now on.", _KEPT)
            while len(self._finished) >= _KEPT:
                del self._finished[next(iter(self._finished))]
            self._finished[name] = self._extract(name)
        self._store.close(name)
        self._perturber.closed(trajectory.slot)

    def _extract(self, name: str) -> Taken:
        self._perturber.drain(wait=True)
        record, log_probs = self._store.record(name)
        mask = self._perturber.sampling_mask(self._store.live[name].slot)
        return record.to_bytes(), log_probs.tobytes(), b"" if mask is None else mask.to_bytes()

    def take(self, names: list[str] | None, unfinished: list[str] | None = None) -> dict[str, Taken]:
        """Hands over records, once.

        Args:
            names: internal or external request ids; None for all but ``unfinished``.
            unfinished: internal ids of requests still running, left alone when ``names`` is None.

        Returns:
            Internal request id to the bytes of the record, of the rollout's log-probabilities (float32), and of its
            :class:`SamplingMask`.
        """
        running = set(unfinished or ())
        taken = {}
        for name in [*self._finished, *self._store.live]:
            if name in taken or name in self._dropped or name in running:
                continue
            if names is not None and name not in names and external_id(name) not in names:
                continue
            taken[name] = self._finished.pop(name) if name in self._finished else self._extract(name)
            if name in self._store.live:
                # The scheduler tells of the end only with the next step; the record must not come a second time.
                self._dropped.add(name)
        return taken

    def drop(self, names: list[str]) -> None:
        """Forgets the records of aborted requests; names as in :meth:`take`."""
        for name in [*self._finished, *self._store.live]:
            if name in names or external_id(name) in names:
                self._finished.pop(name, None)
                if name in self._store.live:
                    self._dropped.add(name)


def external_id(name: str) -> str:
    """The request id that the caller knows: vLLM appends '-' and eight characters to it inside the engine."""
    stem, _, suffix = name.rpartition("-")
    return stem if len(suffix) == 8 and stem else name
