# SPDX-License-Identifier: Apache-2.0
"""A tiny configuration of any model type, derived from the defaults of its own configuration class.

Sizes are known by their names, which configurations share; what a list says of each layer is cut to layers of every
kind. Nothing here is about one model type, but for the few of :data:`DEMANDED`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

VOCABULARY = 49280
"""Rows of the embedding: SmolLM2's 49,152 tokens, and some for placeholders of images and the like."""

FIRST_PLACEHOLDER = 49184
_LONGEST = 1024
_MOST_LAYERS = 4
_VISION_LAYERS = 1

# What a layer is, one entry for each layer.
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "layers")
_TEXT: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size", "embed_dim"), 128),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "ffn_hidden_size"), 256),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size", "dense_intermediate_size"), 256),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("moe_shared_expert_intermediate_size",), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("swa_num_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads"), 2),
    "num_global_key_value_heads": 1,
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "swa_head_dim", "global_head_dim"), 32),
    **dict.fromkeys(("d_head", "dim_head", "query_pre_attn_scalar"), 32),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "hidden_size_per_layer_input": 32,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), _LONGEST),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "sliding_window_size", "local_attention"), 64),
    "rotary_dim": 16,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 32),
    "qk_head_dim": 64,
    **dict.fromkeys(("laurel_rank", "o_lora_rank", "gated_norm_rank"), 16),
    "num_kv_shared_layers": 0,
    # Recurrent layers. Inner widths are twice the width of the model, as in their defaults.
    **dict.fromkeys(("mamba_expand", "expand"), 2),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 64),
    **dict.fromkeys(("mamba_d_ssm",), 256),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 64),
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 64),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period", "global_attn_every_n_layers"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
}
# Of towers for images, sounds and the like with outputs of the text model's width.
_TOWER: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "mlp_dim"), 128),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads", "attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("head_dim", "global_head_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "num_layers"), _VISION_LAYERS),
    **dict.fromkeys(("out_hidden_size", "output_dim", "text_hidden_size", "vision_output_dim"), 128),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim"), 128),
    "num_position_embeddings": 16,
    "window_size": 56,
    "num_global_layers": 1,
    "conf_num_hidden_layers": 1,
    "conf_num_attention_heads": 2,
}
_OUTSIDE = {"mm_tokens_per_image": 4, "projector_hidden_size": 128, "projection_hidden_size": 64}
_TEXT_PARTS = ("text", "llm", "decoder", "thinker", "language", "attn", "ffn")  # in the names of configurations
_ORDINARY_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
_AT_MOST = ("num_experts_per_tok", "moe_k", "moe_topk", "n_group", "topk_group", "mamba_n_groups", "n_groups")
# Without a default, and yet needed.
_GIVEN = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_shared_experts")
# Left out in this order, where a class cannot be built with all of the above.
RETREATS: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({"head_dim", "d_head", "dim_head", "kv_channels", "attention_head_dim", "qk_head_dim"}),
    frozenset({"num_key_value_heads", "num_kv_heads"}),
    frozenset(
        {"mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "mamba_d_head", "mamba_head_dim", "mamba_n_groups"}
    ),
    frozenset({"rotary_dim", "num_kv_shared_layers", "n_groups", "time_step_rank", "mamba_dt_rank"}),
)
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
_LFM2_LAYERS = {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1], "num_hidden_layers": 2}
_LFM2 = {**_LFM2_LAYERS, "block_dim": 128, "conv_dim": 128, "block_ff_dim": 256, "block_auto_adjust_ff_dim": False}
# Of latent attention vLLM has kernels for published sizes alone.
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "qk_head_dim": 192}
# vLLM reads these of published configurations, and the classes of transformers do not have them, or have other names.
_AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "lfm2": _LFM2,
    "lfm2_vl": {"text_config": _LFM2},
    "qwen3_vl_moe": {"text_config": {"norm_topk_prob": True, "moe_intermediate_size": 96}},
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": {**_MLA, "first_k_dense_replace": 1, "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1},
    "deepseek_v2": {**_MLA, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "deepseek_v3": {**_MLA, "topk_method": "noaux_tc"},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    "hy_v3": {"expert_hidden_dim": 64, "first_k_dense_replace": 1},
    "gpt_bigcode": {"num_key_value_heads": 1},
    # These have inner layers of four times the width, whatever the configuration says.
    "phi": {"intermediate_size": 512},
    "falcon": {"ffn_hidden_size": 512},
    # Yarn scales from a shorter length to this one. vLLM 0.29 reads neither mscale nor mscale_all_dim. Their ratio
    # is 1 by default in transformers, but this (vLLM issue 48621).
    "ministral3": {
        "max_position_embeddings": 262144,
        "rope_parameters": {
            **{**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            **{"llama_4_scaling_beta": 0.1, "apply_yarn_scaling": False},
        },
    },
    # vLLM scales the logits, and transformers' class for pictures does not.
    "cohere2_vision": {"text_config": {"logit_scale": 1.0}},
    "gpt_oss": {"max_position_embeddings": 131072},
}
DEMANDED: dict[str, dict[str, Any]] = {
    **_AS_PUBLISHED,
    "bamba": {"attn_layer_indices": [1]},
    "qwen2_vl": {"text_config": _SECTIONS},
    "qwen2_5_vl": {"text_config": _SECTIONS},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gemma4": {"vision_config": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32}},
    # Chunks of a whole number of vLLM's blocks on a CPU.
    "llama4": {"text_config": {"moe_layers": None, "attention_chunk_size": 128}},
    "llama4_text": {"moe_layers": None, "attention_chunk_size": 128},
    "zamba2": {"attention_head_dim": 64},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3},
    "mamba2": {"num_heads": 8, "head_dim": 32},
}
"""What a class demands beyond that, by model type; parts are merged."""

ARCHITECTURES = {"phimoe": "PhiMoEForCausalLM"}
"""By model type, the class that published configurations name, where it is not the one of transformers."""


def overrides(defaults: Mapping[str, Any], without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The keys of a configuration that are to differ from its defaults.

    Args:
        defaults: ``config.to_dict()``.
        without: names of sizes that stay as they are.

    Returns:
        Arguments of the configuration's class; those of its parts are dictionaries.
    """
    placeholders = iter(range(FIRST_PLACEHOLDER, VOCABULARY))
    result = _part(defaults, {**_OUTSIDE, **_TEXT}, without, placeholders)
    for name in sorted(_nested_configurations(defaults)):
        is_tower = not any(word in name for word in _TEXT_PARTS)
        result[name] = _nested(defaults[name], without, placeholders, is_tower)
    if "text_config" in result:
        # Outside, the sizes of the text model are repeated by some classes, as properties by others.
        for name in ("hidden_size", "vocab_size"):
            if name not in defaults:
                result.pop(name, None)
    return result


def _nested_configurations(defaults: Mapping[str, Any]) -> list[str]:
    return [name for name, value in defaults.items() if name.endswith("_config") and isinstance(value, Mapping)]


def _nested(
    defaults: Mapping[str, Any], without: frozenset[str], placeholders: Iterator[int], is_tower: bool
) -> dict[str, Any]:
    """The keys of a part's configuration, with those of its own parts; ``is_tower``: no part of the text model."""
    sizes = _TOWER if is_tower else _TEXT
    result = _part(defaults, sizes, without, placeholders, tower=is_tower)
    if defaults.get("model_type"):
        result["model_type"] = defaults["model_type"]
    for name in _nested_configurations(defaults):
        inner_defaults = defaults[name]
        if not inner_defaults:
            continue
        result[name] = _part(inner_defaults, sizes, without, placeholders, tower=is_tower)
        if inner_defaults.get("model_type"):
            result[name]["model_type"] = inner_defaults["model_type"]
    return result


def _part(
    defaults: Mapping[str, Any],
    sizes: Mapping[str, int],
    without: frozenset[str],
    placeholders: Iterator[int],
    tower: bool = False,
) -> dict[str, Any]:
    """The keys of one configuration, without its parts."""
    result = _sizes(defaults, sizes, without, placeholders)
    heads = _first_of(result, ("num_attention_heads", "n_head", "n_heads"))
    default_heads = _first_of(defaults, ("num_attention_heads", "n_head"))
    for name in ("num_key_value_heads", "num_kv_heads"):
        if name in result and default_heads == defaults[name]:
            result[name] = heads  # multi-head attention stays it
    if "linear_key_head_dim" in defaults and "head_dim" in result:
        result["head_dim"] = 64  # vLLM's linear attention on a CPU has no smaller heads
    result.update(_tower_lists(defaults) if tower else _layers(defaults))
    rope = _rope(defaults, result)
    if rope is not None:
        result["rope_parameters"] = rope
    if "initializer_range" in defaults:
        # At 0.02 a model of this width tells its inputs hardly apart.
        result["initializer_range"] = 0.1
    return result


def _sizes(
    defaults: Mapping[str, Any], sizes: Mapping[str, int], without: frozenset[str], placeholders: Iterator[int]
) -> dict[str, Any]:
    """Small values of the sizes that a configuration has, and ids for its special tokens."""
    result: dict[str, Any] = {}
    for name, value in defaults.items():
        if name in without or isinstance(value, bool):
            continue
        if name in sizes and isinstance(value, int) and value > 0:
            result[name] = min(value, sizes[name]) if name in _AT_MOST else sizes[name]
        elif name in _GIVEN and value is None:
            result[name] = sizes[name]
        elif _is_special_token(name) and isinstance(value, int):
            ordinary = _ORDINARY_TOKENS.get(name)
            result[name] = next(placeholders) if ordinary is None else ordinary
    return result


def _first_of(values: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The value of the first of the names that is there; None without one."""
    for name in names:
        if name in values:
            return values[name]
    return None


def _is_special_token(name: str) -> bool:
    return name.endswith(("_token_id", "_token_index", "_start_id", "_end_id", "_newline_id"))


def _layers(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Two layers, or one of every kind; what a list says of each layer goes with them."""
    name = next((name for name in _LAYERS if isinstance(defaults.get(name), int)), None)
    if name is None:
        return {}
    count = defaults[name]
    lists = {key: value for key, value in defaults.items() if isinstance(value, list | tuple) and len(value) == count}
    lists_of_kinds = [lists[key] for key in _KINDS if key in lists]
    if lists_of_kinds:
        layers = _one_of_every_kind(lists_of_kinds, count)
    else:
        layers = list(range(min(count, 2)))
    result: dict[str, Any] = {name: len(layers)}
    for key, values in lists.items():
        if count > 2 or key in _KINDS:
            result[key] = [values[layer] for layer in layers]
    return result


def _one_of_every_kind(lists_of_kinds: list[Any], count: int) -> list[int]:
    """The first layer of every kind, or two layers of the only one, in their order.

    Args:
        lists_of_kinds: each has an entry for every layer; a layer's kind is all of its entries.
        count: of the layers.
    """
    layers: list[int] = []
    kinds: set[str] = set()
    for layer in range(count):
        kind = str([kinds_of_layers[layer] for kinds_of_layers in lists_of_kinds])
        if kind not in kinds and len(layers) < _MOST_LAYERS:
            kinds.add(kind)
            layers.append(layer)
    for layer in range(count):
        if len(layers) < 2 and layer not in layers:
            layers.append(layer)
    return sorted(layers)


def _tower_lists(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The lists of a tower's configuration, for its only layer."""
    result: dict[str, Any] = {}
    for name in ("deepstack_visual_indexes", "fullatt_block_indexes", "global_attn_indexes"):
        if isinstance(defaults.get(name), list | tuple):
            result[name] = [0]
    if isinstance(defaults.get("layer_types"), list | tuple):
        result["layer_types"] = list(defaults["layer_types"][:_VISION_LAYERS])
    if isinstance(defaults.get("intermediate_layers_indices"), list | tuple):
        result["intermediate_layers_indices"] = [0]
    if isinstance(defaults.get("image_size"), int) and isinstance(defaults.get("patch_size"), int):
        result |= {"image_size": 4 * defaults["patch_size"], "patch_size": defaults["patch_size"]}
    return result


def _rope(defaults: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Sections of the rotary embedding, for positions in pictures, cut to the heads' size."""
    rope = defaults.get("rope_parameters")
    if not isinstance(rope, Mapping) or not isinstance(rope.get("mrope_section"), list | tuple):
        return None
    default_sections = rope["mrope_section"]
    rotated = int(result.get("head_dim", 32) * rope.get("partial_rotary_factor", 1.0)) // 2
    sections = [max(1, section * rotated // sum(default_sections)) for section in default_sections]
    sections[0] += rotated - sum(sections)
    return {**rope, "mrope_section": sections}
