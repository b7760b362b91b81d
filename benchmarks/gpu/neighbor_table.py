# SPDX-License-Identifier: Apache-2.0
"""The whole neighbor table of a large vocabulary, as it is computed at load and after each weight sync."""

import time
from collections.abc import Iterator
from typing import Any


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Three neighbors of every token of a random bfloat16 matrix; the first time includes the warm-up."""
    import torch

    from perturbations.neighbors import ExactIndex

    on_gpu, k = torch.cuda.is_available(), 3
    device = torch.device("cuda" if on_gpu else "cpu")
    vocabulary, hidden = arguments["vocabulary"], arguments["hidden"]
    generator = torch.Generator(device).manual_seed(0)
    embedding = torch.randn(vocabulary, hidden, generator=generator, device=device, dtype=torch.bfloat16)
    for metric in ("cosine", "l2", "dot"):
        seconds, memory = [], {}
        for _ in range(arguments["repeats"]):
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            before, began = torch.cuda.memory_allocated() if on_gpu else 0, time.perf_counter()
            index = ExactIndex(embedding, metric)
            index.precompute(k)
            if on_gpu:
                torch.cuda.synchronize()
                used = {"peak_mib": torch.cuda.max_memory_allocated(), "kept_mib": torch.cuda.memory_allocated()}
                memory = {name: (count - before) / 2**20 for name, count in used.items()}
            seconds.append(time.perf_counter() - began)
            del index
        table = f"{vocabulary:,} x {hidden:,}, bfloat16, k {k}"
        yield {"metric": metric, "table": table, "first_s": seconds[0], "then_s": min(seconds[1:]), **memory}


def judge(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """Times and memory."""
    each = [f"{row['metric']} {row['first_s']:.2f} then {row['then_s']:.2f} s" for row in rows]
    return True, f"{rows[0]['table']}: {', '.join(each)}, peak {rows[0].get('peak_mib', 0):.0f} MiB"
