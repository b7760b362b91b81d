# SPDX-License-Identifier: Apache-2.0
"""Run by test_density_ranks.py as two ranks over gloo: an embedding of which each holds half, as under ZeRO-3.

Each lookup gathers the matrix and each of its backward passes reduces the gradient, so ranks that look up, or
differentiate, a different number of times stop each other. DeepSpeed itself: tests/stack/test_zero_density.py.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from perturbations.base import Perturbation
from tests.fast.density_model import EVERY, Model, name_of, record_of, run
from tests.fast.density_steps import D, V, a_step, likely

HALF = D // 2


class Gather(torch.autograd.Function):
    """Both ranks' halves side by side; backward gives each rank the sum of both gradients for its own half."""

    @staticmethod
    def forward(_ctx: Any, half: Tensor) -> Tensor:
        halves = [torch.empty_like(half) for _ in range(2)]
        dist.all_gather(halves, half)
        return torch.cat(halves, dim=-1)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient[:, dist.get_rank() * HALF :][:, :HALF]


class HalfEmbedding(nn.Module):
    """This rank's half of an embedding matrix."""

    embedding_dim = D

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.shard = nn.Parameter(matrix[:, dist.get_rank() * HALF :][:, :HALF].clone())

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, Gather.apply(self.shard))


def check(perturbation: Perturbation) -> None:
    """Batches in which rank 0, rank 1, neither and both have perturbed positions: no gradient first, then one."""
    rank, full = dist.get_rank(), record_of(perturbation, a_step(likely(4)))
    for perturbed in ((True, False), (False, True), (False, False), (True, True)):
        records = [full if p else full.truncate(5) for p in perturbed]
        batches = [(torch.arange(12).view(1, 12) + other) % V for other in range(2)]
        mask = torch.ones_like(batches[0])
        model, plain = Model(), Model()
        model.embedding = HalfEmbedding(plain.embedding.weight.detach())
        with torch.no_grad():
            run(model, perturbation, batches[rank], mask, [records[rank]])
        run(model, perturbation, batches[rank], mask, [records[rank]])[0].sum().backward()
        for tokens, record in zip(batches, records):
            run(plain, perturbation, tokens, mask, [record])[0].sum().backward()
        want = plain.embedding.weight.grad[:, rank * HALF :][:, :HALF]
        torch.testing.assert_close(model.embedding.shard.grad, want, rtol=1e-4, atol=1e-4)


def main(rank: int, port: str) -> None:
    torch.set_num_threads(1)
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for perturbation in EVERY:
        check(perturbation)
        print(name_of(perturbation), flush=True)
    dist.barrier()
    dist.destroy_process_group()  # its threads, left to the interpreter, may abort the process at its end


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
