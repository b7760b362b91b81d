# SPDX-License-Identifier: Apache-2.0
"""Small random models, one for each way in which an architecture embeds its tokens."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from perturbations.replay.routing import routers
from tests.stack.harness import load_in_float32

VOCABULARY = 512
HIDDEN = 128

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # An answer must depend on what was fed: with a range of 0.02, two layers pass little on.
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PER_LAYER: dict[str, Any] = {
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 0,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_GEMMA: dict[str, Any] = {
    "head_dim": 32,
    "sliding_window": 64,
    # With a tied head a random model of scaled embeddings repeats its input, whatever came before.
    "tie_word_embeddings": False,
}
_GEMMA_3N: dict[str, Any] = {
    **_PER_LAYER,
    "intermediate_size": [256] * 4,
    "laurel_rank": 8,
}
_GEMMA_4: dict[str, Any] = {
    **_PER_LAYER,
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
}
_EXPERTS: dict[str, Any] = {
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


class Form(NamedTuple):
    """Transformers' model type, options of its configuration, options of vLLM's engine."""

    model_type: str
    options: dict[str, Any]
    engine_options: dict[str, Any]


FORMS: dict[str, Form] = {
    "plain": Form("llama", {"tie_word_embeddings": False}, {}),
    "scaled": Form("gemma3_text", _GEMMA, {}),
    "multiplied": Form("granite", _GRANITE, {}),
    "transformers": Form("smollm3", {}, {}),
    "transformers_scaled": Form("gemma3_text", _GEMMA, {"model_impl": "transformers"}),
    "mixture": Form("qwen3_moe", _EXPERTS, {}),
    "per_layer": Form("gemma4_text", _GEMMA_4, {}),
    "per_layer_3n": Form("gemma3n_text", _GEMMA_3N, {}),
}


def tiny_model(form: str, folder: Path, seed: int = 0) -> str:
    """Saves the model of a form under ``folder``; its path."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options, _ = FORMS[form]
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **options})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = folder / form
    model.save_pretrained(path)
    _save_tokenizer(path)
    return str(path)


def _save_tokenizer(path: Path) -> None:
    """A word for each row of the embedding."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    words = list(special.values())
    words += [f"w{token}" for token in range(len(special), VOCABULARY)]
    vocabulary = {word: token for token, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)


def tie_experts(folder: str | Path) -> None:
    """Gives experts 1, 2 and 3 of a mixture the same scores up to rounding, so that any of them is the second."""
    model = load_in_float32(str(folder))
    near_one = torch.tensor([[1 + 1e-7], [1 - 1e-7]])
    with torch.no_grad():
        for router in routers(model):
            router.weight[2:] = near_one * router.weight[1]
    model.save_pretrained(folder)
