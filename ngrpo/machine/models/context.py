# SPDX-License-Identifier: Apache-2.0
"""The longest sequence that a model takes, from its config.json."""

import os
from collections.abc import Mapping
from typing import Any

# Where a config.json has the longest context, by vLLM 0.26 to 0.31.
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


def context_of(config: Mapping[str, Any]) -> int | None:
    """The most tokens that vLLM 0.26 to 0.31 takes with this config.json.

    None where it names no limit, where a scaling of the positions makes the context longer than it says, and where the
    user allows longer sequences by vLLM's environment variable.
    """
    if os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "").strip().lower() in ("1", "true"):
        return None
    text_config = config.get("text_config")
    if not isinstance(text_config, Mapping):
        text_config = config
    limits = [text_config[key] for key in _CONTEXT if isinstance(text_config.get(key), int)]
    return None if not limits or _scales_positions(text_config) else min(limits)


def _scales_positions(text_config: Mapping[str, Any]) -> bool:
    """Whether a scaling of the positions makes the context longer than the config.json says."""
    scaling = text_config.get("rope_scaling") or text_config.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    has_scaling_per_layer = any(isinstance(value, Mapping) for value in scaling.values())
    return kind not in ("default", "llama3") or has_scaling_per_layer
