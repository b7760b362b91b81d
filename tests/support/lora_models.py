# SPDX-License-Identifier: Apache-2.0
"""Tiny models with adapters whose B is not zero, as after some training."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model

VOCABULARY = 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "initializer_range": 0.2,
}
_EXPERTS: dict[str, Any] = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama", {**_SIZES, "tie_word_embeddings": False}),
    "tied": ("qwen3", {**_SIZES, "head_dim": 8, "tie_word_embeddings": True}),
    "conv1d": ("gpt2", _GPT2),
    "mixture": ("qwen3_moe", {**_SIZES, **_EXPERTS}),
}


def base_model(name: str) -> Any:
    """The model without adapters, the same at each call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options = MODELS[name]
    config = AutoConfig.for_model(model_type, **options)
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def adapted(base: Any, **options: Any) -> Any:
    """A model with adapters as OpenRLHF makes them, of rank 8, and with B far enough from zero to be seen."""
    base.enable_input_require_grads()
    settings = {"task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "target_modules": "all-linear", **options}
    model = get_peft_model(base, LoraConfig(**settings)).eval()
    train(model)
    return model


def train(model: Any, seed: int = 5) -> None:
    """Moves all matrices B, as an optimizer would."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
