# SPDX-License-Identifier: Apache-2.0
"""What the scripts share that run as two ranks under DeepSpeed ZeRO on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any


@contextmanager
def rank_of_two(rank: int, port: str) -> Iterator[None]:
    """One of two ranks in a gloo group; to be entered before DeepSpeed is imported."""
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(LOCAL_RANK="0", OMP_NUM_THREADS="1")
    import torch

    from ngrpo.machine.hardware.cpu import waited_for

    # Compiling DeepSpeed's shared-memory all-reduce takes half a minute; gloo does without. The attribute
    # deepspeed.comm.torch is torch itself, so the module of that name is looked up.
    backend = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    backend.TorchBackend.all_gather_into_tensor = waited_for(backend.TorchBackend.all_gather_into_tensor)
    torch.set_num_threads(1)
    # Ranks that do not call alike fail after a minute and a half, and do not wait for the test to end them.
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=90))
    yield
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # its threads may abort the process at its end


def tiny_llama() -> Any:
    """Two layers of width 16 with a tied head over 64 tokens; inside of ``deepspeed.zero.Init`` its rank's share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def configuration(stage: int, learning_rate: float | None = None) -> dict[str, Any]:
    """DeepSpeed's configuration: float32 without an optimizer, or bfloat16 with AdamW at a learning rate."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if learning_rate is not None:
        config["bf16"] = {"enabled": True}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": learning_rate, "torch_adam": True}}
    return config


def whole_parameters(module: Any, stage: int) -> dict[str, Any]:
    """Copies in float32 of a module's parameters, gathered from both ranks where they are parted."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=stage == 3):
        return {name: p.detach().float().clone() for name, p in module.named_parameters()}


def assert_trained_alike(trained: dict[str, Any]) -> None:
    """Finite, not zero, and the same on both ranks."""
    import torch

    assert all(p.isfinite().all() and p.any() for p in trained.values())
    sums = torch.stack([p.sum() for p in trained.values()])
    both = [torch.zeros_like(sums) for _ in range(2)]
    torch.distributed.all_gather(both, sums)
    assert torch.equal(*both), "the ranks have drifted apart"
