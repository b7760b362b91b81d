# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-VL with a processor that works, and prompts with pictures: as OpenRLHF's own path reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.models.shrink import overrides
from benchmarks.models.tiny import name_text_architecture

_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SIDE = 64
"""Pixels of a picture's side: 16 patches, which are merged to 4 tokens."""


def build(folder: Path, tokenizer_folder: str) -> None:
    """Writes the model, from seed 0, its tokenizer with the tokens of pictures, and its processor."""
    import torch
    from transformers import (
        AutoTokenizer,
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_TOKENS.values())})
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _TOKENS.items()}
    sizes = {**overrides(Qwen3VLConfig().to_dict()), **ids}
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(Qwen3VLConfig(**sizes)).save_pretrained(folder)
    name_text_architecture(folder)
    patches: dict[str, Any] = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    images = Qwen2VLImageProcessor(**patches, size={"shortest_edge": SIDE**2, "longest_edge": SIDE**2})
    videos = Qwen3VLVideoProcessor(**patches)
    Qwen3VLProcessor(images, tokenizer, videos, chat_template=_TEMPLATE).save_pretrained(folder)


def prompts(folder: Path, count: int = 8) -> Path:
    """Writes pictures of one color with noise, and a file of problems that ask for it; returns the file."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draws, rows = np.random.default_rng(0), []
    for number in range(count):
        color = number % 3
        pixels = draws.integers(0, 90, (SIDE, SIDE, 3), dtype=np.uint8)
        pixels[..., color] += 160
        path = folder / f"{number}.png"
        Image.fromarray(pixels).save(path)
        label = ("red", "green", "blue")[color]
        rows.append({"input": f"<image>Which color is picture {number}?", "label": label, "images": [str(path)]})
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
