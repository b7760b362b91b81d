# SPDX-License-Identifier: Apache-2.0
"""The graph's recall on the packaged model's own embeddings."""

import pytest
import torch

from perturbations.neighbors import ExactIndex, HnswIndex
from tests.stack.harness import load_in_float32

pytestmark = pytest.mark.slow
pytest.importorskip("faiss", reason="faiss is not installed: pip install 'ngrpo[hnsw]'")


@pytest.mark.parametrize("metric", ["cosine", "l2", "dot"])
def test_recall_on_the_whole_vocabulary(smollm2: str, metric: str) -> None:
    embedding = load_in_float32(smollm2).get_input_embeddings().weight.detach().bfloat16()
    exact, graph = ExactIndex(embedding, metric), HnswIndex(embedding, metric)
    blocks = torch.arange(0, len(embedding), 24).split(64)
    want, found = (torch.cat([index.search(block, 2)[0] for block in blocks]) for index in (exact, graph))
    assert (found.unsqueeze(-1) == want.unsqueeze(1)).any(dim=1).float().mean() >= 0.99
