# SPDX-License-Identifier: Apache-2.0
"""Run by test_tensor_parallel.py as two ranks: vLLM's own vocabulary-parallel layers, without an engine."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch

SIZE, WIDTH = 1003, 32  # 512 rows for each rank, of which the second has 21 of padding


def main(rank: int, port: str) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    torch.set_num_threads(1)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
        initialize_model_parallel(2)
        check()
    print("ok", flush=True)


def check() -> None:
    """Rows, scale and neighbors are those of the whole matrices, of which each rank holds half."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    from ngrpo.rollout.attach import _embeddings
    from perturbations.neighbors import ExactIndex

    draws = torch.Generator().manual_seed(0)
    whole = {space: torch.randn(SIZE, WIDTH, generator=draws) for space in ("input", "output")}
    layers = [kind(SIZE, WIDTH, params_dtype=torch.float32) for kind in (VocabParallelEmbedding, ParallelLMHead)]
    for layer, matrix in zip(layers, whole.values()):
        layer.weight.weight_loader(layer.weight, matrix)
    embedding, head = layers
    tokenizer = SimpleNamespace(special_ids=lambda size: [3, 900], vocabulary=list)
    override = SimpleNamespace(lookup=embedding.forward)
    model = torch.nn.ModuleDict({"embed_tokens": embedding, "lm_head": head})
    found = _embeddings(model, embedding, override, SIZE, tokenizer)
    tokens = torch.arange(SIZE)
    for space, matrix in whole.items():
        assert torch.equal(found.matrix(space), matrix)
        for metric in ("cosine", "l2", "l1", "dot"):
            want = ExactIndex(matrix, metric, [3, 900]).query(tokens, 3)
            ids, scores = found.index(metric, space, skip_special=True).query(tokens, 3)
            assert torch.equal(ids, want[0]) and torch.equal(scores, want[1]), (space, metric)
    torch.testing.assert_close(found.rms(), whole["input"].square().mean().sqrt())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
