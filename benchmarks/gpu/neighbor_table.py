# SPDX-License-Identifier: Apache-2.0
"""The whole neighbor table of a large vocabulary, as it is computed at load and after each weight sync."""

import time
from collections.abc import Iterator
from typing import Any

_K = 3


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Three neighbors of every token of a random bfloat16 matrix; the first time includes the warm-up."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    vocabulary = arguments["vocabulary"]
    hidden = arguments["hidden"]
    generator = torch.Generator(device).manual_seed(0)
    embedding = torch.randn(vocabulary, hidden, generator=generator, device=device, dtype=torch.bfloat16)
    table = f"{vocabulary:,} x {hidden:,}, bfloat16, k {_K}"
    for metric in ("cosine", "l2", "dot"):
        seconds = []
        memory: dict[str, float] = {}
        for _ in range(arguments["repeats"]):
            repeat_seconds, memory = _compute(embedding, metric)
            seconds.append(repeat_seconds)
        yield {"metric": metric, "table": table, "first_s": seconds[0], "then_s": min(seconds[1:]), **memory}


def _compute(embedding: Any, metric: str) -> tuple[float, dict[str, float]]:
    """Seconds to compute a table, and on a GPU the MiB that it takes at its peak and keeps."""
    import torch

    from perturbations.neighbors import ExactIndex

    on_gpu = embedding.is_cuda
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    index = ExactIndex(embedding, metric)
    index.precompute(_K)
    if not on_gpu:
        return time.perf_counter() - began, {}
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() - before
    kept = torch.cuda.memory_allocated() - before
    return seconds, {"peak_mib": peak / 2**20, "kept_mib": kept / 2**20}


def judge(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """Times and memory."""
    times = [f"{row['metric']} {row['first_s']:.2f} then {row['then_s']:.2f} s" for row in rows]
    return True, f"{rows[0]['table']}: {', '.join(times)}, peak {rows[0].get('peak_mib', 0):.0f} MiB"
