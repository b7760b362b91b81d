# SPDX-License-Identifier: Apache-2.0
"""What a decode step asks of the device: launches, copies, and waits of the host."""

import collections
from collections.abc import Iterator
from typing import Any

# Names in a trace of torch.profiler, and what they are counted as. On a CPU only the last two can be seen.
_COUNTED = {
    "launches": ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaLaunchKernelExC", "cuLaunchKernelEx"),
    "to_device": ("Memcpy HtoD",),
    "to_host": ("Memcpy DtoH",),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "items": ("aten::_local_scalar_dense",),
    "nonzero": ("aten::nonzero",),
}
_NO_ENGINE = "no engine"


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for stock vLLM, then one for each perturbation; or the perturber without an engine."""
    if arguments.get("alone"):
        yield from _without_engine(arguments)
        return
    from benchmarks.gpu import models
    from ngrpo.rollout import set_perturbation

    sequences = arguments["sequences"]
    engines = models.both_engines(arguments["model"], sequences, arguments["rehearse"])
    prompts = models.prompts(engines.stock, sequences)
    per_step = _per_step(engines.stock, prompts, arguments["tokens"])
    yield {**engines.columns, "perturbation": "stock", "rate": None, "sequences": sequences, **per_step}
    for name, rate in arguments["perturbations"]:
        set_perturbation(engines.perturbed, name, rate=rate)
        per_step = _per_step(engines.perturbed, prompts, arguments["tokens"])
        yield {**engines.columns, "perturbation": name, "rate": rate, "sequences": sequences, **per_step}


def judge(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """Without an engine nothing may wait for the device, nor loop over requests; in vLLM counts are compared."""
    without_engine = rows[0]["runner"] == _NO_ENGINE
    counts = []
    for row in rows:
        count = f"{row['perturbation']} {row['launches']:.0f} launches, {row['waits']:.0f} waits"
        if without_engine:
            count += f", {row['microseconds']:.0f} µs"
        counts.append(count)
    if not without_engine:
        return True, f"counted; {'; '.join(counts)}"
    good = not any(row["waits"] or row["loops"] for row in rows)
    return good, f"{'no waits' if good else 'WAITS OR LOOPS'}; {'; '.join(counts)}"


def _without_engine(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Random logits instead of a model; the time is that of a step, until the device has done it."""
    import torch

    from benchmarks import decode_step
    from perturbations import create

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sequences = arguments["sequences"]
    vocabulary = 1024 if arguments["rehearse"] else 151_936
    for name, rate in arguments["perturbations"]:
        perturbation = create(name, rate=rate)
        counts = decode_step.count(perturbation, sequences, vocabulary=vocabulary, device=device)
        yield {
            "runner": _NO_ENGINE,
            "perturbation": name,
            "rate": rate,
            "sequences": sequences,
            "launches": counts.launches / counts.steps,
            "to_device": counts.uploads / counts.steps,
            "to_host": counts.downloads / counts.steps,
            "waits": len(counts.waits) / counts.steps,
            # At a lower rate some steps of few requests have no edit, so that further requests add lines.
            "loops": decode_step.loops(create(name, rate=1.0), device),
            "microseconds": decode_step.microseconds(perturbation, sequences, vocabulary, device),
            "of_device": decode_step.device_microseconds(perturbation, sequences, vocabulary, device),
        }


def _per_step(llm: Any, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Counts of 2n decode steps less those of n, by n: the prefill and the ends of the requests cancel."""
    from benchmarks.rollout import rate_of

    rate_of(llm, prompts, tokens)
    counts = _counts(llm, prompts, tokens)
    counts_of_twice = _counts(llm, prompts, 2 * tokens)
    return {kind: (counts_of_twice[kind] - counts[kind]) / tokens for kind in _COUNTED}


def _counts(llm: Any, prompts: list[list[int]], tokens: int) -> collections.Counter[str]:
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.rollout import rate_of

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        rate_of(llm, prompts, tokens)
    counts: collections.Counter[str] = collections.Counter()
    for event in trace.key_averages():
        for kind, names in _COUNTED.items():
            if event.key.startswith(names):
                counts[kind] += event.count
    return counts
