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

VOCABULARY = 16
WIDTH = 4


def table(rows: int = VOCABULARY) -> Any:
    """vLLM's embedding without its constructor, which needs an engine."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    module = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    nn.Module.__init__(module)
    module.quant_method = UnquantizedEmbeddingMethod()
    module.tp_size = 1
    module.num_embeddings = rows
    module.embedding_dim = WIDTH
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, WIDTH, generator=generator)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


class Text(nn.Module):
    """A text model with a main table, whose rows it scales, and a table for its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens_per_layer = table()
        self.embed_tokens = table()

    def embed_input_ids(self, ids: Tensor) -> Tensor:
        return 3.0 * self.embed_tokens(ids)


class Multimodal(nn.Module):
    """A model with a tower, which looks up positions. Its `embed_input_ids` looks both tables of the text up."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = table(9)
        self.language_model = Text()

    def get_language_model(self) -> nn.Module:
        return self.language_model

    def embed_input_ids(self, ids: Tensor) -> Tensor:
        self.language_model.embed_tokens_per_layer(ids)
        return self.language_model.embed_input_ids(ids)


class Unknown(Multimodal):
    """A model that names no text model, as vLLM's Transformers backend does where it recognises no parts."""

    def get_language_model(self) -> nn.Module:
        raise NotImplementedError


def test_the_main_table_is_found_by_looking_tokens_up() -> None:
    text = Text()
    multimodal = Multimodal()
    main_table = multimodal.language_model.embed_tokens
    assert find_input_embedding(text) is text.embed_tokens
    assert find_input_embedding(multimodal) is main_table
    assert reads_tokens_elsewhere(tables_of_text(multimodal), main_table)

    del text.embed_tokens_per_layer
    assert not reads_tokens_elsewhere(tables_of_text(text), text.embed_tokens)

    for name, module in multimodal.named_modules():
        assert not module._forward_hooks, f"the search left a hook on {name}"


def test_a_token_made_of_several_tables_is_refused() -> None:
    with pytest.raises(UsageError, match=r"combines 2 of them .*embed_tokens_per_layer, language_model.embed_tokens"):
        find_input_embedding(Unknown())
    two_tables = nn.ModuleDict({"one": table(), "two": table()})
    with pytest.raises(UsageError, match=r"has 2 input embeddings .* nothing in it says"):
        find_input_embedding(two_tables)
    with pytest.raises(UsageError, match="has 0 input embeddings"):
        find_input_embedding(nn.Linear(2, 2))


def test_a_factor_inside_of_the_module_comes_after_the_override() -> None:
    """vLLM's Transformers backend makes such a module of Gemma's embedding, whose forward scales its base's rows."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.models.transformers.utils import _rebase_on_vocab_parallel

    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 5.0

    module = table()
    module.__class__ = _rebase_on_vocab_parallel(Scaled)
    override = InputOverride(module, 8, 2, WIDTH, torch.float32, torch.device("cpu"), VocabParallelEmbedding)
    vector = torch.randn(1, WIDTH)
    replace_rows(override, [2], vector)

    ids = torch.arange(3)[None]
    first_rows = module.weight[None, :3]
    with_override = torch.cat([module.weight[:2], vector])[None]
    torch.testing.assert_close(module(ids), 5.0 * with_override, rtol=0, atol=0)
    torch.testing.assert_close(override.lookup(ids), first_rows, rtol=0, atol=0)
