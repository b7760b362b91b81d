# SPDX-License-Identifier: Apache-2.0
"""A trainer's step (forward, backward, AdamW) with and without replay, by attention and by layout of the batch."""

from collections.abc import Iterator
from typing import Any


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each layout and kind of record."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks import replay
    from benchmarks.gpu import models

    on_gpu, name = torch.cuda.is_available(), arguments["model"]
    # Weights do not change how long a step takes.
    config = AutoConfig.from_pretrained(models.made(name, weights=False))
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if on_gpu else torch.float32, attn_implementation=arguments["attention"]
        )
    lengths = arguments["lengths"]
    losses = {layout: _trainer(model, lengths, layout, None).step(None)[1] for layout in arguments["layouts"]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=on_gpu)
    for layout, loss in losses.items():
        trainer = _trainer(model, lengths, layout, optimizer)
        kind = {"model": name, "tokens": sum(lengths), "attention": arguments["attention"], "layout": layout}
        for label, (rate, k, noisy) in replay.RECORDS.items():
            records = [
                replay.random_record(length, rate, k, config.vocab_size, i, noisy) for i, length in enumerate(lengths)
            ]
            figures = replay.paired(trainer, records, arguments["pairs"])
            yield {**kind, "record": label, **figures, "loss": loss}


def judge(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """The ratios; packed samples must give the loss of padded ones."""
    losses = {row["loss"] for row in rows}
    same = max(losses) - min(losses) <= 1e-2
    each = ", ".join(f"{row['layout']} {row['record']}: {row['ratio']:.3f}" for row in rows)
    return same, f"{'measured' if same else f'LOSSES DIFFER {losses}'}; {rows[0]['plain_s']:.3f} s without, {each}"


def _trainer(model: Any, lengths: list[int], layout: str, optimizer: Any) -> Any:
    from benchmarks import replay

    return replay.Trainer(model, lengths, packed=layout == "packed", optimizer=optimizer)
