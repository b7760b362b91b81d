# SPDX-License-Identifier: Apache-2.0
"""Stage c: the whole neighbor table of a large vocabulary, as it is computed at load and after each weight sync."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.stages import Case

TITLE = "the whole neighbor table: seconds, and memory"


def cases(rehearse: bool) -> list[Case]:
    """One for each metric, at the size of Qwen2.5-1.5B."""
    vocabulary, hidden = (2000, 64) if rehearse else (151_936, 1536)
    size = {"vocabulary": vocabulary, "hidden": hidden, "repeats": 2 if rehearse else 3}
    return [Case(metric, {"metric": metric, **size}) for metric in ("cosine", "l2", "dot")]


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Three neighbors of every token of a random bfloat16 matrix; the first time is with all warming up."""
    import torch

    from perturbations.neighbors import ExactIndex

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    vocabulary, hidden, k = arguments["vocabulary"], arguments["hidden"], 3
    generator = torch.Generator(device).manual_seed(0)
    embedding = torch.randn(vocabulary, hidden, generator=generator, device=device, dtype=torch.bfloat16)
    seconds, peak, table_mib = [], None, None
    for _ in range(arguments["repeats"]):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        began = time.perf_counter()
        index = ExactIndex(embedding, arguments["metric"])
        index.precompute(k)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if on_gpu:
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
            table_mib = (torch.cuda.memory_allocated() - before) / 2**20
        del index
    yield {
        "metric": arguments["metric"],
        "table": f"{vocabulary:,} x {hidden:,}, bfloat16, k {k}",
        "first_s": seconds[0],
        "then_s": min(seconds[1:]),
        "peak_mib": peak,
        "kept_mib": table_mib,
    }
