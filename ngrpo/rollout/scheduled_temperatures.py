# SPDX-License-Identifier: Apache-2.0
"""The temperatures of a step's rows under a sampling schedule (`ngrpo/methods/sampling_schedules`)."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ngrpo.methods.sampling_schedules.base import NextTokens, SamplingSchedule
from ngrpo.rollout.batch import Batch
from ngrpo.rollout.trajectories import TrajectoryStore


class ScheduledTemperatures:
    """Asks a sampling schedule for the temperatures of a batch.

    What the schedule is told of a row's request stays on the device while the batch's rows stay the same.
    """

    def __init__(
        self, schedule: SamplingSchedule, store: TrajectoryStore, upload: Callable[[np.ndarray], Tensor]
    ) -> None:
        """
        Args:
            schedule: changes temperatures.
            store: of the live trajectories.
            upload: copies an array to the device.
        """
        self._schedule = schedule
        self._store = store
        self._upload = upload
        self._training_steps = torch.zeros(0, dtype=torch.int64)  # of the rows, (B,)
        # Of each row's response, its number and the count of responses to its prompt, (2, B).
        self._numbers_and_counts = torch.zeros(2, 0, dtype=torch.int64)

    def locate(self, slots: np.ndarray) -> None:
        """Uploads what the schedule is told of the requests in these slots, (B,), the rows of the next batches."""
        self._training_steps = self._upload(self._store.training_steps[slots])
        self._numbers_and_counts = self._upload(self._store.numbers_and_counts[slots].T)

    def factor(self, batch: Batch, scaled: Tensor, temperature: Tensor, greedy: Tensor | None) -> Tensor | None:
        """The factor of each temperature (B,), 1 where no schedule applies; None for a schedule of whole steps.

        ``greedy``: argmax tokens for greedy rows and -1 elsewhere, (B,) int64; None where no row is greedy.
        """
        # A prompt that is not complete yet is below its first generated position; its token is thrown away.
        generated = np.maximum(batch.next_positions - batch.rows.first, 0)
        steps = self._training_steps
        response_number, response_count = self._numbers_and_counts
        next_tokens = NextTokens(
            logits=scaled.float(),
            temperature=temperature,
            generated=self._upload(generated),
            step=steps.clamp_min(0),
            answer=response_number,
            answers=response_count,
        )
        factor = self._schedule.factor(next_tokens)
        if factor is None:
            return None
        applies = steps >= 0
        if greedy is not None:
            applies = applies & (greedy < 0)
        return torch.where(applies, factor, 1.0)

    def rehearse(self, scaled: Tensor) -> None:
        """Does a step's work on any logits (B, V), for vLLM to measure its memory."""
        numbers = torch.arange(len(scaled), device=scaled.device)
        next_tokens = NextTokens(
            logits=scaled,
            temperature=torch.ones_like(scaled[:, 0]),
            generated=numbers,
            step=numbers,
            answer=numbers,
            answers=numbers + 1,
        )
        self._schedule.factor(next_tokens)
