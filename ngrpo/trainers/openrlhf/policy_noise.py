# SPDX-License-Identifier: Apache-2.0
"""``--policy_noise``: how noisy the weights are that engines roll out with. A row of `patches.py`.

The noise is added while weights are sent (`weight_sync.py`), whatever way they go (NCCL, CUDA IPC, a file). For an
evaluation the engines are sent the clean weights, and the noisy ones again after it.
"""

from __future__ import annotations

from math import ceil
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ngrpo.config.run import current_run
from ngrpo.trainers.openrlhf.checkpoint_states import keeping
from perturbations.errors import present

if TYPE_CHECKING:
    import argparse

    from openrlhf.trainer.ppo_utils.experience import Experience

    from ngrpo.trainers.openrlhf.objects import Trainer

_CHOSEN = "ngrpo_policy_noise"


def noisy_trainer(plain: type) -> type:
    """`PPOTrainer` whose engines roll out with noisy weights and evaluate with clean ones.

    A subclass, as `metrics.reporting_trainer`.
    """

    class NoisyTrainer(keeping(plain, _CHOSEN, attrgetter("chosen"), _restore)):  # type: ignore[misc]
        # The training step whose rollouts come next, and the step and σ that the engines' noise was last chosen for.
        noise_step = 0
        chosen: tuple[int, float | None] = (-1, None)

        def init_checkpoint_states(self) -> Any:
            states = super().init_checkpoint_states()
            self.noise_step = states["global_step"]
            if not self.noise_step:
                self.broadcast_to_vllm()  # the first rollout's weights have noise as well; a resumed run sends its own
            return states

        def train_step(self, rollout_samples: list[Experience], global_step: int) -> Any:
            rolled_out = self.chosen[1]
            self.noise_step = global_step + 1
            status, global_step = super().train_step(rollout_samples, global_step)
            status["policy_noise/scale"] = rolled_out
            return status, global_step

        def broadcast_to_vllm(self) -> None:
            if self.chosen[0] != self.noise_step:
                divergence = getattr(self.experience_maker, "rollout_divergence", None)
                total = steps_of_run(self.args, len(self.prompts_dataloader))
                scale = present(current_run().policy_noise, "--policy_noise").scale(
                    self.noise_step, total, self.chosen[1], divergence
                )
                self.chosen = (self.noise_step, scale)
            self._send(self.chosen[1])

        def evaluate(self, *args: object, **kwargs: object) -> Any:
            self._send(0.0)
            try:
                return super().evaluate(*args, **kwargs)
            finally:
                self._send(self.chosen[1])

        def _send(self, scale: float | None) -> None:
            import ray

            group = self.actor_model_group
            ray.get(group.async_run_method(method_name="set_policy_noise", scale=scale, sync=self.noise_step))
            super().broadcast_to_vllm()

    return NoisyTrainer


def _restore(trainer: Trainer, chosen: tuple[int, float | None]) -> None:
    trainer.chosen = chosen


def steps_of_run(args: argparse.Namespace, prompts: int) -> int:
    """Training steps of a run over so many prompts: in each episode the last batch may be a smaller one.

    Fewer where prompts are filtered out.
    """
    return max(1, args.train.num_episodes * ceil(prompts / args.rollout.batch_size))
