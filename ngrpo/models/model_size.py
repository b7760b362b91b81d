# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model from its config.json: no weights, no network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ngrpo.models import config_file
from perturbations.errors import UsageError

_SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size")
_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


@dataclass(frozen=True)
class ModelSize:
    """What memory depends on.

    Attributes:
        parameters: all of them, a tied head counted once.
        layers: decoder layers.
        hidden: width h of the residual stream.
        intermediate: width m of the MLP.
        heads: attention heads.
        kv_heads: heads of keys and values.
        head_dim: width of a head.
        vocabulary: V, rows of the embedding.
        head_norms: whether queries and keys are normalised, as in Qwen3.
        source: where the values come from.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    head_norms: bool
    source: str

    @property
    def saved_bytes_per_token(self) -> int:
        """What a layer keeps of each token for the backward pass, with SDPA or flash attention.

        Two RMSNorms: input, float32 copy and output, 8h each; queries and attention output, 4q; keys and values, 4·kv;
        gate, up, activation and their product, 8m; and of normalised heads the float32 copy and the output, 6(q + kv).
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        head_norms = 6 * (queries + keys) if self.head_norms else 0
        return 16 * self.hidden + 4 * queries + 4 * keys + 8 * self.intermediate + head_norms


def find(name: str) -> ModelSize | None:
    """The sizes of a model.

    Looked for in its config.json, and then in the table that comes with the project, of the models of the papers'
    recipes.

    Args:
        name: as ``--model`` takes it.

    Returns:
        None where nothing of this is known here.

    Raises:
        UsageError: for a config.json that is not JSON, or lacks a size.
    """
    path = config_file.find(name)
    if path is not None:
        return of_config(config_file.read(path), str(path))
    configs = json.loads(files("ngrpo.models").joinpath("models.json").read_text(encoding="utf-8"))
    return of_config(configs[name], "the table of this project") if name in configs else None


def of_config(config: dict[str, Any], source: str) -> ModelSize | None:
    """The sizes that a config.json says; None for an architecture that is not counted here.

    Raises:
        UsageError: where a size is missing.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        return None
    try:
        hidden, layers, intermediate = (int(config[key]) for key in _SIZES)
        heads, vocabulary = int(config["num_attention_heads"]), int(config["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{source}: no whole number for {error}. Give the model's own config.json.") from None
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    queries, keys = heads * head_dim, kv_heads * head_dim
    attention = hidden * queries + 2 * hidden * keys + queries * hidden
    if family == "qwen2" or config.get("attention_bias"):
        attention += queries + 2 * keys
    if config.get("attention_bias") and family != "qwen2":
        attention += hidden  # that of the output projection, which Qwen2 has not
    if family == "qwen3":
        attention += 2 * head_dim
    per_layer = attention + 3 * hidden * intermediate + 2 * hidden
    matrices = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return ModelSize(
        parameters=matrices + layers * per_layer + hidden,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        head_norms=family == "qwen3",
        source=source,
    )
