"""The worker's memory of live trajectories: plans, realised edits and log-probabilities, by slot and position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from perturbations import streams
from perturbations.base import Perturbation
from perturbations.replay import ReplayRecord

# Spare slots for preempted requests, which stay alive beside a full batch; more are made when they run out.
_SPARE = 8
# Gate and token keys are planned so many positions ahead: few enough for a short answer, enough to be rare.
_CHUNK = 1024


@dataclass(frozen=True)
class Trajectory:
    """What does not change while a request lives."""

    slot: int
    seed: int
    prompt_tokens: int
    perturbed: bool


class TrajectoryStore:
    """Arrays of shape (slots, positions, …), written by whole batches.

    The arrays are allocated by the operating system page by page as they are touched, so their full size
    (``slots × max_model_len``) is reserved, not used. A dense operator's vectors are kept too, 4·D bytes for each
    perturbed position.
    """

    def __init__(self, slots: int, max_model_len: int, operator: Perturbation, hidden: int = 0) -> None:
        """
        Args:
            slots: trajectories alive at once; grows when needed.
            max_model_len: positions of a trajectory.
            operator: its gate is planned, its candidates are kept.
            hidden: D, needed for a dense operator.
        """
        self.length, self._operator = max_model_len, operator
        self._hidden = hidden if operator.dense else 0
        self._candidates, self._noisy = operator.candidates, operator.noisy
        self._totals = operator.keeps_total
        self._free: list[int] = []
        self.live: dict[str, Trajectory] = {}
        self._of_slot: dict[int, Trajectory] = {}
        self.slots = 0
        self._allocate(slots + _SPARE)

    def _allocate(self, slots: int) -> None:
        shapes = {
            "planned": ((), bool),
            "edited": ((), bool),
            "agreed": ((), bool),
            "log_probs": ((), np.float32),
            "token_keys": ((), np.int64),
            "ids": ((self._candidates,), np.int32),
            "weights": ((self._candidates,), np.float32),
            "sigma": ((), np.float32),
            "total": ((), np.float32),
            "vectors": ((self._hidden,), np.float32),
        }
        for name, (tail, dtype) in shapes.items():
            array = np.zeros((slots, self.length, *tail), dtype=dtype)
            if self.slots:
                array[: self.slots] = getattr(self, name)
            setattr(self, name, array)
        for name, dtype in {
            "seeds": np.int64,
            "prompts": np.int64,
            "lengths": np.int64,
            "planned_until": np.int64,
            "has_edits": bool,
        }.items():
            array = np.zeros(slots, dtype=dtype)
            if self.slots:
                array[: self.slots] = getattr(self, name)
            setattr(self, name, array)
        self._free.extend(reversed(range(self.slots, slots)))
        self.slots = slots

    def open(self, request_id: str, seed: int, prompt_tokens: int, perturbed: bool) -> Trajectory:
        """Gives a new request a clean slot."""
        if not self._free:
            self._allocate(2 * self.slots)
        slot = self._free.pop()
        for array in (self.planned, self.edited):
            array[slot] = False
        self.planned_until[slot] = 0
        self.seeds[slot], self.prompts[slot], self.lengths[slot] = seed, prompt_tokens, prompt_tokens
        self.has_edits[slot] = False
        self.live[request_id] = self._of_slot[slot] = trajectory = Trajectory(slot, seed, prompt_tokens, perturbed)
        return trajectory

    def plan(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Sees to it that gate and token keys are known at these places; a loop, but rarely entered."""
        for index in np.flatnonzero(positions >= self.planned_until[slots]):
            t = self._of_slot[int(slots[index])]
            start, stop = int(self.planned_until[t.slot]), min(int(positions[index]) + _CHUNK, self.length)
            keys = streams.keys(torch.tensor(t.seed), torch.arange(start, stop), streams.Stream.TOKEN)
            self.token_keys[t.slot, start:stop] = keys.numpy()
            if t.perturbed:
                self.planned[t.slot, start:stop] = self._operator.plan(t.seed, t.prompt_tokens, stop, start)
            self.planned_until[t.slot] = stop

    def load(self, trajectory: Trajectory, record: ReplayRecord) -> None:
        """Puts the record of earlier turns in place, to be replayed on the prompt's positions.

        Raises:
            ValueError: where the record has more candidates per position than this engine's operator, or vectors
                though the operator is not dense.
        """
        if record.ids.shape[1] > self._candidates:
            raise ValueError(
                f"the record to replay has {record.ids.shape[1]} candidates per position, this engine's"
                f" perturbation at most {self._candidates}: use the same perturbation in every turn."
            )
        if record.vectors is not None and record.vectors.shape[1] != self._hidden:
            raise ValueError(
                f"the record to replay has vectors of {record.vectors.shape[1]} numbers, this engine's perturbation"
                f" {f'of {self._hidden}' if self._hidden else 'has none'}: use the same perturbation in every turn."
            )
        rows = record.positions[record.positions < trajectory.prompt_tokens]
        count, width = len(rows), record.ids.shape[1]
        self.edited[trajectory.slot, rows] = True
        self.ids[trajectory.slot, rows] = record.ids[:count, :1]
        self.weights[trajectory.slot, rows] = 0.0
        self.ids[trajectory.slot, rows, :width] = record.ids[:count]
        self.weights[trajectory.slot, rows, :width] = record.weights[:count]
        self.agreed[trajectory.slot, rows] = record.agreed[:count]
        if record.sigma is not None:
            self.sigma[trajectory.slot, rows] = record.sigma[:count]
        if record.total is not None:
            self.total[trajectory.slot, rows] = record.total[:count]
        if self._hidden:
            self.vectors[trajectory.slot, rows] = 0.0 if record.vectors is None else record.vectors[:count]
        self.has_edits[trajectory.slot] = count > 0

    def record(self, request_id: str) -> tuple[ReplayRecord, np.ndarray]:
        """The record and the log-probabilities of the generated tokens so far.

        Args:
            request_id: a live request.

        Returns:
            The record, and log π of each generated token at the rollout, (generated,) float32.
        """
        t = self.live[request_id]
        num_tokens = int(self.lengths[t.slot])
        positions = np.flatnonzero(self.edited[t.slot, :num_tokens]).astype(np.int32)
        record = ReplayRecord(
            t.seed,
            t.prompt_tokens,
            num_tokens,
            positions,
            self.ids[t.slot, positions],
            self.weights[t.slot, positions],
            self.sigma[t.slot, positions] if self._noisy else None,
            self.agreed[t.slot, positions],
            self.vectors[t.slot, positions] if self._hidden else None,
            self.total[t.slot, positions] if self._totals else None,
        )
        return record, self.log_probs[t.slot, t.prompt_tokens : num_tokens].copy()

    def close(self, request_id: str) -> None:
        """Frees a request's slot."""
        self._free.append(self.live.pop(request_id).slot)
