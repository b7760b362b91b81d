# SPDX-License-Identifier: Apache-2.0
"""The turns of one conversation: a further turn replays the perturbed inputs of those before it.

An edit belongs to the tokens before it. Where an agent or a chat template has changed them (a template that strips
earlier `<think>` text does), everything that was recorded from the first changed token on is dropped and counted:
neither the engine nor the trainer may put an old edit on another token.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ngrpo.rollout.async_scheduling import cut_to_answer
from perturbations import seeds
from perturbations.errors import require
from perturbations.replay import ReplayRecord
from perturbations.replay.trajectory import FinishedTrajectory, UnperturbedAnswer


class Conversation:
    """What has been recorded of one trajectory of OpenRLHF.

    Attributes:
        arguments: what each of its requests says to the engine.
        trajectory: of all turns so far; None before the first.
        followed: whether an unperturbed answer is still to be asked for.
        unperturbed: that answer.
    """

    def __init__(self, arguments: Mapping[str, Any], followed: bool = False) -> None:
        self.arguments, self.followed = arguments, followed
        self.unperturbed: UnperturbedAnswer | None = None
        self.trajectory: FinishedTrajectory | None = None
        self._tokens = np.zeros(0, dtype=np.int64)
        self._asked: Counter[bytes] = Counter()

    def go_on(self, tokens: Sequence[int]) -> None:
        """Keeps what was recorded of the tokens that are still there.

        Args:
            tokens: of the next turn's prompt, or of the whole conversation at its end.
        """
        if self.trajectory is None:
            return
        now = np.asarray(tokens, dtype=np.int64)
        both = min(len(now), len(self._tokens))
        changed = np.flatnonzero(now[:both] != self._tokens[:both])
        self._keep(int(changed[0]) if len(changed) else both)

    def earlier(self, prompt: Sequence[int]) -> ReplayRecord | None:
        """The record that a request for the next turn has in its arguments; :meth:`go_on` was told its prompt.

        A prompt that is asked again, as by an agent that wants another answer, has draws of its own. (Not where noise
        of earlier turns is replayed, whose seed is the record's.)

        Args:
            prompt: token ids.
        """
        key = np.asarray(prompt, dtype=np.int64).tobytes()
        again = self._asked[key]
        self._asked[key] += 1
        if self.trajectory is None:
            return None
        record = self.trajectory.record
        if again and (record.sigma is None or not len(record)):
            return dataclasses.replace(record, seed=seeds.trajectory_seed(record.seed, again))
        return record

    def add(self, parts: Mapping[str, bytes], prompt: Sequence[int], tokens: Sequence[int], cached: int = 0) -> None:
        """Takes in a turn; :meth:`go_on` was told its prompt.

        Args:
            parts: the turn, as the worker sent it.
            prompt: token ids that the turn began with.
            tokens: token ids that it generated.
            cached: how many of the prompt's tokens the engine found in its prefix cache.
        """
        turn = cut_to_answer(FinishedTrajectory.unpack(parts), len(tokens))
        start, mask = len(prompt), turn.sampling_mask
        by_position = np.full(start + len(tokens), np.nan, dtype=np.float32)
        dropped, prompted = 0, start
        if self.trajectory is not None:
            before = self.trajectory
            dropped, prompted, cached = before.dropped, prompted + before.prompted, cached + before.cached
            by_position[: len(before.log_probs)] = before.log_probs
            mask = (
                None
                if mask is None
                else require(before.sampling_mask, "the mask of earlier turns").joined(mask, turn=start)
            )
        by_position[start:] = turn.log_probs
        self.trajectory = FinishedTrajectory(turn.record, by_position, mask, dropped, prompted, cached)
        self._tokens = np.asarray([*prompt, *tokens], dtype=np.int64)

    def finished(self, tokens: Sequence[int]) -> FinishedTrajectory:
        """The whole trajectory, fitted to the tokens that the conversation has at its end."""
        self.go_on(tokens)
        return dataclasses.replace(require(self.trajectory, "the trajectory"), unperturbed=self.unperturbed)

    def _keep(self, length: int) -> None:
        """Drops what lies beyond the first ``length`` tokens."""
        if length >= len(self._tokens):
            return
        before, self._tokens = require(self.trajectory, "the trajectory of earlier turns"), self._tokens[:length]
        trajectory = before.truncate(length)
        self.trajectory = dataclasses.replace(
            trajectory, dropped=trajectory.dropped + len(before.record) - len(trajectory.record)
        )
