# SPDX-License-Identifier: Apache-2.0
"""``--sampling.correction_warmup N``: the importance weights of the loss grow from 1 to their whole over N steps.

OpenRLHF 0.11.2 weighs each token's loss by w = π_trainer / π_rollout within its bounds, from the first step on. In step
t, counted from 0, it is 1 + α (w − 1) here, with α = min(1, t / N). OpenRLHF forms w from two log-probabilities, so the
rollout's is replaced by the one from which that weight follows; a row of `patches.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from ngrpo.config.run import current_run
from ngrpo.trainers.openrlhf.metrics import note_measures
from perturbations.errors import present

if TYPE_CHECKING:
    from openrlhf.trainer.ppo_utils.experience import Experience

    from ngrpo.trainers.openrlhf.objects import ExperienceMaker


def with_strength(
    trainer: Float[Tensor, "batch actions"],
    rollout: Float[Tensor, "batch actions"],
    strength: float,
    bounds: tuple[float, float],
) -> Float[Tensor, "batch actions"]:
    """Log-probabilities of the rollout from which the weight 1 + α (w − 1) follows.

    Args:
        trainer: log π of the trainer, (B, A), in nats.
        rollout: log π of the rollout, (B, A).
        strength: α, in [0, 1). At 1 the rollout's own are right.
        bounds: the least and the largest w, at most and at least 1.

    Returns:
        (B, A), as ``rollout``.
    """
    weight = (trainer - rollout).clamp(-20.0, 20.0).exp().clamp(*bounds)
    return trainer - (strength * (weight - 1.0)).log1p()


def growing_correction(original: Callable[..., Any]) -> Callable[..., Any]:
    """`RemoteExperienceMaker.make_experience_batch`: its experiences are weighted as far as the step has come."""

    def make_experience_batch(self: ExperienceMaker, rollout_samples: list[Experience]) -> Any:
        experiences = original(self, rollout_samples)
        steps = present(current_run().sampling.correction_warmup, "--sampling.correction_warmup")
        strength = min(1.0, self.training_step / steps)
        note_measures(self, {"importance/strength": strength})
        if strength == 1.0:
            return experiences
        low, high = (float(bound) for bound in self.strategy.args.algo.advantage.is_correction_threshold)
        for experience in experiences:
            rollout = present(experience.rollout_log_probs, "rollout_log_probs")
            experience.rollout_log_probs = with_strength(experience.action_log_probs, rollout, strength, (low, high))
        return experiences

    return make_experience_batch
