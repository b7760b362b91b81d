# SPDX-License-Identifier: Apache-2.0
"""A resumed run goes on where the interrupted one was: what OpenRLHF's checkpoints do not hold.

Draws follow from the round of the rollout and not from how often this process was asked for something; the round,
and COPO's counts, stand in the checkpoint beside OpenRLHF's own states.
"""

from __future__ import annotations

from typing import Any

_KEY = "ngrpo"


def resuming_trainer(plain: type) -> type:
    """`PPOTrainer` whose checkpoints hold the rollout's round and COPO's counts. A row of `ngrpo.trainer.seams`.

    A subclass, as `ngrpo.trainer.metrics.reporting_trainer`.
    """

    class ResumingTrainer(plain):  # type: ignore[misc, valid-type]
        def save_logs_and_checkpoints(self, global_step: int, logs_dict: Any = None, client_states: Any = None) -> None:
            if client_states is not None:  # the best checkpoint is then saved with the same ones
                client_states[_KEY] = {
                    "rollout_round": getattr(self.samples_generator, "rollout_round", 0),
                    "visits": getattr(self.experience_maker, "visits", None),
                }
            super().save_logs_and_checkpoints(global_step, logs_dict, client_states)

        def init_checkpoint_states(self) -> Any:
            states = super().init_checkpoint_states()
            ours = states.get(_KEY)
            if ours is not None:
                self.samples_generator.rollout_round = ours["rollout_round"]
                if ours["visits"] is not None:
                    self.experience_maker.visits = ours["visits"]
            return states

    return ResumingTrainer
