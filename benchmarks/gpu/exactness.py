# SPDX-License-Identifier: Apache-2.0
"""Stage a: the gap between rollout and replay, of every perturbation in every kind of engine."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.stages import Case

TITLE = "exactness: |Δ log p| between rollout and replay, beside the gap without a perturbation"
AT_ONCE = 4  # nothing is timed here


def cases(rehearse: bool) -> list[Case]:
    """One for each model runner and precision; in each an engine for graphs on and off, scheduling async and not."""
    if rehearse:
        small = {"rehearse": True, "dtype": "float32", "questions": 2, "tokens": 6}
        # Triton's interpreter takes its time.
        few = {"only": ["gumbel", "hrpo"], "questions": 1}
        return [
            Case("V1 float32", {**small, "runner": "V1", "engines": [[False, False, [1.0]]]}, _runner("V1")),
            Case("V2 float32", {**small, **few, "runner": "V2", "engines": [[False, True, [1.0]]]}, _runner("V2")),
        ]
    # Graphs, async, rates: more of the first, which is what vLLM does by default.
    engines = [[True, True, [0.1, 1.0]], [True, False, [0.5]], [False, True, [0.5]], [False, False, [0.5]]]
    size = {"rehearse": False, "questions": 16, "tokens": 64, "engines": engines}
    return [
        Case(f"{runner} {dtype}", {**size, "runner": runner, "dtype": dtype}, _runner(runner))
        for runner in ("V2", "V1")
        for dtype in ("float32", "bfloat16")
    ]


def _runner(name: str) -> dict[str, str]:
    return {"VLLM_USE_V2_MODEL_RUNNER": str(int(name == "V2"))}


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each engine without a perturbation, then one for each perturbation and rate in it."""
    from tests.stack import as_on_cuda

    rehearse = arguments["rehearse"]
    if rehearse and arguments["runner"] == "V2":
        as_on_cuda.interpret_triton()
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.gpu import models

    folder, name = (models.random_weights("tiny"), "tiny") if rehearse else models.smollm2()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, arguments["dtype"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    for graphs, asynchronous, rates in arguments["engines"]:
        mode = {"graphs": graphs, "async": asynchronous}
        scheduled = as_on_cuda.asynchronous() if rehearse and asynchronous else contextlib.nullcontext()
        try:
            with scheduled:
                for row in _engine(folder, model, arguments, graphs, asynchronous, rates):
                    yield {"model": name, **row}
        except Exception as error:  # the other engines are still worth a look
            yield {"model": name, **mode, "error": f"{mode}: {type(error).__name__}: {error}"[:1500]}
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _engine(
    folder: str, model: Any, arguments: dict[str, Any], graphs: bool, asynchronous: bool, rates: list[float]
) -> Iterator[dict[str, Any]]:
    from benchmarks import exactness
    from benchmarks.gpu import models
    from ngrpo.rollout import model_runner
    from tests.stack.harness import build_engine, gaps, sample

    on_cpu = arguments["rehearse"]
    llm = build_engine(
        folder,
        {"name": "gumbel"},
        dtype=arguments["dtype"],
        enforce_eager=not graphs,
        enable_prefix_caching=True,
        max_num_batched_tokens=64,
        # On a CPU vLLM 0.29 takes neither.
        **({} if on_cpu else {"async_scheduling": asynchronous, "gpu_memory_utilization": 0.2}),
    )
    config = llm.llm_engine.vllm_config
    kind = {
        "runner": model_runner(llm),
        "dtype": arguments["dtype"],
        "graphs": config.compilation_config.cudagraph_mode.name if graphs else "off",
        "async": config.scheduler_config.async_scheduling,
    }
    prompts = models.prompts(llm, arguments["questions"])
    plain = gaps(model, sample(llm, prompts, [{"enabled": False}] * len(prompts), max_tokens=arguments["tokens"]))
    yield {
        **kind,
        "perturbation": "(off)",
        "tokens": len(plain),
        "max": plain.max().item(),
        "mean": plain.mean().item(),
    }
    for name in arguments.get("only") or exactness.in_tree():
        for rate in rates:
            row = exactness.measure(llm, model, prompts, name, rate, arguments["tokens"])
            yield {**kind, **row}
