# SPDX-License-Identifier: Apache-2.0
"""``--sampling.schedule``: what it needs of the training. The functions are rows of `patches.py`.

Within an answer the engine's workers change the temperature (`ngrpo.rollout.perturber`); requests tell them the
training step (`rollout_requests.py`). Here a schedule that follows the training chooses the temperature of
the next step's requests, by what the rollouts of the steps before were.
"""

from __future__ import annotations

from dataclasses import astuple
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ngrpo.config.run import current_run
from ngrpo.methods.sampling_schedules.base import PastStep, Run
from ngrpo.trainers.openrlhf.checkpoint_states import keeping
from ngrpo.trainers.openrlhf.policy_noise import steps_of_run
from perturbations.errors import present

if TYPE_CHECKING:
    from openrlhf.trainer.ppo_utils.experience import Experience

    from ngrpo.trainers.openrlhf.objects import Trainer

_PAST = "ngrpo_sampling_schedule"


def scheduled_trainer(plain: type) -> type:
    """`PPOTrainer` that chooses the temperature of each step's rollouts.

    A subclass, as `metrics.reporting_trainer`.
    """

    class ScheduledTrainer(keeping(plain, _PAST, _state, _restore)):  # type: ignore[misc]
        past: tuple[PastStep, ...] = ()

        def init_checkpoint_states(self) -> Any:
            states = super().init_checkpoint_states()
            self.choose_temperature()
            return states

        def train_step(self, rollout_samples: list[Experience], global_step: int) -> Any:
            factor = self.samples_generator.temperature_factor
            status, global_step = super().train_step(rollout_samples, global_step)
            if present(current_run().sampling_schedule, "--sampling_schedule").follows_training:
                status["sampling/temperature"] = run_of(self).temperature * factor
                self.past = (*self.past, PastStep(factor, self.experience_maker.rollout_entropy))
                self.choose_temperature()
            return status, global_step

        def choose_temperature(self) -> None:
            """Sets what the requests of the next step's rollouts multiply their temperature with."""
            schedule = present(current_run().sampling_schedule, "--sampling_schedule")
            if schedule.follows_training:
                self.samples_generator.temperature_factor = schedule.factor_of_step(self.past, run_of(self))

    return ScheduledTrainer


def _state(trainer: Trainer) -> list[tuple[float, ...]]:
    return [astuple(each) for each in trainer.past]


def _restore(trainer: Trainer, past: list[tuple[float, ...]]) -> None:
    trainer.past = tuple(PastStep(*each) for each in past)


def run_of(trainer: Trainer) -> Run:
    """What a schedule knows of the run of OpenRLHF's trainer."""
    args = trainer.args
    steps = steps_of_run(args, len(trainer.prompts_dataloader))
    return Run(steps, args.rollout.temperature, vocabulary(args.actor.model_name_or_path))


@lru_cache(maxsize=1)
def vocabulary(model: str) -> int:
    """V of a model, as its configuration says."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model, trust_remote_code=True).get_text_config().vocab_size
