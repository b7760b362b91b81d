# SPDX-License-Identifier: Apache-2.0
"""A small random model of SmolLM2's vocabulary, as a folder that whole runs train."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tiny_folder(folder: Path, tokenizer_folder: str, model_type: str, **options: Any) -> str:
    """Writes the model, from seed 0, with SmolLM2's tokenizer.

    Args:
        folder: is written to.
        tokenizer_folder: whose tokenizer it gets.
        model_type: of a causal language model in transformers.
        options: of its configuration, beside its sizes.

    Returns:
        The folder.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.for_model(
        model_type,
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        **options,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return str(folder)
