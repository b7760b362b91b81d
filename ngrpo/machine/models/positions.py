# SPDX-License-Identifier: Apache-2.0
"""Keys of a config.json that vLLM 0.29 and transformers 5.15 read differently: rotary settings, windows, logits' scale.

A tiny model of each type is measured with usual settings (docs/models.md). These keys make another model of it on one
side. vLLM's side is from `get_rope` in its layers/rotary_embedding, which most of its classes call; transformers' from
its modeling_rope_utils and the type's own module.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ngrpo.machine.upstream.patch import source_of

Config = Any  # of transformers, of any model type's own class


class Difference(NamedTuple):
    """What engine and trainer read differently.

    Attributes:
        what: the difference, as a clause.
        fix: what removes it, as an order.
        beyond: it matters only if texts may have more tokens than this (``--data.max_len``).
    """

    what: str
    fix: str
    beyond: int = 0


def differences(config: Mapping[str, Any], engine_source: str) -> list[Difference]:
    """All differences of a config.json; raises whatever a configuration raises that is not as usual.

    engine_source: the source of the module with the model's class in vLLM.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    text = AutoConfig.for_model(**config).get_text_config()
    folder = model_type_to_module_name(text.model_type)
    trainer_source = source_of(f"transformers.models.{folder}.modeling_{folder}")
    if trainer_source is None:
        return []
    all_differences: list[Difference] = []
    for rope in _rotary_settings(text):
        all_differences += _rotary(rope, text, trainer_source)
    all_differences += _window(text, trainer_source)
    all_differences += _logit_scale(text, engine_source, trainer_source)
    return all_differences


def _rotary_settings(text: Config) -> list[Mapping[str, Any]]:
    """The rotary settings of a configuration: one dictionary, or one for each type of layers."""
    settings = getattr(text, "rope_parameters", None) or {}
    by_layers = [value for value in settings.values() if isinstance(value, Mapping)]
    if by_layers:
        return by_layers
    return [settings] if settings else []


def _rotary(rope: Mapping[str, Any], text: Config, trainer_source: str) -> Iterator[Difference]:
    kind = rope.get("rope_type", "default")
    yield from _rotated_dimensions(rope, kind, text, trainer_source)
    if kind == "yarn":
        # Latent attention has a rotary embedding of its own in vLLM, which reads mscale and mscale_all_dim.
        if not hasattr(text, "kv_lora_rank"):
            yield from _yarn(rope)
        if rope.get("extrapolation_factor", 1) != 1:
            yield Difference("of YaRN, vLLM alone reads extrapolation_factor", "Leave it out of rope_parameters")
    elif kind == "longrope":
        yield from _longrope(rope, text, trainer_source)
    elif kind == "dynamic":
        yield from _dynamic(rope, text, trainer_source)
    elif kind == "proportional" and rope.get("factor", 1.0) != 1.0:
        yield Difference(
            "of a proportional rotary embedding, transformers alone reads factor", "Leave it out of rope_parameters"
        )


def _rotated_dimensions(rope: Mapping[str, Any], kind: str, text: Config, trainer_source: str) -> Iterator[Difference]:
    share = rope.get("partial_rotary_factor") or 1.0
    # Without a scaling, each class of transformers computes the frequencies itself, and not all read the share.
    reads_share = share == 1.0 or kind != "default" or "partial_rotary_factor" in trainer_source
    if reads_share and "rope_dim" not in rope:
        return
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rotated_by_engine = rope.get("rope_dim") or int(head * share)
    rotated_by_trainer = int(head * share) if reads_share else head
    if rotated_by_engine != rotated_by_trainer:
        yield Difference(
            f"vLLM rotates {rotated_by_engine} dimensions of a head by partial_rotary_factor and rope_dim, and"
            f" transformers' {text.model_type} {rotated_by_trainer}",
            "Leave both keys out, or use a model type that has them",
        )


def _yarn(rope: Mapping[str, Any]) -> Iterator[Difference]:
    factor = rope.get("factor") or 1.0
    mscale = rope.get("mscale")
    mscale_all_dim = rope.get("mscale_all_dim")
    by_trainer = rope.get("attention_factor")
    if by_trainer is None:
        by_trainer = _yarn_magnitude(factor)
        if mscale and mscale_all_dim:
            by_trainer = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, mscale_all_dim)
    # vLLM's rotary embedding of several axes does not read apply_yarn_scaling.
    is_scaled = rope.get("apply_yarn_scaling", True) or "mrope_section" in rope
    unfactored = _yarn_magnitude(factor) if is_scaled else 1.0
    by_engine = unfactored * rope.get("attn_factor", 1.0)
    if not math.isclose(by_engine, by_trainer, rel_tol=1e-6):
        yield Difference(
            f"YaRN multiplies queries and keys by {by_engine:.4g} in vLLM, which reads factor, attn_factor and"
            f" apply_yarn_scaling, and by {by_trainer:.4g} in transformers, which reads factor, attention_factor,"
            " mscale and mscale_all_dim",
            f'Add "attn_factor": {by_trainer / unfactored:.9g} to rope_parameters (rope_scaling) in config.json',
        )


def _yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies queries and keys by: ``0.1 · mscale · ln(factor) + 1``."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _longrope(rope: Mapping[str, Any], text: Config, trainer_source: str) -> Iterator[Difference]:
    original = rope["original_max_position_embeddings"]
    if rope.get("long_factor") != rope.get("short_factor"):
        yield Difference(
            f"LongRoPE's long_factor is for all texts of an engine that takes more than {original} tokens, and in"
            " transformers only for batches with such a text",
            f"Give --data.max_len {original} or less",
            beyond=original,
        )
    if "long_mscale" in trainer_source:  # Phi-3.5-MoE reads both keys on both sides
        return
    stretched = text.max_position_embeddings / original
    by_trainer = rope.get("attention_factor")
    if by_trainer is None:
        by_trainer = _longrope_magnitude(rope.get("factor") or stretched, original)
    for key in ("short_mscale", "long_mscale"):
        by_engine = rope.get(key)
        if by_engine is None:
            by_engine = _longrope_magnitude(stretched, original)
        if not math.isclose(by_engine, by_trainer, rel_tol=1e-6):
            yield Difference(
                f"LongRoPE multiplies queries and keys by {by_engine:.4g} in vLLM, which reads short_mscale and"
                f" long_mscale, and by {by_trainer:.4g} in transformers, which reads attention_factor and factor",
                f'Set "short_mscale" and "long_mscale" to {by_trainer:.9g} in rope_parameters (rope_scaling)',
            )
            return


def _longrope_magnitude(factor: float, original: int) -> float:
    """What LongRoPE multiplies queries and keys by: ``sqrt(1 + ln(factor) / ln(original))``."""
    return math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0


def _dynamic(rope: Mapping[str, Any], text: Config, trainer_source: str) -> Iterator[Difference]:
    if "alpha" in rope:
        if "alpha" not in trainer_source:
            yield Difference("of a dynamic rotary embedding, vLLM alone reads alpha", "Use a model type that reads it")
        return
    trained = text.max_position_embeddings
    if rope.get("max_trained_positions", trained) != trained:
        yield Difference("of a dynamic rotary embedding, vLLM alone reads max_trained_positions", "Leave it out")
    if rope.get("factor", 1.0) != 1.0:
        yield Difference(
            f"a dynamic rotary embedding is another one in transformers for each batch with more than {trained} tokens,"
            " and in vLLM has no further positions",
            f"Give --data.max_len {trained} or less",
            beyond=trained,
        )


def _window(text: Config, trainer_source: str) -> Iterator[Difference]:
    window = getattr(text, "sliding_window", None)
    if not window:
        return
    layers = getattr(text, "layer_types", None)
    # vLLM has the window in layers of the type "sliding_attention", and in all layers of a configuration without
    # layer_types. So have the classes of transformers that read layer_types.
    is_listed = layers is not None
    engine_has_window = not is_listed or "sliding_attention" in layers
    engine_has_it_everywhere = not is_listed or set(layers) == {"sliding_attention"}
    trainer_has_window = "sliding_window" in trainer_source
    trainer_reads_types = "layer_types" in trainer_source
    if engine_has_window and not trainer_has_window:
        yield Difference(
            f"vLLM's attention sees the last {window} tokens (sliding_window), and transformers' {text.model_type} all",
            f"Give --data.max_len {window} or less, or leave sliding_window out of config.json",
            beyond=window,
        )
    elif trainer_has_window and not trainer_reads_types and not engine_has_it_everywhere:
        yield Difference(
            f"transformers' {text.model_type} has the window of {window} tokens (sliding_window) in all layers, and"
            " vLLM in those of layer_types",
            f"Give --data.max_len {window} or less, or leave layer_types out of config.json",
            beyond=window,
        )


def _logit_scale(text: Config, engine_source: str, trainer_source: str) -> Iterator[Difference]:
    scale = getattr(text, "logit_scale", None)
    if scale not in (None, 1.0) and '"logit_scale"' in engine_source and "logit_scale" not in trainer_source:
        yield Difference(
            f"vLLM multiplies logits by logit_scale {scale:g}, and transformers' {text.model_type} does not",
            "Leave it out of config.json",
        )
