# SPDX-License-Identifier: Apache-2.0
"""How many prompts OpenRLHF 0.11.2 trains in a step and draws at once.

Both follow from ``--rollout.batch_size`` and ``--rollout.vllm_generate_batch_size``, which is as large where it is not
given.
"""


def prompts_of_step(batch_size: int, generate_batch_size: int | None) -> int:
    """The prompts of a whole step: fewer than ``--rollout.batch_size`` where engines draw fewer at once."""
    return min(batch_size, generate_batch_size or batch_size)


def prompts_drawn_at_once(batch_size: int, generate_batch_size: int | None) -> int:
    """The prompts that engines draw before a step trains: several steps' where they are more than its batch.

    A draw of fewer prompts counts as a whole batch, because it is one step.
    """
    return max(batch_size, generate_batch_size or batch_size)
