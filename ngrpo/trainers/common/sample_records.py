# SPDX-License-Identifier: Apache-2.0
"""Records, as bytes, on their way from an asynchronous vLLM engine to a training batch, and the joining of turns."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ngrpo.machine.upstream.types import AsyncLLM
from ngrpo.rollout.records import cut_to_response, of_all_workers, taken_length
from ngrpo.rollout.requests import external_id
from perturbations import seeds
from perturbations.errors import require
from perturbations.replay import ReplayRecord, packing
from perturbations.replay.trajectory import FinishedTrajectory, UnperturbedResponse

_Entry = TypeVar("_Entry")


class EngineCheck:
    """An engine's check of its overrides, which requests wait for; ``again`` repeats it after each weight sync.

    It runs before the first request and not at the sync's end, when a hybrid engine's KV cache is asleep.
    """

    def __init__(self, llm: AsyncLLM, perturbed: bool, again: bool = False) -> None:
        self._llm = llm
        self._perturbed = perturbed
        self._again = again
        self._check: asyncio.Task[Any] | None = None

    def weights_synced(self) -> None:
        """Has the next request repeat the check, with ``again``: the engine has loaded new weights."""
        if self._again:
            self._check = None

    async def passed(self) -> None:
        """Waits until the engine has run the check; raises vLLM's error with the check's message.

        A busy engine only notes that the check is due, so this returns at once. The engine then runs the check before
        the next request that finds it idle.
        """
        if not self._perturbed:
            return
        if self._check is None:
            self._check = asyncio.create_task(self._llm.collective_rpc("perturbation_check"))
        # A request that is cancelled must not cancel the check, which other requests wait for.
        await asyncio.shield(self._check)


class PickUps:
    """Takes records from an engine in batches: requests during a call are served by the next call."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._calling: asyncio.Task[None] | None = None

    async def take(self, name: str) -> Any:
        """The worker's parts of a finished request, by the caller's id; RuntimeError if the buffer dropped them."""
        parts = asyncio.get_running_loop().create_future()
        self._waiting[name] = parts
        if self._calling is None or self._calling.done():
            self._calling = asyncio.create_task(self._call_until_empty())
        return await parts

    async def _call_until_empty(self) -> None:
        while self._waiting:
            pending = self._waiting
            self._waiting = {}
            results = await self._results(list(pending))
            for name, parts in pending.items():
                if parts.done():  # its caller was cancelled meanwhile
                    continue
                result = results[name]
                if isinstance(result, Exception):
                    parts.set_exception(result)
                else:
                    parts.set_result(result)

    async def _results(self, names: list[str]) -> dict[str, Any]:
        """The parts of each request, or the error that its caller gets."""
        try:
            records_by_id = of_all_workers(await self._llm.collective_rpc("perturbation_take", args=(names, None)))
            results: dict[str, Any] = {}
            for internal_name, parts in records_by_id.items():
                # The front end keeps a response's length until its record is taken; our callers have the response.
                taken_length(self._llm.output_processor, internal_name)
                results[external_id(internal_name)] = parts
        except Exception as error:
            return dict.fromkeys(names, error)
        for name in names:
            if name not in results:
                results[name] = RuntimeError(
                    f"the record of request {name} is gone: the replay buffer dropped it. Raise its max_bytes."
                )
        return results


class Conversation:
    """The record of one trajectory of OpenRLHF: a further turn replays the perturbed inputs of earlier turns.

    An edit belongs to the tokens before it. If an agent or a chat template changes them, the recorded part from the
    first changed token on is dropped and counted: an old edit must not be put on another token.

    Attributes:
        arguments: of its requests, for the engine.
        sampling: the run's parameters of drawing tokens, by vLLM's names, which its requests must have.
        needs_control: whether an unperturbed response is still to be requested.
        trajectory: of all turns; None before the first.
        repeats: how often the latest request's prompt was requested before it.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        sampling: Mapping[str, Any] | None = None,
        needs_control: bool = False,
        redrawn: bool = False,
    ) -> None:
        """``redrawn``: whether the trainer draws the noise of its turns again, as a density does."""
        self.arguments = arguments
        self.sampling = sampling or {}
        self.needs_control = needs_control
        self.trajectory: FinishedTrajectory | None = None
        self.repeats = 0
        self._redrawn = redrawn
        self._control: UnperturbedResponse | None = None
        self._tokens = np.zeros(0, dtype=np.int64)
        self._requests: Counter[bytes] = Counter()

    def claim_control(self) -> bool:
        """Whether the caller is the one to request the control: True once, if :attr:`needs_control`."""
        claimed = self.needs_control
        self.needs_control = False
        return claimed

    def add_control(self, control: UnperturbedResponse) -> None:
        """Adds the unperturbed response, which leaves with the trajectory."""
        self._control = control

    def drop_changed(self, tokens: Sequence[int]) -> None:
        """Drops the record from the first token on that another one replaces in ``tokens``.

        ``tokens``: the next turn's prompt, or the whole conversation.
        """
        if self.trajectory is None:
            return
        before = self.trajectory
        now = np.asarray(tokens, dtype=np.int64)
        shorter = min(len(now), len(self._tokens))
        changed = np.flatnonzero(now[:shorter] != self._tokens[:shorter])
        unchanged = int(changed[0]) if len(changed) else shorter
        if unchanged < len(self._tokens):
            kept = before.truncate(unchanged)
            dropped_edits = len(before.record) - len(kept.record)
            self._tokens = self._tokens[:unchanged]
            self.trajectory = replace(kept, dropped=kept.dropped + dropped_edits)

    def begin_request(self, prompt: Sequence[int]) -> ReplayRecord | None:
        """Counts a request, and returns the earlier turns' record for its arguments; None before the first turn.

        Call it once for each request, after :meth:`drop_changed` with its prompt. It sets :attr:`repeats`, and gives a
        repeated prompt another seed, so that it has its own draws. The record keeps its seed where the replay draws
        noise of earlier turns again from that seed.
        """
        key = np.asarray(prompt, dtype=np.int64).tobytes()
        self.repeats = self._requests[key]
        self._requests[key] += 1
        if self.trajectory is None:
            return None
        record = self.trajectory.record
        draws_noise_again = len(record) and (self._redrawn or record.sigma is not None)
        if self.repeats and not draws_noise_again:
            return replace(record, seed=seeds.trajectory_seed(record.seed, self.repeats))
        return record

    def add(self, parts: Mapping[str, bytes], prompt: Sequence[int], tokens: Sequence[int], cached: int = 0) -> None:
        """Adds a turn, after :meth:`drop_changed` with its prompt; ``cached``: its tokens from the prefix cache."""
        turn = cut_to_response(FinishedTrajectory.unpack(parts), len(tokens))
        before = self.trajectory
        start = len(prompt)
        log_probs = np.full(start + len(tokens), np.nan, dtype=np.float32)
        log_probs[start:] = turn.log_probs
        sampling_mask = turn.sampling_mask
        experts = turn.experts
        dropped = 0
        prompted = start
        if before is not None:
            dropped = before.dropped
            prompted += before.prompted
            cached += before.cached
            log_probs[: len(before.log_probs)] = before.log_probs
            if sampling_mask is not None:
                earlier_mask = require(before.sampling_mask, "the mask of earlier turns")
                sampling_mask = earlier_mask.joined(sampling_mask, turn=start)
            if experts is not None:  # a token of an earlier turn keeps the experts of its next token's draw
                kept = require(before.experts, "the experts of earlier turns")
                experts = np.concatenate([kept, experts[len(kept) :]])
        self.trajectory = FinishedTrajectory(
            record=turn.record,
            log_probs=log_probs,
            sampling_mask=sampling_mask,
            dropped=dropped,
            prompted=prompted,
            cached=cached,
            experts=experts,
        )
        self._tokens = np.asarray([*prompt, *tokens], dtype=np.int64)

    def finished(self, tokens: Sequence[int]) -> FinishedTrajectory:
        """The whole trajectory, fitted to the conversation's final tokens."""
        self.drop_changed(tokens)
        return replace(require(self.trajectory, "the trajectory"), unperturbed=self._control)


# ---- in a sample of a training batch: its trajectory and its two rounds, a dictionary of bytes --------------------

SECOND_ROUND = "second_round"
REQUESTED_DRAWS = "requested_draws"
_VERSION = 1
OURS = {*packing.PARTS, SECOND_ROUND, REQUESTED_DRAWS}
"""Our entries of a sample's dictionary; the others are a multimodal model's."""


def unpack(side_inputs: Sequence[Any] | None) -> list[FinishedTrajectory | None]:
    """The trajectories of a batch, None for a sample without one; ValueError for bytes that were cut or altered.

    The list is empty where the batch has no side inputs at all.
    """
    trajectories: list[FinishedTrajectory | None] = []
    for entries in side_inputs or ():
        has_record = entries is not None and packing.RECORD in entries
        trajectories.append(FinishedTrajectory.unpack(entries) if has_record else None)
    return trajectories


def check_lengths(record: ReplayRecord, prompt: int, response: int, sample: str) -> None:
    """Raises ``RuntimeError`` where a replay record does not fit the tokens of a sample.

    The record's response may be longer than the sample's, whose end may have been cut off before the training.

    Args:
        record: of the rollout.
        prompt: the number of the sample's prompt tokens.
        response: the number of its response tokens.
        sample: the sample's name in the message.
    """
    generated = record.num_tokens - record.prompt_tokens
    if record.prompt_tokens != prompt or generated < response:
        raise RuntimeError(
            f"{sample} has {prompt} + {response} tokens of prompt and response, its record has {record.prompt_tokens} +"
            f" {generated}: tokens were added or cut in front between rollout and training."
        )


def part_of_each(trajectories: Sequence[FinishedTrajectory | None], batch: int, part: str, missing: str) -> list[Any]:
    """An attribute of each sample's trajectory; RuntimeError, with ``missing``, where one has none.

    Args:
        trajectories: as :func:`unpack` returns them.
        batch: the number of samples.
        part: the attribute's name.
        missing: what the error says after "N of B samples".
    """
    parts = [getattr(trajectory, part, None) for trajectory in trajectories or [None] * batch]
    without = [sample for sample, value in enumerate(parts) if value is None]
    if without or len(parts) != batch:
        count = len(without) or batch - len(parts)
        raise RuntimeError(f"{count} of {batch} samples {missing} The first: {without[:5]}.")
    return parts


def records(trajectories: Sequence[FinishedTrajectory | None], batch: int) -> list[ReplayRecord]:
    """The replay records of a training batch, in order; a sample without a perturbed position has an empty one.

    Raises:
        RuntimeError: if a sample has none.
    """
    return part_of_each(
        trajectories,
        batch,
        part="record",
        missing="have no replay record, so the model would be trained on inputs that the rollout did not see. Each"
        " sample of a perturbed run has its record in mm_train_inputs: a custom executor must hand on what generate()"
        " returns.",
    )


def routed(trajectories: Sequence[FinishedTrajectory | None], batch: int) -> list[np.ndarray]:
    """The experts of each sample of a batch, as in `FinishedTrajectory`; RuntimeError if a sample has none."""
    return part_of_each(
        trajectories,
        batch,
        part="experts",
        missing="came without their experts (--replay.routing): an agent drops mm_train_inputs from its response, or"
        " did not let generate() make it.",
    )


@dataclass(frozen=True)
class TwoRounds:
    """The two rounds of a sample's prompt.

    Attributes:
        rewards: of all responses, the first round's in front, (G + G',) float32.
        place: of this response among them.
        log_probs: log π_old of its tokens given the second round's prompt, (T,) float32; None for a response of the
            first round, and for a refinement, which is trained with its own prompt.
    """

    rewards: np.ndarray
    place: int
    log_probs: np.ndarray | None = None

    def pack(self) -> dict[str, bytes]:
        """As plain bytes with a checksum, like records."""
        parts = [
            packing.varint(len(self.rewards)),
            packing.floats(self.rewards),
            packing.varint(self.place),
            packing.varint(self.log_probs is not None),
        ]
        if self.log_probs is not None:
            parts.append(packing.floats(self.log_probs))
        return {SECOND_ROUND: packing.sealed(parts, _VERSION)}

    @classmethod
    def unpack(cls, data: bytes) -> "TwoRounds":
        """From the bytes of :meth:`pack`; ValueError for bytes that were cut or altered."""
        reader = packing.unsealed(data, _VERSION, "a sample's two rounds")
        rewards = reader.floats(reader.varint())
        place = reader.varint()
        has_log_probs = reader.varint()
        return cls(rewards, place, log_probs=reader.all_floats() if has_log_probs else None)


def two_rounds(side_inputs: Sequence[Any] | None, batch: int) -> list[TwoRounds | None]:
    """The two rounds of each sample of a batch, None if the first was enough."""
    return _entry_of_each(side_inputs, batch, SECOND_ROUND, TwoRounds.unpack)


@dataclass(frozen=True)
class RequestedDraws:
    """What a sampling schedule goes by in a request, besides its tokens; names as in `NextTokens`."""

    temperature: float
    training_step: int
    answer: int = 0
    answers: int = 1

    def pack(self) -> dict[str, bytes]:
        """As plain bytes with a checksum, like records."""
        numbers = np.array([self.training_step, self.answer, self.answers])
        parts = [packing.varints(numbers), packing.floats(np.array([self.temperature]))]
        return {REQUESTED_DRAWS: packing.sealed(parts, _VERSION)}

    @classmethod
    def unpack(cls, data: bytes) -> "RequestedDraws":
        """From the bytes of :meth:`pack`; ValueError for bytes that were cut or altered."""
        reader = packing.unsealed(data, _VERSION, "a sample's requested draws")
        training_step, answer, answers = reader.varints(3).tolist()
        (temperature,) = reader.all_floats().tolist()
        return cls(temperature, training_step, answer, answers)


def requested_draws(side_inputs: Sequence[Any] | None, batch: int) -> list[RequestedDraws | None]:
    """What the schedule of each sample of a batch goes by, None where its request was not recorded."""
    return _entry_of_each(side_inputs, batch, REQUESTED_DRAWS, RequestedDraws.unpack)


def _entry_of_each(
    side_inputs: Sequence[Any] | None, batch: int, name: str, unpacked: Callable[[bytes], _Entry]
) -> list[_Entry | None]:
    """One entry of each sample's dictionary, unpacked; None for a sample without it."""
    entry_by_sample: list[_Entry | None] = []
    for entries in side_inputs or [None] * batch:
        data = (entries or {}).get(name)
        entry_by_sample.append(None if data is None else unpacked(data))
    return entry_by_sample
