# SPDX-License-Identifier: Apache-2.0
"""Small random models, one for each way in which an architecture embeds its tokens."""

from pathlib import Path
from typing import Any

import torch

from perturbations.replay.routing import routers
from tests.stack.harness import load_in_float32

VOCABULARY, HIDDEN = 512, 128
# The range is wide enough that an answer depends on what was fed: of 0.02, two layers pass little on.
_SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 256}
_SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
_SHAPE |= {"max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PER_LAYER: dict[str, Any] = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16}
_PER_LAYER |= {"head_dim": 32, "num_hidden_layers": 4, "num_kv_shared_layers": 0, "sliding_window": 64}
_PER_LAYER |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
# Not tied: with a tied head a random model of scaled embeddings repeats its input, whatever came before.
_GEMMA: dict[str, Any] = {"head_dim": 32, "sliding_window": 64, "tie_word_embeddings": False}
_EXPERTS: dict[str, Any] = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Name: Transformers' model type, options of its configuration, options of vLLM's engine.
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("llama", {"tie_word_embeddings": False}, {}),
    "scaled": ("gemma3_text", _GEMMA, {}),
    "multiplied": ("granite", {"embedding_multiplier": 12.0, "attention_multiplier": 0.2}, {}),
    "transformers": ("smollm3", {}, {}),
    "transformers_scaled": ("gemma3_text", _GEMMA, {"model_impl": "transformers"}),
    "mixture": ("qwen3_moe", _EXPERTS, {}),
    "per_layer": ("gemma4_text", {**_PER_LAYER, "global_head_dim": 32, "num_global_key_value_heads": 2}, {}),
    "per_layer_3n": ("gemma3n_text", {**_PER_LAYER, "intermediate_size": [256] * 4, "laurel_rank": 8}, {}),
}


def tiny_model(form: str, folder: Path, seed: int = 0) -> str:
    """Saves the model of a form under ``folder``; its path."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options, _ = FORMS[form]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **options})
    path = folder / form
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    _save_tokenizer(path)
    return str(path)


def _save_tokenizer(path: Path) -> None:
    """A word for each row of the embedding."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    words = [*special.values(), *(f"w{i}" for i in range(3, VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)


def tie_experts(folder: str | Path) -> None:
    """Gives experts 1, 2 and 3 of a mixture the same scores up to rounding, so that any of them is the second."""
    model = load_in_float32(str(folder))
    with torch.no_grad():
        for router in routers(model):
            router.weight[2:] = router.weight[1] * torch.tensor([[1 + 1e-7], [1 - 1e-7]])
    model.save_pretrained(folder)
