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
from torch import Tensor

from perturbations.embeddings import ModelEmbeddings
from perturbations.neighbors import ExactIndex
from perturbations.neighbors.base import Shard, over_ranks
from tests.support.own_process import run_two_ranks

SIZE = 331
HALF = 168  # the second rank has five rows of padding


@pytest.mark.more
def test_two_ranks_find_what_one_finds() -> None:
    for output in run_two_ranks(__name__):
        assert output.split() == ["torch.float32", "torch.bfloat16"]


def full_matrix() -> Tensor:
    """With equal rows on both ranks, zero rows, and a token whose nearest ones are all of the other rank."""
    rows = torch.randn(SIZE, 24, generator=torch.Generator().manual_seed(3))
    rows[160:180] = rows[7]
    rows[[3, 200]] = 0.0
    rows[300:] = rows[1] + 1e-3 * rows[300:]
    return rows


def shard_of(matrix: Tensor, rank: int) -> Shard:
    """A rank's half of a matrix that is padded to two equal halves."""
    padding = torch.zeros(2 * HALF - SIZE, 24, dtype=matrix.dtype)
    padded = torch.cat([matrix, padding])
    first = rank * HALF
    return Shard(padded[first : first + HALF].clone(), SIZE, first, over_ranks(dist.group.WORLD))


def model_embeddings(matrix: Tensor | Shard) -> ModelEmbeddings:
    return ModelEmbeddings(lambda ids: ids, lambda: matrix, token_texts=lambda: ["a"] * SIZE)


def check_search(matrix: Tensor, shard: Shard) -> None:
    """The shard's matrix, rows and neighbors are those of one rank, bit for bit."""
    tokens = torch.arange(SIZE)
    assert torch.equal(shard.whole(), matrix)
    assert torch.equal(shard.lookup(tokens), matrix)
    for metric in ("cosine", "l2", "l1", "dot"):
        for queried in (tokens, tokens[:1], tokens[200:230]):
            ids, scores = ExactIndex(matrix, metric, [5, 170]).query(queried, 4)
            shard_ids, shard_scores = ExactIndex(shard, metric, [5, 170]).query(queried, 4)
            assert torch.equal(ids, shard_ids), (matrix.dtype, metric)
            assert torch.equal(scores, shard_scores), (matrix.dtype, metric)


def check_drift(matrix: Tensor, shard: Shard) -> None:
    """The scale, and the drift after a weight sync, are those of one rank."""
    alone = model_embeddings(matrix)
    shared = model_embeddings(shard)
    assert torch.equal(alone.matrix(), shared.matrix())
    torch.testing.assert_close(alone.rms(), shared.rms(), rtol=1e-7, atol=0.0)

    tokens = torch.arange(40)
    for refresh in ("every_sync", "never"):
        alone.index("l2", skip_same_word=True, refresh=refresh).query(tokens, 2)
        shared.index("l2", skip_same_word=True, refresh=refresh).query(tokens, 2)
    matrix.add_(0.5 * matrix.roll(1, 1))
    shard.rows.add_(0.5 * shard.rows.roll(1, 1))
    alone.refresh()
    shared.refresh()
    assert alone.drift() == shared.drift()
    assert alone.drift().changed > 0


def main(rank: int, port: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    for dtype in (torch.float32, torch.bfloat16):
        matrix = full_matrix().to(dtype)
        shard = shard_of(matrix, rank)
        check_search(matrix, shard)
        check_drift(matrix, shard)
        print(dtype, flush=True)
    dist.barrier()
    dist.destroy_process_group()  # its threads, left to the interpreter, may abort the process at its end


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    os._exit(0)  # past the interpreter's end, where gloo's threads abort the process now and then
