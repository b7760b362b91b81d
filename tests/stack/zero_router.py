# SPDX-License-Identifier: Apache-2.0
"""Run by test_tarpo.py as two ranks: TARPO's router beside a tiny model under DeepSpeed ZeRO-2 and ZeRO-3 on CPU."""

from __future__ import annotations

import sys

from tests.stack.zero_ranks import assert_trained_alike, configuration, rank_of_two, tiny_llama, whole_parameters


def train(stage: int, rank: int) -> None:
    """Steps in which rank 0, rank 1, neither and both have positions that the router was asked about.

    Ranks that gather or reduce different parameters would hang, or add up what does not belong together.
    """
    from types import SimpleNamespace

    import deepspeed
    import numpy as np
    import torch
    from transformers.integrations import HfDeepSpeedConfig

    from ngrpo.trainers.common.log_probs import densities
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


def main(rank: int, port: str) -> None:
    with rank_of_two(rank, port):
        for stage in (2, 3):
            train(stage, rank)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
