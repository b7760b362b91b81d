# SPDX-License-Identifier: Apache-2.0
"""Run by test_trained_parameters.py as two ranks: HRPO's gate, then TARPO's router, under ZeRO-2 and ZeRO-3 on CPU."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.stack.zero_ranks import assert_trained_alike, configuration, rank_of_two, tiny_llama, whole_parameters


def train_gate(stage: int, rank: int, target: Path) -> None:
    """Steps in which rank 0, rank 1, neither and both have perturbed positions; then both kinds of checkpoints.

    Ranks that reduce different parameters would hang, or add up what does not belong together.
    """
    from types import SimpleNamespace

    import deepspeed
    import torch
    from torch.optim.lr_scheduler import LambdaLR
    from transformers.integrations import HfDeepSpeedConfig

    from ngrpo.machine.storage import parameters_file
    from ngrpo.trainers.openrlhf.model_actors import replay_scope, separate
    from perturbations import create, parameters
    from tests.fast.replay_examples import small

    config = configuration(stage, learning_rate=1e-3)
    kept = HfDeepSpeedConfig(config)  # transformers looks for it as long as it lives
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = tiny_llama()
    perturbation = create("hrpo", k=1, gate_lr=0.02, lambda_lr=1.0)
    parameters_file.attach(model, perturbation, str(target))
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
    tokens = torch.arange(8).view(1, 8) + rank
    trained = []
    for perturbed in (rank == 0, rank == 1, False, True):
        record = small([2, 5]).truncate(8) if perturbed else None
        with replay_scope(SimpleNamespace(model=engine), perturbation)([record], torch.ones_like(tokens)):
            logits = engine(tokens, attention_mask=torch.ones_like(tokens)).logits.float()
            engine.backward(-logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).mean())
        engine.step()
        trained.append(whole_parameters(module, stage))
    # Adam's first step is of the rate's size.
    assert abs(trained[0]["lambda_shift"].abs().mean().item() - 1.0) < 0.1
    assert_trained_alike(trained[-1])
    checkpoint = str(target / f"resume-{stage}")
    engine.save_checkpoint(checkpoint)
    with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0, enabled=stage == 3):
        for parameter in module.parameters():
            parameter.data.zero_()
    engine.load_checkpoint(checkpoint)
    wrong = {n: (p - trained[-1][n]).abs().max().item() for n, p in whole_parameters(module, stage).items()}
    assert not any(wrong.values()), f"stage {stage}, rank {rank}: off by {wrong} after its checkpoint was loaded"
    state = engine._consolidated_16bit_state_dict() if stage == 3 else model.state_dict()
    if rank == 0:
        folder = str(target / f"zero-{stage}")
        model.save_pretrained(folder, state_dict=state)
        again = perturbation.module(16)
        assert parameters_file.load_saved(again, perturbation, folder)
        assert all(torch.equal(p, trained[-1][name]) for name, p in again.named_parameters())
    torch.distributed.barrier()
    del kept


def train_router(stage: int, rank: int) -> None:
    """Steps in which rank 0, rank 1, neither and both have positions that the router was asked about."""
    from types import SimpleNamespace

    import deepspeed
    import numpy as np
    import torch
    from transformers.integrations import HfDeepSpeedConfig

    from ngrpo.trainers.common.densities import densities
    from ngrpo.trainers.openrlhf.model_actors import replay_scope
    from perturbations import ReplayRecord, create, parameters
    from tests.fast.density_model import hooked

    config = configuration(stage, learning_rate=0.02)
    kept = HfDeepSpeedConfig(config)  # transformers looks for it as long as it lives
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = tiny_llama()
    perturbation = create("tarpo", k=2)
    module = parameters.attach(model, perturbation)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config, dist_init_required=False
    )
    weights = np.array([[1.0, 0.0, 0.0], [0.0, 0.7, 0.3]], np.float32)
    ids = np.tile(np.array([[5, 1, 3]], np.int32), (2, 1))
    record = ReplayRecord(9, 1, 8, np.array([2, 5], np.int32), ids, weights, None, np.ones(2, bool))
    tokens = torch.arange(8).view(1, 8) + rank
    mask, trained = torch.ones_like(tokens), []
    for perturbed in (rank == 0, rank == 1, False, True):
        scope = replay_scope(SimpleNamespace(model=engine), perturbation)
        with scope([record if perturbed else None], mask), densities(scope, 1.0):
            logits = engine(tokens, attention_mask=mask).logits.float()
            engine.backward(-hooked(logits, tokens.roll(-1, 1))[:, :-1].mean())
        engine.step()
        trained.append(whole_parameters(module, stage))
    # Adam's first step is of the rate's size.
    assert abs(trained[0]["head.bias_shift"].abs().mean().item() - 0.02) < 0.002, trained[0]
    assert_trained_alike(trained[-1])
    del kept


def main(rank: int, port: str, target: str) -> None:
    with rank_of_two(rank, port):
        for stage in (2, 3):
            train_gate(stage, rank, Path(target))
            train_router(stage, rank)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
