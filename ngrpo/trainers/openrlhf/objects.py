# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's objects with what the patches keep on them, for annotations: nothing here is imported as a run goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import argparse

    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
    from ray.actor import ActorHandle

    from ngrpo.methods.sampling_schedules.base import PastStep
    from ngrpo.trainers.openrlhf.gap import GapScale
    from ngrpo.trainers.openrlhf.kept_groups import KeptGroups
    from ngrpo.trainers.openrlhf.rollout_actor import EngineProof, PickUps
    from ngrpo.trainers.openrlhf.visits import Visits

    class ExperienceMaker(RemoteExperienceMaker):
        """Where samples become experiences."""

        training_step: int
        visits: Visits
        gap_scale: GapScale
        kept_groups: KeptGroups
        step_measures: dict[str, float]
        rollout_divergence: float | None
        rollout_entropy: float | None

    class RolloutActor(RolloutRayActor):
        """A vLLM engine in a process of Ray's."""

        perturbation_pick_ups: PickUps
        perturbation_proof: EngineProof
        second_rounds_asked: Counter[str]


class Trainer(Protocol):
    """``BasePPOTrainer``, the loop over steps."""

    args: Any
    experience_maker: ExperienceMaker
    prompts_dataloader: Any
    chosen: tuple[int, float | None]
    past: tuple[PastStep, ...]


class ActorTrainer(Protocol):
    """``ActorPPOTrainer``, whose loss the patches may replace."""

    actor: Any
    args: argparse.Namespace
    strategy: Any
    vllm_engines: list[ActorHandle]
    actor_loss_fn: Callable[..., Any]
