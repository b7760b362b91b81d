# SPDX-License-Identifier: Apache-2.0
"""Run by test_zero_density.py as two ranks: every density beside a tiny model under DeepSpeed ZeRO-3 on CPU."""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import Any

from tests.stack.zero_ranks import configuration, rank_of_two, tiny_llama

TEMPERATURE = 0.8


def log_probs(model: Any, perturbation: Any, record: Any, tokens: Any) -> Any:
    """The log-probabilities of a replayed forward, as the trainer takes them, (1, T)."""
    from types import SimpleNamespace

    import torch

    from ngrpo.trainers.common.log_probs import densities
    from ngrpo.trainers.openrlhf.model_actors import replay_scope
    from tests.fast.density_model import hooked

    mask = torch.ones_like(tokens)
    scope = replay_scope(SimpleNamespace(model=model), perturbation)
    with scope([record], mask), densities(scope, TEMPERATURE) as ours:
        logits = model(tokens, attention_mask=mask).logits.float() / TEMPERATURE
        found = hooked(logits, torch.roll(tokens, -1, 1))
        return torch.cat([ours.for_policy_loss(found[:, :-1]), found[:, -1:]], dim=1)


def check(engine: Any, plain: Any, perturbation: Any, rank: int) -> None:
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
        batches = [torch.arange(12).view(1, 12) + r for r in range(2)]
        with torch.no_grad():
            old = log_probs(engine, perturbation, records[rank], batches[rank])
            torch.testing.assert_close(old, log_probs(plain, perturbation, records[rank], batches[rank]))
        engine.backward(-log_probs(engine, perturbation, records[rank], batches[rank])[:, :-1].mean())
        plain.zero_grad()
        for record, tokens in zip(records, batches):
            (-log_probs(plain, perturbation, record, tokens)[:, :-1].mean() / 2).backward()
        for (name, own), theirs in zip(engine.module.named_parameters(), plain.parameters()):
            got = safe_get_full_grad(own)
            torch.testing.assert_close(got, theirs.grad, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
        engine.step()  # with a learning rate of 0: it clears the gradient


def compare(rank: int) -> None:
    import deepspeed
    import torch
    from transformers.integrations import HfDeepSpeedConfig

    from tests.fast.density_model import EVERY, name_of

    config = configuration(stage=3)
    torch.manual_seed(3)
    plain = tiny_llama()
    kept = HfDeepSpeedConfig(config)  # transformers looks for it as long as it lives
    model = deepcopy(plain)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config, dist_init_required=False
    )
    for perturbation in EVERY:
        check(engine, plain, perturbation, rank)
        print(f"rank {rank}: {name_of(perturbation)}", flush=True)
    del kept


def main(rank: int, port: str) -> None:
    with rank_of_two(rank, port):
        compare(rank)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
