# SPDX-License-Identifier: Apache-2.0
"""Which of a vLLM model's tables its text goes through, and where the override stands in an embedding that scales."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngrpo.rollout.check_texts import reads_tokens_elsewhere
from ngrpo.rollout.input_override import InputOverride, find_input_embedding, tables_of_text
from perturbations.errors import UsageError
from tests.support.replaced_rows import replace_rows

V, D = 16, 4


def table(rows: int = V) -> Any:
    """vLLM's embedding without its constructor, which needs an engine."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    module = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    nn.Module.__init__(module)
    module.quant_method, module.tp_size = UnquantizedEmbeddingMethod(), 1
    module.num_embeddings, module.embedding_dim = rows, D
    module.weight = nn.Parameter(torch.randn(rows, D, generator=torch.Generator().manual_seed(rows)), False)
    return module


class Text(nn.Module):
    """A text model with a table for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens_per_layer, self.embed_tokens = table(), table()

    def embed_input_ids(self, ids: Tensor) -> Tensor:
        return 3.0 * self.embed_tokens(ids)


class Multimodal(nn.Module):
    """Its tower looks up positions; its own way of embedding looks up what the layers need as well."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.language_model = table(9), Text()

    def get_language_model(self) -> nn.Module:
        return self.language_model

    def embed_input_ids(self, ids: Tensor) -> Tensor:
        self.language_model.embed_tokens_per_layer(ids)
        return self.language_model.embed_input_ids(ids)


class Unknown(Multimodal):
    """As vLLM's Transformers backend without parts that it knows."""

    def get_language_model(self) -> nn.Module:
        raise NotImplementedError


def test_the_main_table_is_found_by_looking_tokens_up() -> None:
    text, both = Text(), Multimodal()
    assert find_input_embedding(text) is text.embed_tokens
    assert find_input_embedding(both) is both.language_model.embed_tokens
    assert reads_tokens_elsewhere(tables_of_text(both), both.language_model.embed_tokens)
    del text.embed_tokens_per_layer
    assert not reads_tokens_elsewhere(tables_of_text(text), text.embed_tokens)
    assert not any(hooks for module in both.modules() for hooks in [module._forward_hooks])


def test_a_token_made_of_several_tables_is_refused() -> None:
    with pytest.raises(UsageError, match=r"combines 2 of them .*embed_tokens_per_layer, language_model.embed_tokens"):
        find_input_embedding(Unknown())
    with pytest.raises(UsageError, match=r"has 2 input embeddings .* nothing in it says"):
        find_input_embedding(nn.ModuleDict({"one": table(), "two": table()}))
    with pytest.raises(UsageError, match="has 0 input embeddings"):
        find_input_embedding(nn.Linear(2, 2))


def test_a_factor_inside_of_the_module_comes_after_the_override() -> None:
    """As vLLM's Transformers backend makes of Gemma's embedding, whose forward multiplies what its base's gives."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.models.transformers.utils import _rebase_on_vocab_parallel

    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 5.0

    module = table()
    module.__class__ = _rebase_on_vocab_parallel(Scaled)
    override = InputOverride(module, 8, 2, D, torch.float32, torch.device("cpu"), VocabParallelEmbedding)
    vector, ids = torch.randn(1, D), torch.arange(3)[None]
    replace_rows(override, [2], vector)
    rows = torch.cat([module.weight[:2], vector])[None]
    torch.testing.assert_close(module(ids), 5.0 * rows, rtol=0, atol=0)
    torch.testing.assert_close(override.lookup(ids), module.weight[None, :3], rtol=0, atol=0)
