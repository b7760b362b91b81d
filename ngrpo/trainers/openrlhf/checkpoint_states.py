# SPDX-License-Identifier: Apache-2.0
"""What OpenRLHF's checkpoints hold of ours, beside its own states: each part under a key of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def keeping(plain: type, key: str, state: Callable[[Any], Any], restore: Callable[[Any, Any], None]) -> type:
    """`PPOTrainer` whose checkpoints hold one more state.

    A subclass, as `metrics.reporting_trainer`.

    Args:
        plain: the trainer.
        key: where the state stands in a checkpoint.
        state: of a trainer, when a checkpoint is written.
        restore: gives a trainer what a checkpoint held; called where one is resumed that has the key.
    """

    class KeepingTrainer(plain):  # type: ignore[misc, valid-type]
        def save_logs_and_checkpoints(
            self, global_step: int, logs_dict: object = None, client_states: dict[str, Any] | None = None
        ) -> None:
            if client_states is not None:  # the best checkpoint is then saved with the same ones
                client_states[key] = state(self)
            super().save_logs_and_checkpoints(global_step, logs_dict, client_states)

        def init_checkpoint_states(self) -> Any:
            states = super().init_checkpoint_states()
            if key in states:
                restore(self, states[key])
            return states

    return KeepingTrainer
