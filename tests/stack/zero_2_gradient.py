# SPDX-License-Identifier: Apache-2.0
"""Run by test_gradients.py: one backward under DeepSpeed ZeRO-2 on CPU; saves the embedding's gradient."""

from __future__ import annotations

import os
import sys

os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT="29713", RANK="0", WORLD_SIZE="1")
os.environ["LOCAL_RANK"] = "0"


def main(folder: str, target: str) -> None:
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_grad
    from transformers import AutoModelForCausalLM

    from perturbations.replay.scope import ReplayScope
    from tests.stack.gradient_batch import batch

    # DeepSpeed's shared-memory all-reduce compiles for half a minute; one process needs none.
    torch.distributed.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        },
        dist_init_required=False,
    )
    tokens, mask, records = batch()
    with ReplayScope(engine.module.get_input_embeddings())(records, mask):
        logits = engine(tokens, attention_mask=mask).logits
        log_probs = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        engine.backward(-(log_probs * mask[:, 1:]).sum())
    torch.save(safe_get_full_grad(engine.module.get_input_embeddings().weight).float().cpu(), target)


if __name__ == "__main__":
    main(*sys.argv[1:])
