# SPDX-License-Identifier: Apache-2.0
"""The worker's memory of live trajectories: what was fed to each, and how likely its tokens were."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ngrpo.rollout.chunks import Chunks, grown, ranges
from perturbations.replay.trajectory import ReplayRecord, model_fingerprint

# Slots for preempted requests, which stay alive beside a full batch. The store makes more when these run out.
_SPARE = 8


@dataclass(frozen=True)
class DrawnStep:
    """What a step drew for N trajectories, and the edits of M of them.

    Attributes:
        slots: of the trajectories, all different, (N,) int64.
        positions: of the tokens, (N,) int64.
        log_probs: log π of the tokens, (N,) float32.
        edited_slots: slots of the edited trajectories, (M,) int64.
        edited_positions: positions of their edits, (M,) int64.
        edits: the fields of the edits by name, M rows each; empty for M = 0.
    """

    slots: np.ndarray
    positions: np.ndarray
    log_probs: np.ndarray
    edited_slots: np.ndarray
    edited_positions: np.ndarray
    edits: dict[str, np.ndarray]


def _earlier_occurrences(values: np.ndarray) -> np.ndarray:
    """How often each of N values came before: [7, 8, 7, 7] gives [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    in_order = values[order]
    is_first = np.concatenate([[True], in_order[1:] != in_order[:-1]])
    starts = np.flatnonzero(is_first)
    counts = np.diff(np.append(starts, len(values)))
    earlier = np.empty_like(order)
    earlier[order] = ranges(np.zeros_like(starts), counts)
    return earlier


class TrajectoryStore:
    """Slots of live trajectories, written by whole batches.

    The arrays have a row for each slot; what is in the row of a slot without a trajectory means nothing.

    Attributes:
        max_model_len: positions of the longest trajectory.
        slots: number S of slots.
        live: slots by request.
        seeds: of the trajectories, (S,) int64.
        prompt_lengths: in tokens, hence the positions of the first generated tokens, (S,) int64.
        training_steps: for the sampling schedule, which leaves a request with -1 out, (S,) int64.
        numbers_and_counts: of each response among those to its prompt, from 0, and how many these are, (S, 2) int64.
        perturbed: whether the request may be perturbed, (S,) bool.
        has_edits: whether the trajectory may have edits in the store or on their way to it, (S,) bool.
        ahead: whether a record is replayed on generated positions too, (S,) bool.
    """

    def __init__(
        self, slots: int, max_model_len: int, embedding: tuple[int, int] | None = None, module: bool = False
    ) -> None:
        """
        Args:
            slots: trajectories alive at once; more are made when needed.
            max_model_len: positions of the longest trajectory.
            embedding: (V, D), which identifies the model in records; None for a model that is not known.
            module: whether inputs pass the perturbation's learned module.
        """
        self.max_model_len = max_model_len
        self.slots = slots + _SPARE
        self._embedding = embedding
        self._model = 0 if embedding is None else model_fingerprint(*embedding, module)
        self.live: dict[str, int] = {}
        self.seeds = np.zeros(self.slots, dtype=np.int64)
        self.prompt_lengths = np.zeros(self.slots, dtype=np.int64)
        self.training_steps = np.zeros(self.slots, dtype=np.int64)
        self.numbers_and_counts = np.zeros((self.slots, 2), dtype=np.int64)
        self.perturbed = np.zeros(self.slots, dtype=bool)
        self.has_edits = np.zeros(self.slots, dtype=bool)
        self.ahead = np.zeros(self.slots, dtype=bool)
        self._free = list(reversed(range(self.slots)))
        self._edits = Chunks(self.slots)
        self._tokens = Chunks(self.slots)

    def open(
        self,
        request_id: str,
        seed: int,
        prompt_tokens: int,
        perturbed: bool,
        training_step: int = 0,
        response_number: int = 0,
        response_count: int = 1,
    ) -> int:
        """Gives a new request a clean slot.

        Args:
            request_id: vLLM's internal id.
            seed: of the trajectory.
            prompt_tokens: length of the prompt.
            perturbed: whether the request may be perturbed.
            training_step: for the sampling schedule; below 0 the request is left out.
            response_number: of this response among those to its prompt, from 0.
            response_count: how many responses the prompt gets.
        """
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.seeds[slot] = seed
        self.prompt_lengths[slot] = prompt_tokens
        self.training_steps[slot] = training_step
        self.numbers_and_counts[slot] = (response_number, response_count)
        self.perturbed[slot] = perturbed
        self.has_edits[slot] = False
        self.ahead[slot] = False
        self.live[request_id] = slot
        return slot

    def _grow(self) -> None:
        """Doubles the number of slots."""
        self._free.extend(reversed(range(self.slots, 2 * self.slots)))
        self.slots *= 2
        self.seeds = grown(self.seeds, self.slots)
        self.prompt_lengths = grown(self.prompt_lengths, self.slots)
        self.training_steps = grown(self.training_steps, self.slots)
        self.numbers_and_counts = grown(self.numbers_and_counts, self.slots)
        self.perturbed = grown(self.perturbed, self.slots)
        self.has_edits = grown(self.has_edits, self.slots)
        self.ahead = grown(self.ahead, self.slots)
        self._edits.grow(self.slots)
        self._tokens.grow(self.slots)

    def write_steps(self, steps: Sequence[DrawnStep]) -> None:
        """Writes steps of which each continues the last one: a slot's positions rise by 1 from step to step."""
        # One step needs no joined copies.
        if len(steps) == 1:
            step = steps[0]
            self.write_tokens(step.slots, step.positions, step.log_probs)
            if len(step.edited_slots):
                self.write_edits(step.edited_slots, step.edited_positions, step.edits)
            return
        self.write_tokens(
            np.concatenate([step.slots for step in steps]),
            np.concatenate([step.positions for step in steps]),
            np.concatenate([step.log_probs for step in steps]),
        )
        with_edits = [step for step in steps if len(step.edited_slots)]
        if with_edits:
            fields: dict[str, np.ndarray] = {}
            for name in with_edits[0].edits:
                fields[name] = np.concatenate([step.edits[name] for step in with_edits])
            self.write_edits(
                np.concatenate([step.edited_slots for step in with_edits]),
                np.concatenate([step.edited_positions for step in with_edits]),
                fields,
            )

    def write_tokens(self, slots: np.ndarray, positions: np.ndarray, log_probs: np.ndarray) -> None:
        """Writes N generated tokens, ascending within a slot; a position drawn again replaces all after it."""
        indices = positions - self.prompt_lengths[slots]
        drawn_again = indices < self._tokens.counts[slots]
        if drawn_again.any():
            for row in drawn_again.nonzero()[0]:
                slot = slots[row]
                # Edits at this position and later ones belong to tokens that are replaced.
                self._edits.counts[slot] = self._edits.find(slot, "positions", positions[row])
        self._tokens.write(slots, indices, {"log_probs": log_probs})

    def write_edits(self, slots: np.ndarray, positions: np.ndarray, fields: dict[str, np.ndarray]) -> None:
        """Writes N edits, ascending within a slot, each after the last one of its slot."""
        indices = self._edits.counts[slots] + _earlier_occurrences(slots)
        self._edits.write(slots, indices, {"positions": positions.astype(np.int32), **fields})

    def load(self, slot: int, record: ReplayRecord, ahead: bool = False) -> None:
        """Has the record of earlier turns replayed on a new request's prompt; ValueError for one of another model.

        ``ahead``: for the start-up check. The record is replayed on generated positions too, and its rows are mixed
        without the perturbation's learned module.
        """
        if self._embedding is not None:
            record.check_model(*self._embedding)
        earlier = record if ahead else record.truncate(int(self.prompt_lengths[slot]))
        self.ahead[slot] = ahead
        if len(earlier):
            fields = {name: values for name, values in vars(earlier).items() if isinstance(values, np.ndarray)}
            indices = np.arange(len(earlier))
            self._edits.write(np.full_like(indices, slot), indices, fields)
        self.has_edits[slot] = len(earlier) > 0

    def edits(self, slot: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """The edits of a slot at positions from ``start`` to before ``stop``, (N, …) by name; empty for none."""
        first = self._edits.find(slot, "positions", start)
        last = self._edits.find(slot, "positions", stop)
        return self._edits.read(slot, first, last)

    def record(self, request_id: str) -> tuple[ReplayRecord, np.ndarray]:
        """The record of a live request, and log π of each generated token, (generated,) float32."""
        slot = self.live[request_id]
        prompt_tokens = int(self.prompt_lengths[slot])
        log_probs = self._tokens.read(slot).get("log_probs", np.zeros(0, dtype=np.float32))
        edits = self._edits.read(slot) or _no_edits()
        fields: dict[str, Any] = {"sigma": None, **edits}
        record = ReplayRecord(
            seed=int(self.seeds[slot]),
            prompt_tokens=prompt_tokens,
            num_tokens=prompt_tokens + len(log_probs),
            model=self._model,
            **fields,
        )
        return record, log_probs

    def close(self, request_id: str) -> None:
        """Frees a request's slot."""
        slot = self.live.pop(request_id)
        self._edits.clear(slot)
        self._tokens.clear(slot)
        self._free.append(slot)


def _no_edits() -> dict[str, np.ndarray]:
    """The fields that every record has, of no edit."""
    return {
        "positions": np.zeros(0, dtype=np.int32),
        "ids": np.zeros((0, 1), dtype=np.int32),
        "weights": np.zeros((0, 1), dtype=np.float32),
        "agreed": np.zeros(0, dtype=bool),
    }
