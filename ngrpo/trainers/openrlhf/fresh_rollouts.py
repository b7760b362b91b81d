# SPDX-License-Identifier: Apache-2.0
"""Weight versions of OpenRLHF's samples, and ``--sampling.max_staleness``: its asynchronous queue without older ones.

All responses to a prompt are drawn in one call of the engine, between two weight syncs, so a group has one version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ngrpo.machine.upstream.types import Experience
from ngrpo.trainers.common import staleness

if TYPE_CHECKING:
    from ray.util.queue import Queue

VERSION = "ngrpo_weight_version"
"""The entry of a response's ``extra_logs``, which OpenRLHF copies into its sample's ``info``."""


def with_version(response: dict[str, Any], version: int) -> dict[str, Any]:
    """The response of OpenRLHF's executor with the version of the weights that it was drawn with."""
    return {**response, "extra_logs": {**(response.get("extra_logs") or {}), VERSION: version}}


def versions_of(samples: Sequence[Experience]) -> list[int]:
    """The version of each sample of a rollout, which OpenRLHF makes of one response each.

    Raises:
        RuntimeError: for a sample without one.
    """
    versions = []
    for sample in samples:
        if VERSION not in sample.info:
            raise RuntimeError(
                "a response came without the version of the weights that it was drawn with: it was not drawn by"
                " RolloutRayActor.generate_responses."
            )
        versions.append(int(sample.info[VERSION].item()))
    return versions


def take_versions(samples: Sequence[Experience]) -> list[int]:
    """As :func:`versions_of`; the samples lose their version, since OpenRLHF logs what is in ``info``."""
    versions = versions_of(samples)
    for sample in samples:
        del sample.info[VERSION]
    return versions


class RolloutQueue(Protocol):
    """What the trainer takes rollouts from: Ray's queue."""

    def get(self, block: bool = True) -> Any:
        """The next entry; with ``block`` it waits for one."""


class WaitingResponses:
    """Responses that wait until they fill a batch, as a checkpoint has them."""

    def __init__(self, samples: Sequence[Experience], trainer_version: int) -> None:
        """``trainer_version``: of the weights that the checkpoint has, by the count of the run that saves it."""
        self._samples = samples
        self._trainer_version = trainer_version

    def __repr__(self) -> str:
        """A short text, since OpenRLHF prints what a checkpoint holds."""
        return f"{len(self._samples)} responses that wait"

    def at(self, trainer_version: int) -> list[Experience]:
        """The responses as of equal age in a resumed run, which counts its weight syncs from 0 on."""
        for sample in self._samples:
            sample.info[VERSION] += trainer_version - self._trainer_version
        return list(self._samples)


class FreshRollouts(RolloutQueue):
    """OpenRLHF's queue of rollouts, from which the trainer takes batches without responses that are too old.

    A response is too old if it is older than ``max_staleness`` when its batch is to be trained. Whole groups are left
    out, since a group has one version. The other groups wait until they fill a batch, so every step has as many
    responses as without the limit: ranks and ``--train.batch_size`` divide it as before.

    Attributes:
        left_out: responses that were left out since :meth:`take_left_out`.
    """

    def __init__(
        self,
        queue: RolloutQueue,
        slots: Queue,
        *,
        max_staleness: int,
        batch: int,
        trainer_version: Callable[[], int],
        step: Callable[[], int],
        waiting: WaitingResponses | None = None,
    ) -> None:
        """
        Args:
            queue: of rollouts, and of the word ``done`` at the end.
            slots: the queue of tokens, one for each batch that the generator may draw ahead.
            max_staleness: the greatest age of a response that is trained, in weight syncs.
            batch: responses of a step.
            trainer_version: the number of syncs that the trainer has made.
            step: the trainer's next step, which OpenRLHF's tokens carry.
            waiting: of a checkpoint that the run resumes.
        """
        self._queue = queue
        self._slots = slots
        self._max_staleness = max_staleness
        self._batch = batch
        self._trainer_version = trainer_version
        self._step = step
        self._waiting: list[Experience] = [] if waiting is None else waiting.at(trainer_version())
        self.left_out = 0

    def get(self, block: bool = True) -> Any:
        """The next entry of the queue; a rollout has fresh responses only."""
        generation_seconds = 0.0
        while True:
            entry = self._queue.get(block=block)
            if entry == "done" and self._waiting:
                print(
                    f"ngrpo: warning: the last {len(self._waiting)} responses are not trained: without the ones that"
                    " --sampling.max_staleness left out they fill no batch.",
                    flush=True,
                )
            if entry == "done":
                return entry
            samples, states, filter_pass_rate, seconds = entry
            generation_seconds += seconds
            had_waited = bool(self._waiting)
            fresh = self._fresh([*self._waiting, *samples])
            # A rollout may be smaller than a batch, such as the last of an episode. If nothing waits for it and nothing
            # of it is too old, it is trained as without the limit.
            is_unchanged = not had_waited and len(fresh) == len(samples)
            if is_unchanged or len(fresh) >= self._batch:
                self._waiting = fresh[self._batch :]
                return fresh[: self._batch], states, filter_pass_rate, generation_seconds
            self._waiting = fresh
            # The trainer returns a token for each batch that it gets. It does not get this one, so its token is
            # returned here.
            self._slots.put(self._step(), block=True)

    def _fresh(self, samples: list[Experience]) -> list[Experience]:
        """The samples that are not too old, in their order; the others are counted."""
        ages = staleness.ages(versions_of(samples), self._trainer_version())
        fresh = [sample for sample, age in zip(samples, ages) if age <= self._max_staleness]
        self.left_out += len(samples) - len(fresh)
        return fresh

    def waiting(self) -> WaitingResponses | None:
        """The responses that wait, for a checkpoint; None where there are none."""
        return WaitingResponses(self._waiting, self._trainer_version()) if self._waiting else None

    def take_left_out(self) -> int:
        """The number of responses that were left out since the last call."""
        left_out = self.left_out
        self.left_out = 0
        return left_out
