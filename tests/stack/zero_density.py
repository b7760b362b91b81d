# SPDX-License-Identifier: Apache-2.0
"""Run by test_zero_density.py as two ranks: every density beside a tiny model under DeepSpeed ZeRO-3 on CPU."""

from __future__ import annotations

import os
import sys
from copy import deepcopy
from datetime import timedelta
from importlib import import_module
from typing import Any

RANK, PORT = int(sys.argv[1]), sys.argv[2]
os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT, RANK=str(RANK), WORLD_SIZE="2")
os.environ.update(LOCAL_RANK="0", OMP_NUM_THREADS="1")
TEMPERATURE = 0.8


def tiny() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
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


def log_probs(model: Any, perturbation: Any, record: Any, tokens: Any) -> Any:
    """The log-probabilities of a replayed forward, as the trainer takes them, (1, T)."""
    from types import SimpleNamespace

    import torch

    from ngrpo.trainers.openrlhf.density_loss import densities
    from ngrpo.trainers.openrlhf.model_actors import replay_scope
    from tests.fast.density_model import hooked

    mask = torch.ones_like(tokens)
    scope = replay_scope(SimpleNamespace(model=model), perturbation)
    with scope([record], mask), densities(scope, TEMPERATURE) as ours:
        logits = model(tokens, attention_mask=mask).logits.float() / TEMPERATURE
        found = hooked(logits, torch.roll(tokens, -1, 1))
        return torch.cat([ours.for_policy_loss(found[:, :-1]), found[:, -1:]], dim=1)


def check(engine: Any, plain: Any, perturbation: Any) -> None:
    """Batches in which rank 0, rank 1, neither and both have perturbed positions: no grad first, then a gradient.

    Ranks that make different calls would hang or abort; the gradient is the mean of both ranks', computed here
    without DeepSpeed.
    """
    import torch
    from deepspeed.utils import safe_get_full_grad

    from tests.fast.density_model import record_of
    from tests.fast.density_steps import a_step, likely

    full = record_of(perturbation, a_step(likely(4)))
    for perturbed in ((True, False), (False, True), (False, False), (True, True)):
        records = [full if p else full.truncate(5) for p in perturbed]
        batches = [torch.arange(12).view(1, 12) + rank for rank in range(2)]
        with torch.no_grad():
            old = log_probs(engine, perturbation, records[RANK], batches[RANK])
            torch.testing.assert_close(old, log_probs(plain, perturbation, records[RANK], batches[RANK]))
        engine.backward(-log_probs(engine, perturbation, records[RANK], batches[RANK])[:, :-1].mean())
        plain.zero_grad()
        for record, tokens in zip(records, batches):
            (-log_probs(plain, perturbation, record, tokens)[:, :-1].mean() / 2).backward()
        for (name, own), theirs in zip(engine.module.named_parameters(), plain.parameters()):
            got = safe_get_full_grad(own)
            torch.testing.assert_close(got, theirs.grad, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
        engine.step()  # with a learning rate of 0: it clears the gradient


def main() -> None:
    import deepspeed
    import torch
    from transformers.integrations import HfDeepSpeedConfig

    from tests.fast.density_model import EVERY, name_of

    # Compiling DeepSpeed's shared-memory all-reduce takes half a minute; gloo does without. The attribute
    # deepspeed.comm.torch is torch itself, so the module of that name is looked up.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    torch.set_num_threads(1)
    # Ranks that do not call alike fail after a minute and a half, and do not wait for the test to end them.
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=90))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    plain = tiny()
    kept = HfDeepSpeedConfig(config)  # transformers looks for it as long as it lives
    model = deepcopy(plain)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config, dist_init_required=False
    )
    for perturbation in EVERY:
        check(engine, plain, perturbation)
        print(f"rank {RANK}: {name_of(perturbation)}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # its threads may abort the process at its end
    del kept


if __name__ == "__main__":
    main()
