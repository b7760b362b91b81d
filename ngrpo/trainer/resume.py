# SPDX-License-Identifier: Apache-2.0
"""A resumed run goes on where the interrupted one was: what OpenRLHF's checkpoints do not hold.

Draws follow from the round of the rollout and not from how often this process was asked for something; the round,
and COPO's counts, stand in the checkpoint beside OpenRLHF's own states.
"""

from __future__ import annotations

from typing import Any

from ngrpo.trainer.checkpoint_states import keeping

_KEY = "ngrpo"


def resuming_trainer(plain: type) -> type:
    """`PPOTrainer` whose checkpoints hold the rollout's round and COPO's counts. A row of `ngrpo.trainer.seams`.

    A subclass, as `ngrpo.trainer.metrics.reporting_trainer`.
    """

    return keeping(plain, _KEY, _state, _restore)


def _state(trainer: Any) -> dict[str, Any]:
    return {
        "rollout_round": getattr(trainer.samples_generator, "rollout_round", 0),
        "visits": getattr(trainer.experience_maker, "visits", None),
    }


def _restore(trainer: Any, state: dict[str, Any]) -> None:
    trainer.samples_generator.rollout_round = state["rollout_round"]
    if state["visits"] is not None:
        trainer.experience_maker.visits = state["visits"]
