# SPDX-License-Identifier: Apache-2.0
"""Stage f: what a decode step asks of the device: launches, copies, and waits of the host; stock beside perturbed."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.stages import Case

TITLE = "counts per decode step: launches, copies, and waits of the host"
# Names in a trace of torch.profiler, and what they are counted as. On a CPU only the last two can be seen.
_COUNTED = {
    "launches": ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaLaunchKernelExC", "cuLaunchKernelEx"),
    "to_device": ("Memcpy HtoD",),
    "to_host": ("Memcpy DtoH",),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "items": ("aten::_local_scalar_dense",),
    "nonzero": ("aten::nonzero",),
}


def cases(rehearse: bool) -> list[Case]:
    """The perturber without an engine, where PyTorch itself refuses a wait; then an engine of each model runner."""
    if rehearse:
        size = {"rehearse": True, "sequences": 2, "tokens": 4, "perturbations": [["gumbel", 1.0]]}
        alone = Case("perturber", {**size, "alone": True})
        return [alone, Case("V1", size, {"VLLM_USE_V2_MODEL_RUNNER": "0"})]
    perturbations = [["neighbor", 0.1], ["neighbor", 1.0], ["gumbel", 1.0], ["gaussian", 1.0]]
    size = {"rehearse": False, "sequences": 64, "tokens": 32, "perturbations": perturbations}
    return [
        Case("perturber", {**size, "alone": True}),
        *(Case(runner, size, {"VLLM_USE_V2_MODEL_RUNNER": switch}) for runner, switch in (("V2", "1"), ("V1", "0"))),
    ]


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for stock vLLM, then one for each perturbation."""
    if arguments.get("alone"):
        yield from _alone(arguments)
        return
    import warnings

    from benchmarks import rollout
    from benchmarks.gpu import models
    from ngrpo.rollout import model_runner, set_perturbation

    warnings.simplefilter("ignore")
    rehearse, count = arguments["rehearse"], arguments["sequences"]
    folder = models.random_weights("tiny") if rehearse else models.smollm2()[0]
    options = {"max_num_seqs": count, "disable_log_stats": True}
    if rehearse:
        options["kv_cache_memory_bytes"] = 1 << 26
    stock = rollout.engine(folder, None, not rehearse, **options)
    perturbed = rollout.engine(folder, {"name": "gumbel"}, not rehearse, **options)
    runner, prompts = model_runner(perturbed), models.prompts(stock, count)
    for name, rate in [["stock", None], *arguments["perturbations"]]:
        if rate is not None:
            set_perturbation(perturbed, name, rate=rate)
        llm = stock if rate is None else perturbed
        per_step = _per_step(llm, prompts, arguments["tokens"])
        yield {"runner": runner, "perturbation": name, "rate": rate, "sequences": count, **per_step}


def _alone(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Random logits in place of a model; the time is that of a step, until the device has done it."""
    import torch

    from benchmarks import decode_step
    from perturbations import create

    device, sequences = "cuda" if torch.cuda.is_available() else "cpu", arguments["sequences"]
    vocabulary = 1024 if arguments["rehearse"] else 151_936
    for name, rate in arguments["perturbations"]:
        perturbation = create(name, rate=rate)
        counts = decode_step.count(perturbation, sequences, vocabulary=vocabulary, device=device)
        yield {
            "runner": "no engine",
            "perturbation": name,
            "rate": rate,
            "sequences": sequences,
            "launches": counts.launches / counts.steps,
            "to_device": counts.uploads / counts.steps,
            "to_host": counts.downloads / counts.steps,
            "waits": len(counts.waits) / counts.steps,
            "loops": decode_step.loops(perturbation, device),
            "microseconds": decode_step.microseconds(perturbation, sequences, vocabulary, device),
        }


def _per_step(llm: Any, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Counts of twice as many decode steps, less those of half of them: the prefill and the ends cancel."""
    from benchmarks.rollout import rate_of

    rate_of(llm, prompts, tokens)
    short, long = (_counts(llm, prompts, length) for length in (tokens, 2 * tokens))
    return {what: (long[what] - short[what]) / tokens for what in _COUNTED}


def _counts(llm: Any, prompts: list[list[int]], tokens: int) -> collections.Counter[str]:
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.rollout import rate_of

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        rate_of(llm, prompts, tokens)
    counts: collections.Counter[str] = collections.Counter()
    for event in trace.key_averages():
        for what, names in _COUNTED.items():
            counts[what] += event.count * event.key.startswith(names)
    return counts
