# SPDX-License-Identifier: Apache-2.0
"""A small random model of SmolLM2's vocabulary, as a folder that whole runs train."""

from pathlib import Path
from typing import Any

LOGIT_SCALE = 5.0
"""What the output embedding is multiplied by: 0.2 · √64 · 5.0 is the standard deviation of a logit."""


def tiny_language_model(folder: Path, tokenizer_folder: str) -> str:
    """A Llama of two layers whose next token is certain at some positions and open at others, as a trained model's is.

    Its logits have a standard deviation of about 8, and its draws 1.3 nats of entropy. At the usual initialization all
    of 49,152 tokens are about as likely.

    Returns:
        The folder.
    """
    return tiny_folder(
        folder,
        tokenizer_folder,
        "llama",
        head_scale=LOGIT_SCALE,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )


def tiny_folder(folder: Path, tokenizer_folder: str, model_type: str, head_scale: float = 1.0, **options: Any) -> str:
    """Writes the model, from seed 0, with SmolLM2's tokenizer.

    Args:
        folder: is written to.
        tokenizer_folder: whose tokenizer it gets.
        model_type: of a causal language model in transformers.
        head_scale: what its output embedding is multiplied by.
        options: of its configuration, its sizes among them.

    Returns:
        The folder.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    sizes = {
        "vocab_size": 49152,
        "hidden_size": 128,
        "intermediate_size": 256,
        "max_position_embeddings": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = AutoConfig.for_model(model_type, **{**sizes, **options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if head_scale != 1.0:
        model.get_output_embeddings().weight.data *= head_scale
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return str(folder)
