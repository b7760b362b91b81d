# SPDX-License-Identifier: Apache-2.0
"""What OpenRLHF's trainers of actor and critic share: whole batches, and orders that a resumed run continues.

A step may be short, such as the last one of a pass: what fills no ``--train.batch_size`` is left out. DeepSpeed would
keep its gradient for the first update of the next step. From then on every update would come in the middle of a
rollout, whose other responses would be computed at changed weights. OpenRLHF 0.11.2 leaves it out itself with
``--train.dynamic_batch_enable``.
"""

import torch

from ngrpo.config.run import current_run
from ngrpo.machine.upstream.rollout_sizes import prompts_of_step
from ngrpo.machine.upstream.types import Upstream
from perturbations import seeds


class WholeBatches(Upstream):
    """What goes in front of OpenRLHF's trainers of actor and critic: their buffers end with a whole batch."""

    def seed_orders(self, updates: int) -> None:
        """Under ``--reproducible`` the orders of a step's responses follow from the number of updates before it.

        DeepSpeed's count of updates is part of a checkpoint, so a resumed run continues with the same orders.
        """
        if current_run().reproducible:
            torch.manual_seed(seeds.trajectory_seed(self.args.train.seed, updates))

    def leave_out_remainder(self) -> int:
        """Takes what fills no ``--train.batch_size`` in a short step out of the buffer.

        Where whole steps leave something over too, a start warns of that (`run_notes.batch_notes`), and all of it is
        trained.

        Returns:
            The number of responses of all ranks that are left out.
        """
        rollout, train = self.args.rollout, self.args.train
        # The responses of this rank in one --train.batch_size.
        batch_of_rank = self.strategy.accumulated_gradient * train.micro_batch_size
        ranks = train.batch_size // batch_of_rank
        prompts = prompts_of_step(rollout.batch_size, rollout.vllm_generate_batch_size)
        whole_step = prompts * rollout.n_samples_per_prompt
        # OpenRLHF's data loader drops the responses that fill no micro-batch on every rank.
        whole_step -= whole_step % (train.micro_batch_size * ranks)
        if train.dynamic_batch_enable or whole_step % train.batch_size:
            return 0
        items = self.replay_buffer.items
        left_out = len(items) % batch_of_rank
        del items[len(items) - left_out :]
        return left_out * ranks

    def buffered_responses(self) -> float:
        """The responses in the buffers of all ranks; ranks that share a sequence or a layer have the same ones."""
        settings = self.args.ds
        copies = settings.ring_attn_size * settings.tensor_parallel_size
        return self.strategy.all_reduce(float(len(self.replay_buffer.items)), op="sum") / copies


class WholeBatchCriticTrainer(WholeBatches):
    """What goes in front of `CriticPPOTrainer`, whose updates then come with those of the actor."""

    def ppo_train(self) -> dict[str, float]:
        self.seed_orders(self.critic.global_steps)
        self.leave_out_remainder()
        return super().ppo_train() if self.replay_buffer.items else {}


def critic_trainer(plain: type) -> type:
    """The subclass of `CriticPPOTrainer`."""
    return type(plain.__name__, (WholeBatchCriticTrainer, plain), {})
