# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks share the search: each looks among its own rows, and both find what one rank finds.

The file is run as two ranks over gloo, each with half of the rows of an embedding matrix.
"""

import os
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from perturbations.embeddings import ModelEmbeddings
from perturbations.neighbors import ExactIndex
from perturbations.neighbors.base import Shard, over_ranks
from tests.support.own_process import run_two_ranks

SIZE, HALF = 331, 168  # the second rank has five rows of padding


@pytest.mark.more
def test_two_ranks_find_what_one_finds() -> None:
    for output in run_two_ranks(__name__):
        assert output.split() == ["torch.float32", "torch.bfloat16"]


def matrix() -> torch.Tensor:
    """With equal rows on both ranks, zero rows, and a token whose nearest ones are all of the other rank."""
    rows = torch.randn(SIZE, 24, generator=torch.Generator().manual_seed(3))
    rows[160:180] = rows[7]
    rows[[3, 200]] = 0.0
    rows[300:] = rows[1] + 1e-3 * rows[300:]
    return rows


def main(rank: int, port: str) -> None:
    torch.set_num_threads(1)
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    group, tokens = dist.group.WORLD, torch.arange(SIZE)
    for dtype in (torch.float32, torch.bfloat16):
        whole = matrix().to(dtype)
        padded = torch.cat([whole, torch.zeros(2 * HALF - SIZE, 24, dtype=dtype)])
        shard = Shard(padded[rank * HALF : (rank + 1) * HALF].clone(), SIZE, rank * HALF, over_ranks(group))
        assert torch.equal(shard.whole(), whole) and torch.equal(shard.lookup(tokens), whole)
        for metric in ("cosine", "l2", "l1", "dot"):
            for given in (tokens, tokens[:1], tokens[200:230]):
                want, found = (ExactIndex(part, metric, [5, 170]).query(given, 4) for part in (whole, shard))
                assert torch.equal(want[0], found[0]) and torch.equal(want[1], found[1]), (dtype, metric)
        alone, shared = (
            ModelEmbeddings(lambda ids: ids, lambda part=part: part, token_texts=lambda: ["a"] * SIZE)
            for part in (whole, shard)
        )
        assert torch.equal(alone.matrix(), shared.matrix())
        torch.testing.assert_close(alone.rms(), shared.rms(), rtol=1e-7, atol=0.0)
        for refresh in ("every_sync", "never"):
            for asked in (alone, shared):
                asked.index("l2", skip_same_word=True, refresh=refresh).query(tokens[:40], 2)
        shard.rows.add_(0.5 * shard.rows.roll(1, 1))
        whole.add_(0.5 * whole.roll(1, 1))
        for asked in (alone, shared):
            asked.refresh()
        assert alone.drift() == shared.drift() and alone.drift().changed > 0
        print(dtype, flush=True)
    dist.barrier()
    dist.destroy_process_group()  # its threads, left to the interpreter, may abort the process at its end


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    os._exit(0)  # past the interpreter's end, where gloo's threads abort the process now and then
