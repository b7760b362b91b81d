# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model from its config.json: no weights, no network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from ngrpo.machine.models import config_file


@dataclass(frozen=True)
class ModelSize:
    """What memory depends on.

    Attributes:
        parameters: all of them, a tied head counted once.
        layers: decoder layers.
        hidden: width h of the residual stream.
        intermediate: width m of the MLP, of all experts that a token goes through.
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


def table() -> dict[str, dict[str, Any]]:
    """config.json, and the number of parameters, of the models that README and recipes name."""
    return json.loads(files("ngrpo.machine.models").joinpath("models.json").read_text(encoding="utf-8"))


def find(name: str) -> ModelSize | None:
    """The sizes of a model, from its config.json or from :func:`table`.

    Args:
        name: as ``--model`` takes it.

    Returns:
        None where nothing of this is known here.

    Raises:
        UsageError: for a config.json that is not JSON.
    """
    path = config_file.find(name)
    if path is not None:
        return of_config(config_file.read(path), str(path))
    return of_config(table()[name], "the table of this project") if name in table() else None


def of_config(config: Mapping[str, Any], source: str) -> ModelSize | None:
    """The sizes that a config.json says; None for a model that the installed transformers cannot make of it."""
    try:
        return _made(json.dumps(config), source)
    except Exception:  # of the configuration's own class: whatever it makes of a file that is not its own
        return None


@lru_cache
def _made(text: str, source: str) -> ModelSize:
    config = json.loads(text)
    parameters, head_norms = config.pop("parameters", None), config.get("model_type") == "qwen3"
    if parameters is None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        read = AutoConfig.for_model(**config)
        # As OpenRLHF chooses; without memory, and so without weights.
        auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
        with torch.device("meta"):
            named = dict(auto.from_config(read).named_parameters())
        parameters = sum(parameter.numel() for parameter in named.values())
        head_norms = any("q_norm" in name for name in named)
        config = read.get_text_config().to_dict()
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    experts = config.get("num_experts_per_tok") if config.get("moe_intermediate_size") else None
    return ModelSize(
        parameters=parameters,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        intermediate=config["moe_intermediate_size"] * experts if experts else config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocabulary=config["vocab_size"],
        head_norms=head_norms,
        source=source,
    )
