# SPDX-License-Identifier: Apache-2.0
"""Steps that are short, such as the last one of a pass: what fills no ``--train.batch_size`` is left out.

DeepSpeed would keep its gradient for the first update of the next step. From then on every update would come in the
middle of a rollout, whose other responses would be computed at changed weights. OpenRLHF 0.11.2 leaves it out itself
with ``--train.dynamic_batch_enable``.
"""

from typing import Any

from ngrpo.machine.upstream.types import Upstream


def critic_trainer(plain: type) -> type:
    """The subclass of `CriticPPOTrainer`."""
    return type(plain.__name__, (ShortStepCriticTrainer, plain), {})


class ShortStepCriticTrainer(Upstream):
    """What goes in front of `CriticPPOTrainer`, whose updates are those of the actor."""

    def ppo_train(self) -> dict[str, float]:
        leave_out_remainder(self)
        return super().ppo_train() if self.replay_buffer.items else {}


def leave_out_remainder(trainer: Any) -> int:
    """Takes out of the buffer of an actor or a critic what fills no ``--train.batch_size`` in a short step.

    Where whole steps leave something over too, a start warns of that (`run_notes.batch_notes`), and all of it is
    trained.

    Returns:
        The number of responses of all ranks that are left out.
    """
    rollout, train = trainer.args.rollout, trainer.args.train
    batch = trainer.strategy.accumulated_gradient * train.micro_batch_size  # of this rank
    ranks = train.batch_size // batch
    whole_step = min(rollout.batch_size, rollout.vllm_generate_batch_size) * rollout.n_samples_per_prompt
    whole_step -= whole_step % (train.micro_batch_size * ranks)  # which upstream's loader drops
    if train.dynamic_batch_enable or whole_step % train.batch_size:
        return 0
    items = trainer.replay_buffer.items
    left_out = len(items) % batch
    del items[len(items) - left_out :]
    return left_out * ranks


def buffered_responses(trainer: Any) -> float:
    """The responses in the buffers of all ranks; ranks that share a sequence or a layer have the same ones."""
    settings = trainer.args.ds
    copies = settings.ring_attn_size * settings.tensor_parallel_size
    return trainer.strategy.all_reduce(float(len(trainer.replay_buffer.items)), op="sum") / copies
