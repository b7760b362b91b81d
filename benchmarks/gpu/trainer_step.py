# SPDX-License-Identifier: Apache-2.0
"""Stage d: a trainer's step with and without replay, by attention and by layout of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.stages import Case

TITLE = "trainer: seconds of forward, backward and optimizer with replay over without"
_FLASH_ATTN = {"flash_attn": "docs/install.md names prebuilt wheels; without it OpenRLHF neither packs nor uses it"}


def cases(rehearse: bool) -> list[Case]:
    """Padded and packed by flash attention, padded by PyTorch's own."""
    if rehearse:
        # PyTorch's attention keeps packed samples apart too, by a mask: slow, but the same code of ours runs.
        return [
            Case(f"sdpa, {layout}", _arguments("tiny", "sdpa", layout, [24, 9, 17], 1))
            for layout in ("padded", "packed")
        ]
    lengths = [1024, 260, 512, 900, 384, 640, 300, 780]
    kinds = [("sdpa", "padded"), ("flash_attention_2", "padded"), ("flash_attention_2", "packed")]
    return [
        Case(
            f"{model}, {attention}, {layout}",
            _arguments(model, attention, layout, lengths, 7),
            needs=_FLASH_ATTN if attention == "flash_attention_2" else {},
        )
        for model in ("smollm2-135m", "1.5b")
        for attention, layout in kinds
    ]


def _arguments(model: str, attention: str, layout: str, lengths: list[int], pairs: int) -> dict[str, Any]:
    return {"model": model, "attention": attention, "layout": layout, "lengths": lengths, "pairs": pairs}


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each kind of record."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks import replay
    from benchmarks.gpu import models

    on_gpu = torch.cuda.is_available()
    # Weights do not change how long a step takes.
    config = AutoConfig.from_pretrained(models.without_weights(arguments["model"]))
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if on_gpu else torch.float32, attn_implementation=arguments["attention"]
        )
    lengths, packed = arguments["lengths"], arguments["layout"] == "packed"
    loss = replay.Trainer(model, lengths, packed=packed).step(None)[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=on_gpu)
    trainer = replay.Trainer(model, lengths, packed=packed, optimizer=optimizer)
    for label, (rate, k, noisy) in replay.RECORDS.items():
        records = [
            replay.random_record(length, rate, k, config.vocab_size, i, noisy) for i, length in enumerate(lengths)
        ]
        yield {
            "model": f"{arguments['model']}, {sum(lengths)} tokens",
            "attention": arguments["attention"],
            "layout": arguments["layout"],
            "record": label,
            **replay.paired(trainer, records, arguments["pairs"]),
            "loss": loss,
        }
