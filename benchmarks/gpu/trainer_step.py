# SPDX-License-Identifier: Apache-2.0
"""A trainer's step (forward, backward, AdamW) with and without replay, by attention and by layout of the batch."""

from collections.abc import Iterator
from typing import Any


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each layout and kind of record."""
    import torch

    from benchmarks import replay

    model = _random_model(arguments["model"], arguments["attention"])
    lengths = arguments["lengths"]
    losses = {}
    for layout in arguments["layouts"]:
        trainer = replay.Trainer(model, lengths, packed=layout == "packed")
        _seconds, losses[layout] = trainer.step(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=torch.cuda.is_available())
    for layout, loss in losses.items():
        trainer = replay.Trainer(model, lengths, packed=layout == "packed", optimizer=optimizer)
        for label, kind in replay.RECORDS.items():
            records = []
            for seed, length in enumerate(lengths):
                records.append(replay.random_record(length, kind, model.config.vocab_size, seed))
            figures = replay.paired(trainer, records, arguments["pairs"])
            yield {
                "model": arguments["model"],
                "tokens": sum(lengths),
                "attention": arguments["attention"],
                "layout": layout,
                "record": label,
                **figures,
                "loss": loss,
            }


def judge(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """The ratios; packed samples must give the loss of padded ones."""
    losses = {row["loss"] for row in rows}
    good = max(losses) - min(losses) <= 1e-2
    ratios = ", ".join(f"{row['layout']} {row['record']}: {row['ratio']:.3f}" for row in rows)
    verdict = "measured" if good else f"LOSSES DIFFER {losses}"
    return good, f"{verdict}; {rows[0]['plain_s']:.3f} s without, {ratios}"


def _random_model(shape: str, attention: str) -> Any:
    """A model with random weights, which do not change how long a step takes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.gpu import models

    on_gpu = torch.cuda.is_available()
    config = AutoConfig.from_pretrained(models.made(shape, weights=False))
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if on_gpu else torch.float32, attn_implementation=attention
        )
