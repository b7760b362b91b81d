# SPDX-License-Identifier: Apache-2.0
"""Records on their way from an asynchronous vLLM engine with joined turns to a training batch, as bytes."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ngrpo.machine.upstream.types import AsyncLLM
from ngrpo.rollout.records import cut_to_response, of_all_workers, taken_length
from ngrpo.rollout.requests import external_id
from perturbations import seeds
from perturbations.errors import require
from perturbations.replay import ReplayRecord, packing
from perturbations.replay.trajectory import FinishedTrajectory, UnperturbedAnswer


class EngineCheck:
    """An engine's check of its overrides, which requests wait for; ``again`` repeats it after each weight sync.

    Before the first request and not at the sync's end, when a hybrid engine's KV cache is asleep.
    """

    def __init__(self, llm: AsyncLLM, perturbed: bool, again: bool = False) -> None:
        self._llm, self._perturbed, self._again = llm, perturbed, again
        self._asked: asyncio.Task[Any] | None = None

    def weights_synced(self) -> None:
        """New weights are loaded."""
        if self._again:
            self._asked = None

    async def passed(self) -> None:
        """Returns once the check has passed, or waits in a busy engine; raises vLLM's error with its message."""
        if self._perturbed:
            if self._asked is None:
                self._asked = asyncio.create_task(self._llm.collective_rpc("perturbation_check"))
            await asyncio.shield(self._asked)


class PickUps:
    """Takes records from an engine in batches: requests during a call are served by the next call."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._asked: dict[str, asyncio.Future[Any]] = {}
        self._calling: asyncio.Task[None] | None = None

    async def take(self, name: str) -> Any:
        """The worker's parts of a finished request, by the caller's id; RuntimeError if the buffer dropped them."""
        self._asked[name] = asyncio.get_running_loop().create_future()
        answer = self._asked[name]
        if self._calling is None or self._calling.done():
            self._calling = asyncio.create_task(self._call())
        return await answer

    async def _call(self) -> None:
        while self._asked:
            pending, self._asked = self._asked, {}
            results: dict[str, Any] = {}
            try:
                taken = of_all_workers(await self._llm.collective_rpc("perturbation_take", args=(list(pending), None)))
                for name, parts in taken.items():
                    # The front end keeps a response's length until its record is taken; our callers have the response.
                    taken_length(self._llm.output_processor, name)
                    results[external_id(name)] = parts
            except Exception as error:
                results = dict.fromkeys(pending, error)
            for name, answer in pending.items():
                if answer.done():  # its caller was cancelled meanwhile
                    continue
                gone = f"the record of request {name} is gone: the replay buffer dropped it. Raise its max_bytes."
                result = results.get(name, RuntimeError(gone))
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)


class Conversation:
    """The record of one trajectory of OpenRLHF: a further turn replays the perturbed inputs of earlier turns.

    An edit belongs to the tokens before it. If an agent or a chat template changes them, the recorded part from the
    first changed token on is dropped and counted: an old edit must not be put on another token.

    Attributes:
        arguments: of its requests, for the engine.
        trajectory: of all turns; None before the first.
        followed: whether an unperturbed response is still to be requested.
        sampling: the run's parameters of drawing tokens, by vLLM's names, which its requests must have.
        redrawn: whether the trainer draws the noise of its turns again, as a density does.
        again: how often the latest request's prompt was asked before it.
    """

    def __init__(self, arguments: Mapping[str, Any], followed: bool = False) -> None:
        self.arguments, self.followed = arguments, followed
        self.unperturbed: UnperturbedAnswer | None = None
        self.sampling: Mapping[str, Any] = {}
        self.redrawn, self.again = False, 0
        self.trajectory: FinishedTrajectory | None = None
        self._tokens = np.zeros(0, dtype=np.int64)
        self._asked: Counter[bytes] = Counter()

    def go_on(self, tokens: Sequence[int]) -> None:
        """Keeps the record of tokens that are still there, in the next turn's prompt or in the whole conversation."""
        if self.trajectory is None:
            return
        now, before = np.asarray(tokens, dtype=np.int64), self.trajectory
        both = min(len(now), len(self._tokens))
        changed = np.flatnonzero(now[:both] != self._tokens[:both])
        length = int(changed[0]) if len(changed) else both
        if length < len(self._tokens):
            self._tokens, kept = self._tokens[:length], before.truncate(length)
            self.trajectory = replace(kept, dropped=kept.dropped + len(before.record) - len(kept.record))

    def earlier(self, prompt: Sequence[int]) -> ReplayRecord | None:
        """The record for a request's arguments, after :meth:`go_on` with its prompt.

        A repeated prompt has its own draws. (Not if noise of earlier turns is drawn again: its seed is the record's.)
        """
        key = np.asarray(prompt, dtype=np.int64).tobytes()
        self.again = self._asked[key]
        self._asked[key] += 1
        if self.trajectory is None:
            return None
        record = self.trajectory.record
        if self.again and not (len(record) and (self.redrawn or record.sigma is not None)):
            return replace(record, seed=seeds.trajectory_seed(record.seed, self.again))
        return record

    def add(self, parts: Mapping[str, bytes], prompt: Sequence[int], tokens: Sequence[int], cached: int = 0) -> None:
        """Adds a turn, after :meth:`go_on` with its prompt; ``cached`` prompt tokens were in the prefix cache."""
        turn = cut_to_response(FinishedTrajectory.unpack(parts), len(tokens))
        start, mask, before = len(prompt), turn.sampling_mask, self.trajectory
        log_probs = np.full(start + len(tokens), np.nan, dtype=np.float32)
        log_probs[start:] = turn.log_probs
        dropped, prompted, experts = 0, start, turn.experts
        if before is not None:
            dropped, prompted, cached = before.dropped, prompted + before.prompted, cached + before.cached
            log_probs[: len(before.log_probs)] = before.log_probs
            if mask is not None:
                mask = require(before.sampling_mask, "the mask of earlier turns").joined(mask, turn=start)
            if experts is not None:  # a token of an earlier turn keeps the experts of its next token's draw
                kept = require(before.experts, "the experts of earlier turns")
                experts = np.concatenate([kept, experts[len(kept) :]])
        counts = dropped, prompted, cached
        self.trajectory = FinishedTrajectory(turn.record, log_probs, mask, *counts, experts=experts)
        self._tokens = np.asarray([*prompt, *tokens], dtype=np.int64)

    def finished(self, tokens: Sequence[int]) -> FinishedTrajectory:
        """The whole trajectory, fitted to the conversation's final tokens."""
        self.go_on(tokens)
        return replace(require(self.trajectory, "the trajectory"), unperturbed=self.unperturbed)


# ---- in a sample of a training batch: its trajectory and its two rounds, a dictionary of bytes --------------------

SECOND_ROUND = "second_round"
_VERSION = 1
OURS = {*packing.PARTS, SECOND_ROUND}
"""Our entries of a sample's dictionary; the others are a multimodal model's."""


def unpack(side_inputs: Sequence[Any] | None) -> list[FinishedTrajectory | None]:
    """The trajectories of a batch, None for a sample without one; ValueError for bytes that were cut or altered."""
    return [FinishedTrajectory.unpack(each) if packing.RECORD in (each or ()) else None for each in side_inputs or ()]


def part_of_each(side_inputs: Sequence[Any] | None, batch: int, part: str, missing: str) -> list[Any]:
    """A part of each sample's `FinishedTrajectory`; RuntimeError, with ``missing``, where one has none."""
    parts = [getattr(trajectory, part, None) for trajectory in unpack(side_inputs) or [None] * batch]
    without = [i for i, each in enumerate(parts) if each is None]
    if without or len(parts) != batch:
        count = len(without) or batch - len(parts)
        raise RuntimeError(f"{count} of {batch} samples {missing} The first: {without[:5]}.")
    return parts


def records(side_inputs: Sequence[Any] | None, batch: int) -> list[ReplayRecord]:
    """The replay records of a training batch, in order; a sample without a perturbed position has an empty one.

    Raises:
        RuntimeError: if a sample has none.
    """
    missing = (
        "have no replay record, so the model would be trained on inputs that the rollout did not see. Each sample of a"
        " perturbed run has its record in mm_train_inputs: a custom executor must hand on what generate() returns."
    )
    return part_of_each(side_inputs, batch, "record", missing)


def routed(side_inputs: Sequence[Any] | None, batch: int) -> list[np.ndarray]:
    """The experts of each sample of a batch, as of `FinishedTrajectory`."""
    cause = "an agent drops mm_train_inputs from its response, or did not let generate() make it"
    return part_of_each(side_inputs, batch, "experts", f"came without their experts (--replay.routing): {cause}.")


@dataclass(frozen=True)
class TwoRounds:
    """The two rounds of a sample's prompt: rewards of all responses, the first round's in front, (G + G',) float32.

    ``place`` is this response's among them; ``log_probs`` is log π_old of its tokens given its round's prompt, (T,)
    float32, and None in the first round with its prompt from the data.
    """

    rewards: np.ndarray
    place: int
    log_probs: np.ndarray | None = None

    def pack(self) -> dict[str, bytes]:
        """As plain bytes with a checksum, like records."""
        parts = [packing.varint(len(self.rewards)), packing.floats(self.rewards), packing.varint(self.place)]
        parts.append(packing.varint(self.log_probs is not None))
        if self.log_probs is not None:
            parts.append(packing.floats(self.log_probs))
        return {SECOND_ROUND: packing.sealed(parts, _VERSION)}


def two_rounds(side_inputs: Sequence[Any] | None, batch: int) -> list[TwoRounds | None]:
    """The two rounds of each sample of a batch, None if the first was enough."""
    found: list[TwoRounds | None] = []
    for entry in side_inputs or [None] * batch:
        data = (entry or {}).get(SECOND_ROUND)
        if data is None:
            found.append(None)
            continue
        reader = packing.unsealed(data, _VERSION, "a sample's two rounds")
        rewards, place = reader.floats(reader.varint()), reader.varint()
        found.append(TwoRounds(rewards, place, reader.all_floats() if reader.varint() else None))
    return found
