# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights of any model type, as folders that vLLM and transformers load."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.shrink import ARCHITECTURES, DEMANDED, RETREATS, overrides

_MOST_PARAMETERS = 200_000_000
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class NotBuilt(Exception):
    """No tiny model of a type can be made; the message says why."""


def build(model_type: str, folder: Path, tokenizer: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Makes a model of a type in a folder, from seed 0.

    Args:
        model_type: a key of transformers' ``CONFIG_MAPPING``.
        folder: empty; config.json, weights, tokenizer and processor are written to it.
        tokenizer: the folder of the tokenizer to copy.
        dtype: of the weights.

    Returns:
        The class of the model.

    Raises:
        NotBuilt: where transformers does not know the type, or no derived configuration makes a model.
    """
    config, model = random_model(model_type)
    model.to(dtype).save_pretrained(folder)
    name_text_architecture(folder)
    if model_type in _AS_PUBLISHED:
        _as_published(model_type, folder)
    if model_type in ARCHITECTURES:
        _name_architecture(folder, ARCHITECTURES[model_type])
    for name in _TOKENIZER:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder)
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        _processor(model_type, config, folder)
    return type(model)


def name_text_architecture(folder: Path) -> None:
    """Names the class of a multimodal model's text, which published configurations leave out.

    vLLM 0.29 asks for it on a CPU alone, and of several models it fails there without.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    text_config = config.get("text_config")
    if not isinstance(text_config, dict) or text_config.get("architectures"):
        return
    text_type = str(text_config.get("model_type", ""))
    name = CAUSAL.get(text_type) or CAUSAL.get(text_type.removesuffix("_text"))
    text_config["architectures"] = [name or config["architectures"][0]]
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _transposed_experts(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    if name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj")):
        return name, weight.transpose(1, 2).contiguous()
    return name, weight


def _named_embeddings(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    return name.replace(".embedding.weight", ".embeddings.weight"), weight


_AS_PUBLISHED = {"qwen3_vl_moe": _transposed_experts, "nemotron_h": _named_embeddings}


def _as_published(model_type: str, folder: Path) -> None:
    """Writes weights as published checkpoints have them, where transformers 5.15 reads this and saves otherwise."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    change = _AS_PUBLISHED[model_type]
    weights = dict(change(name, weight) for name, weight in load_file(file).items())
    save_file(weights, file, metadata={"format": "pt"})


def _name_architecture(folder: Path, name: str) -> None:
    file = folder / "config.json"
    config = {**json.loads(file.read_text(encoding="utf-8")), "architectures": [name]}
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def model_class(config: Any) -> Any:
    """The class that OpenRLHF would train: of images where there is a vision tower, else the causal language model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if hasattr(config, "vision_config"):
        expected, other = AutoModelForImageTextToText, AutoModelForCausalLM
    else:
        expected, other = AutoModelForCausalLM, AutoModelForImageTextToText
    return expected if type(config) in expected._model_mapping else other


def random_model(model_type: str) -> tuple[Any, Any]:
    """A type's small configuration and a model of it in float32; ``NotBuilt`` as of :func:`build`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise NotBuilt(f"transformers has no model type {model_type!r}")
    config_class = CONFIG_MAPPING[model_type]
    without: frozenset[str] = frozenset()
    errors = []
    for retreat in RETREATS:
        without |= retreat
        try:
            sizes = overrides(config_class().to_dict(), without)
            config = config_class(**_merged(sizes, DEMANDED.get(model_type, {})))
            return config, _initialised(config)
        except Exception as error:  # of whatever kind the class raises
            errors.append(f"{type(error).__name__}: {error}")
    raise NotBuilt(errors[0])


def _merged(arguments: dict[str, Any], further: dict[str, Any]) -> dict[str, Any]:
    """The further arguments before the others; those of a nested configuration are merged too."""
    merged = {**arguments, **further}
    for name in arguments.keys() & further.keys():
        if isinstance(further[name], dict):
            merged[name] = {**arguments[name], **further[name]}
    return merged


def _initialised(config: Any) -> Any:
    """A model with random weights that answers with finite logits."""
    auto = model_class(config)
    with torch.device("meta"):
        shape = auto.from_config(config)
    count = sum(p.numel() for p in shape.parameters())
    if count > _MOST_PARAMETERS:
        raise NotBuilt(f"the derived configuration has {count:,} parameters")
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.arange(3, 19).unsqueeze(0)).logits
    if not bool(logits.isfinite().all()):
        raise NotBuilt("its logits are not finite")
    return model


def _processor(model_type: str, config: Any, folder: Path) -> None:
    """What vLLM reads of a multimodal model's folder without the tokenizer, as far as the classes have defaults."""
    from transformers import AutoTokenizer
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    components: dict[str, Any] = {"tokenizer": AutoTokenizer.from_pretrained(folder)}
    if type(config) in IMAGE_PROCESSOR_MAPPING:
        components["image_processor"] = _image_processor_class(IMAGE_PROCESSOR_MAPPING[type(config)])()
    if type(config) in PROCESSOR_MAPPING:
        try:
            PROCESSOR_MAPPING[type(config)](**components).save_pretrained(folder)
            return
        except Exception as error:  # a processor may ask for what a tiny model does not have
            print(f"no processor: {type(error).__name__}: {error}")
    for component in components.values():
        component.save_pretrained(folder)


def _image_processor_class(registered: Any) -> Any:
    """The class of an entry of transformers' mapping: a class, classes by backend, or a tuple with None for some."""
    if isinstance(registered, dict):
        registered = registered.get("pil") or registered.get("torchvision")
    if isinstance(registered, tuple):
        return next(processor_class for processor_class in registered if processor_class)
    return registered
