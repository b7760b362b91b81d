# SPDX-License-Identifier: Apache-2.0
"""Tiny models of pictures with processors that work, and prompts with pictures, as OpenRLHF's own path reads them."""

import json
from pathlib import Path
from typing import Any

from benchmarks.models.shrink import overrides
from benchmarks.models.tiny import name_text_architecture

_CHAT = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}PICTURE{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SIDE = 64
"""Pixels of a picture's side, before a processor scales it to 4 by 4 patches, which are merged to 4 tokens."""
# Positions in pictures have three axes. Published configurations state their shares, some classes' defaults do not:
# without, vLLM numbers the places of pictures as those of text, and transformers does not.
_AXES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"mrope_section": [4, 6, 6]},
    "qwen2_5_vl": {"mrope_section": [4, 6, 6]},
    "qwen3_vl": {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
}
TYPES = (*_AXES, "qwen3_5", "gemma3", "mistral3")


def build(folder: Path, tokenizer_folder: str, model_type: str = "qwen3_vl", dtype: str = "float32") -> None:
    """Writes the model, from seed 0, its tokenizer with the tokens of pictures, and its processor.

    Args:
        folder: is written to.
        tokenizer_folder: the folder of the tokenizer to extend.
        model_type: one of :data:`TYPES`.
        dtype: of the weights.
    """
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    sizes = overrides(config_class().to_dict())
    if model_type in _AXES:
        rope = {"rope_type": "default", "rope_theta": 1e6, **_AXES[model_type]}
        sizes["text_config"]["rope_parameters"] = rope
    if model_type == "qwen2_vl":  # its tower names its output's width so
        sizes["vision_config"]["hidden_size"] = sizes["text_config"]["hidden_size"]
    make = {"gemma3": _gemma, "mistral3": _mistral}.get(model_type, _qwen)
    processor, ids = make(tokenizer_folder, config_class(**sizes))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_class(**{**sizes, **ids}))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    name_text_architecture(folder)
    processor.save_pretrained(folder)


def _qwen(tokenizer_folder: str, config: Any) -> tuple[Any, dict[str, int]]:
    import transformers

    tokens = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens.values())})
    vision = config.vision_config
    patches = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size, "temporal_patch_size": 2}
    pixels = (4 * vision.patch_size) ** 2
    images = transformers.Qwen2VLImageProcessor(**patches, size={"shortest_edge": pixels, "longest_edge": pixels})
    if config.model_type == "qwen2_vl":
        processor_class, video_class = transformers.Qwen2VLProcessor, transformers.Qwen2VLVideoProcessor
    elif config.model_type == "qwen2_5_vl":
        processor_class, video_class = transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor
    else:
        processor_class, video_class = transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor
    chat = _CHAT.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>")
    processor = processor_class(images, tokenizer, video_class(**patches), chat_template=chat)
    return processor, {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def _gemma(tokenizer_folder: str, config: Any) -> tuple[Any, dict[str, int]]:
    import transformers

    tokens = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder, extra_special_tokens=tokens)
    tokenizer.add_tokens(["\n" * count for count in (1, 2, 3, 4)])  # Gemma's own has them, and vLLM asks for them
    side = config.vision_config.image_size
    images = transformers.Gemma3ImageProcessor(size={"height": side, "width": side})
    processor = transformers.Gemma3Processor(
        images,
        tokenizer,
        chat_template=_CHAT.replace("PICTURE", "<start_of_image>"),
        image_seq_length=config.mm_tokens_per_image,
    )
    return processor, {f"{name}_index": tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def _mistral(tokenizer_folder: str, config: Any) -> tuple[Any, dict[str, int]]:
    import transformers

    tokens = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens.values())})
    patch = config.vision_config.patch_size
    images = transformers.PixtralImageProcessor(
        size={"longest_edge": 4 * patch}, patch_size={"height": patch, "width": patch}
    )
    processor = transformers.PixtralProcessor(
        images,
        tokenizer,
        patch_size=patch,
        spatial_merge_size=config.spatial_merge_size,
        chat_template=_CHAT.replace("PICTURE", "[IMG]"),
        **tokens,
    )
    return processor, {"image_token_index": tokenizer.convert_tokens_to_ids("[IMG]")}


def prompts(folder: Path, count: int = 8) -> Path:
    """Writes pictures of one color with noise, and a file of problems that ask for it; returns the file."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(0)
    colors = ("red", "green", "blue")
    rows = []
    for number in range(count):
        channel = number % 3
        pixels = draws.integers(0, 90, (SIDE, SIDE, 3), dtype=np.uint8)
        pixels[..., channel] += 160
        path = folder / f"{number}.png"
        Image.fromarray(pixels).save(path)
        question = f"<image>Which color is picture {number}?"
        rows.append({"input": question, "label": colors[channel], "images": [str(path)]})
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
