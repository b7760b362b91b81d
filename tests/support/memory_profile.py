# SPDX-License-Identifier: Apache-2.0
"""A process that prints the memory of OpenRLHF's actor and DeepSpeed engine on a CPU, as torch's profiler counts it.

The first line has the bytes of a logit, without and with gradients, and the second the same with a density. A line for
each stage of ZeRO follows, for updates of one and of two micro-batches: bytes at the peak of the last backward pass and
of the update, over what is held between steps.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any

import deepspeed
import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.replay import RecordKind, random_record
from ngrpo.machine.hardware.stand_ins import flash_attn_stand_in
from ngrpo.trainers.common.log_probs import densities, with_overrides, without_flash_attn
from perturbations.registry import create
from perturbations.replay.scope import ReplayScope

with flash_attn_stand_in():
    from openrlhf.models import actor as actor_module
    from openrlhf.models.actor import Actor
    from openrlhf.utils.deepspeed.deepspeed_utils import get_train_ds_config

TOKENS, VOCABULARY, WIDTH, LAYERS = 8192, 8192, 1024, 12


def memory_of(action: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that an action has at its peak, and leaves."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = action()  # noqa: F841
    held = peak = 0
    events = profiled.profiler.kineto_results.events()
    memory_events = [event for event in events if event.name() == "[memory]"]
    for event in sorted(memory_events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak, held


def logit_bytes(*, train: bool, with_density: bool = False) -> float:
    """Bytes of a logit at the peak of a forward pass, and of its backward pass.

    ``with_density``: every position has the density of ``latent``.
    """
    config = LlamaConfig(
        num_hidden_layers=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        actor = Actor(folder, attn_implementation="sdpa", param_dtype="bf16")
    tokens = torch.arange(TOKENS).unsqueeze(0)
    mask = torch.ones_like(tokens)
    latent = create("latent", density="latent" if with_density else "token")
    record = random_record(TOKENS, RecordKind(rate=1.1, candidates=latent.k, noisy=False), VOCABULARY, seed=0)
    record = replace(record, normalizer=np.zeros(TOKENS, np.float32))

    def step() -> Any:
        scope = ReplayScope(actor.model.get_input_embeddings(), measure=False, perturbation=latent)
        with scope([record], mask), densities(scope, temperature=1.0):
            log_probs, output = actor(tokens, mask[:, 1:], attention_mask=mask, return_output=True)
            if train:
                log_probs.mean().backward()
        return output

    with nullcontext() if train else torch.no_grad():
        peak, _held = memory_of(step)
    return peak / (TOKENS * VOCABULARY)


def peaks(stage: int, micro_batches: int) -> tuple[int, int]:
    """Bytes at the peak of the last backward pass and of the second update."""
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers).to(torch.bfloat16)
    adam = {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True, "fused": True}}
    config = get_train_ds_config(offload=False, adam_offload=False, stage=stage, zpg=1, optim_config=adam)
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches}
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    row = torch.ones(1, WIDTH, dtype=torch.bfloat16)
    backward = 0
    update = 0
    for _ in range(2):
        held = 0
        for _ in range(micro_batches):
            peak, change = memory_of(lambda: engine.backward(engine(row).float().mean()))
            backward = held + peak
            held += change
            peak, change = memory_of(engine.step)
            update = held + peak
            held += change
    return backward, update


def main() -> None:
    # Without DeepSpeed's all-reduce kernel, which it would compile. The attribute deepspeed.comm.torch is torch itself,
    # so the module of that name is looked up.
    backend = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo")
    # As the rows of the patch table that concern log-probabilities.
    actor_module.log_probs_from_logits = with_overrides(without_flash_attn(actor_module.log_probs_from_logits))
    for with_density in (False, True):
        print(json.dumps([logit_bytes(train=train, with_density=with_density) for train in (False, True)]))
    for stage in map(int, sys.argv[1:]):
        print(json.dumps([peaks(stage, 1), peaks(stage, 2)]))


if __name__ == "__main__":
    main()
