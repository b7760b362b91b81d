# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's classes as far as ours meet them: what a test gives is what they have."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ngrpo.trainers.openrlhf.actor_trainer import actor_trainer
from ngrpo.trainers.openrlhf.experience_maker import experience_maker

LOGGED = {"rollout/reward_mean": 0.5, "timing/step_total": 1.0}
"""What a trainer logs of a step at least."""


class _ActorPPOTrainer:
    def __init__(self, actor: Any, loss: Any, step: Callable[..., Any]) -> None:
        self.actor = actor
        self.actor_loss_fn = loss
        self._step = step

    def training_step(self, experience: Any, kl_ctl: float, step: int, *args: object) -> Any:
        return self._step(self, experience, kl_ctl, step, *args)


def training_step(actor: Any, loss: Any, step: Callable[..., Any], experience: Any, number: int = 0) -> Any:
    """One training step of ours around OpenRLHF's, given as a function of (trainer, experience, kl_ctl, step)."""
    return actor_trainer(_ActorPPOTrainer)(actor, loss, step).training_step(experience, 0.0, number)


class _RemoteExperienceMaker:
    def __init__(self, compute: Callable[[list[Any]], Any] | None, **attributes: Any) -> None:
        self._compute = compute
        self.tokenizer = None
        self.args = SimpleNamespace(
            data=SimpleNamespace(max_len=1 << 20),
            rollout=SimpleNamespace(max_new_tokens=1),
        )
        for name, value in attributes.items():
            setattr(self, name, value)

    def make_experience_batch(self, samples: list[Any]) -> list[Any]:
        return samples

    def compute_advantages_and_returns(self, experiences: list[Any]) -> Any:
        return experiences if self._compute is None else self._compute(experiences)


def maker(compute: Callable[[list[Any]], Any] | None = None, **attributes: Any) -> Any:
    """An experience maker of ours, around an OpenRLHF's that has these attributes and advantages."""
    return experience_maker(_RemoteExperienceMaker)(compute, **attributes)


def makers_state(**attributes: Any) -> SimpleNamespace:
    """What a trainer finds at its experience maker after a step."""
    kept = {"step_measures": {}, "prompt_memory": None, "rollout_divergence": None, "rollout_entropy": None}
    return SimpleNamespace(**{**kept, **attributes})
