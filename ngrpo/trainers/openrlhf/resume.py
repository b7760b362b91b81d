# SPDX-License-Identifier: Apache-2.0
"""A resumed run goes on where the interrupted one was: what OpenRLHF's checkpoints do not hold.

Draws follow from the round of the rollout and not from how often this process was asked for something; the round,
and COPO's counts, stand in the checkpoint beside OpenRLHF's own states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ngrpo.trainers.openrlhf.checkpoint_states import keeping

if TYPE_CHECKING:
    from ngrpo.trainers.openrlhf.objects import Trainer

_KEY, _ROUND = "ngrpo", "ngrpo_round"


def resuming_trainer(plain: type) -> type:
    """`PPOTrainer` and `TrainingActor`: checkpoints hold the rollout's round and COPO's counts.

    A subclass, as `metrics.reporting_trainer`. Where asynchronous, the round is the generator's, which
    runs in another process: :func:`resuming_generator`.
    """

    return keeping(plain, _KEY, _state, _restore)


def resuming_generator(plain: type) -> type:
    """`GenerateSamplesActor`: its round goes where its dataloader's state goes, into the checkpoint and back."""

    class ResumingGenerator(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            of_loader, generator = self.prompts_dataloader.state_dict, self.samples_generator
            self.prompts_dataloader.state_dict = lambda: {**of_loader(), _ROUND: generator.rollout_round}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            of_loader = dict(state_dict)
            self.samples_generator.rollout_round = of_loader.pop(_ROUND, 0)
            super().load_state_dict(of_loader)

    return ResumingGenerator


def _state(trainer: Trainer) -> dict[str, Any]:
    generator = getattr(trainer, "samples_generator", None)
    return {
        "rollout_round": getattr(generator, "rollout_round", 0),
        "visits": getattr(trainer.experience_maker, "visits", None),
    }


def _restore(trainer: Trainer, state: dict[str, Any]) -> None:
    generator = getattr(trainer, "samples_generator", None)
    if generator is not None:
        generator.rollout_round = state["rollout_round"]
    if state["visits"] is not None:
        trainer.experience_maker.visits = state["visits"]
