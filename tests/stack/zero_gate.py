# SPDX-License-Identifier: Apache-2.0
"""Run by test_hrpo.py as two ranks: HRPO's gate beside a tiny model under DeepSpeed ZeRO-2 and ZeRO-3 on CPU."""

from __future__ import annotations

import os
import sys
from importlib import import_module

RANK, PORT, TARGET = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT, RANK=str(RANK), WORLD_SIZE="2")
os.environ.update(LOCAL_RANK="0", OMP_NUM_THREADS="1")


def train(stage: int) -> None:
    """Steps in which rank 0, rank 1, neither and both have perturbed positions; then both kinds of checkpoints.

    Ranks that reduce different parameters would hang, or add up what does not belong together.
    """
    from types import SimpleNamespace

    import deepspeed
    import torch
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from ngrpo.storage import parameters_file
    from ngrpo.trainers.openrlhf.model_actors import replay_scope, separate
    from perturbations import create, parameters
    from tests.fast.replay_examples import small

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
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
    perturbation = create("hrpo", k=1, gate_lr=0.02, lambda_lr=1.0)
    parameters_file.attach(model, perturbation, TARGET)
    module = parameters.attached(model)
    rates = {id(p): perturbation.learning_rate(name) for name, p in module.named_parameters()}
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        model_parameters=separate([{"params": list(model.parameters())}], rates),
        config=config,
        dist_init_required=False,
        lr_scheduler=lambda o: LambdaLR(o, lambda step: 1.0),
    )
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.02, 1.0]
    tokens = torch.arange(8).view(1, 8) + RANK
    seen = []
    for perturbed in (RANK == 0, RANK == 1, False, True):
        record = small([2, 5]).truncate(8) if perturbed else None
        with replay_scope(SimpleNamespace(model=engine), perturbation)([record], torch.ones_like(tokens)):
            logits = engine(tokens, attention_mask=torch.ones_like(tokens)).logits.float()
            engine.backward(-logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).mean())
        engine.step()
        with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=stage == 3):
            seen.append({name: p.detach().float().clone() for name, p in module.named_parameters()})
    # Adam's first step is of the rate's size.
    assert abs(seen[0]["lambda_shift"].abs().mean().item() - 1.0) < 0.1
    assert all(p.isfinite().all() and p.any() for p in seen[-1].values())
    sums = torch.stack([p.sum() for p in seen[-1].values()])
    both = [torch.zeros_like(sums) for _ in range(2)]
    torch.distributed.all_gather(both, sums)
    assert torch.equal(*both), "the ranks have drifted apart"
    engine.save_checkpoint(os.path.join(TARGET, f"resume-{stage}"))
    with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0, enabled=stage == 3):
        for parameter in module.parameters():
            parameter.data.zero_()
    engine.load_checkpoint(os.path.join(TARGET, f"resume-{stage}"))
    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=stage == 3):
        wrong = {n: (p.float() - seen[-1][n]).abs().max().item() for n, p in module.named_parameters()}
        assert not any(wrong.values()), f"stage {stage}, rank {RANK}: off by {wrong} after its checkpoint was loaded"
    state = engine._consolidated_16bit_state_dict() if stage == 3 else model.state_dict()
    if RANK == 0:
        folder = os.path.join(TARGET, f"zero-{stage}")
        model.save_pretrained(folder, state_dict=state)
        again = perturbation.module(16)
        assert parameters_file.load_saved(again, perturbation, folder)
        assert all(torch.equal(p, seen[-1][name]) for name, p in again.named_parameters())
    torch.distributed.barrier()
    del kept


def main() -> None:
    import torch

    from ngrpo.hardware.cpu import waited_for

    # Compiling DeepSpeed's shared-memory all-reduce takes half a minute; gloo does without. The attribute
    # deepspeed.comm.torch is torch itself, so the module of that name is looked up.
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
