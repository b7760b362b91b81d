# SPDX-License-Identifier: Apache-2.0
"""Run by test_tarpo.py as two ranks: TARPO's router beside a tiny model under DeepSpeed ZeRO-2 and ZeRO-3 on CPU."""

from __future__ import annotations

import os
import sys
from importlib import import_module

RANK, PORT = int(sys.argv[1]), sys.argv[2]
os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT, RANK=str(RANK), WORLD_SIZE="2")
os.environ.update(LOCAL_RANK="0", OMP_NUM_THREADS="1")


def train(stage: int) -> None:
    """Steps in which rank 0, rank 1, neither and both have positions that the router was asked about.

    Ranks that gather or reduce different parameters would hang, or add up what does not belong together.
    """
    from types import SimpleNamespace

    import deepspeed
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from ngrpo.trainers.openrlhf.density_loss import densities
    from ngrpo.trainers.openrlhf.loss import with_replacements
    from ngrpo.trainers.openrlhf.model_actors import replay_scope
    from perturbations import ReplayRecord, create, parameters

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}},
    }
    kept = HfDeepSpeedConfig(config)  # transformers looks for it as long as it lives
    tiny = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = LlamaForCausalLM(tiny)
    perturbation = create("tarpo", k=2)
    module = parameters.attach(model, perturbation)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config, dist_init_required=False
    )
    weights = np.array([[1.0, 0.0, 0.0], [0.0, 0.7, 0.3]], np.float32)
    ids = np.tile(np.array([[5, 1, 3]], np.int32), (2, 1))
    record = ReplayRecord(9, 1, 8, np.array([2, 5], np.int32), ids, weights, None, np.ones(2, bool))
    tokens = torch.arange(8).view(1, 8) + RANK
    mask, seen = torch.ones_like(tokens), []

    def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    for asked in (RANK == 0, RANK == 1, False, True):
        scope = replay_scope(SimpleNamespace(model=engine), perturbation)
        with scope([record if asked else None], mask), densities(scope, 1.0):
            logits = engine(tokens, attention_mask=mask).logits.float()
            engine.backward(-with_replacements(log_probs)(logits, tokens.roll(-1, 1))[:, :-1].mean())
        engine.step()
        with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=stage == 3):
            seen.append({name: p.detach().float().clone() for name, p in module.named_parameters()})
    # Adam's first step is of the rate's size.
    assert abs(seen[0]["head.bias_shift"].abs().mean().item() - 0.02) < 0.002, seen[0]
    assert all(p.isfinite().all() and p.any() for p in seen[-1].values())
    sums = torch.stack([p.sum() for p in seen[-1].values()])
    both = [torch.zeros_like(sums) for _ in range(2)]
    torch.distributed.all_gather(both, sums)
    assert torch.equal(*both), "the ranks have drifted apart"
    del kept


def main() -> None:
    import torch

    from ngrpo.hardware.cpu import waited_for

    # As in zero_gate.py: DeepSpeed's own all-reduce would have to be compiled first.
    backend = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    backend.TorchBackend.all_gather_into_tensor = waited_for(backend.TorchBackend.all_gather_into_tensor)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    for stage in (2, 3):
        train(stage)
    torch.distributed.destroy_process_group()  # its threads may abort the process at its end


if __name__ == "__main__":
    main()
