# SPDX-License-Identifier: Apache-2.0
"""The gap between rollout and replay of perturbations in a kind of engine, and the gap without a perturbation."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """For each engine one row without a perturbation, then one for each perturbation and rate."""
    from tests.stack import as_on_cuda

    rehearse = arguments["rehearse"]
    asynchronous = any(engine[1] for engine in arguments["engines"])
    if rehearse and asynchronous:
        as_on_cuda.interpret_triton()
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.gpu import models

    folder, name = models.folder_of(arguments["model"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments["dtype"])).to(device).eval()
    for graphs, asynchronous, rates in arguments["engines"]:
        try:
            with as_on_cuda.asynchronous() if rehearse and asynchronous else contextlib.nullcontext():
                for row in _engine(folder, model, arguments, graphs, asynchronous, rates):
                    yield {"model": name, **row}
        except Exception as error:  # the other engines are still worth a look
            yield {"error": f"graphs {graphs}, async {asynchronous}: {type(error).__name__}: {error}"[:1500]}
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def judge(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """Exact: the tests' bounds for float32, or a mean of at most twice the unperturbed mean of the same engine."""
    plain, worst, wrong = {}, (0.0, ""), []
    for row in rows:
        if row["perturbation"] == "(off)":
            plain = row
            continue
        name, times = f"{row['perturbation']} {row['rate']:g}", row["mean"] / max(plain["mean"], 1e-7)
        worst = max(worst, (times, name))
        exact = times <= 2.0 or (row["mean"] <= 1e-5 and row["max"] <= 1e-4)
        wrong += [name] if not (exact and row["edits"]) else []
    verdict = f"NOT EXACT: {', '.join(dict.fromkeys(wrong))}" if wrong else "exact"
    figures = f"{sum(row['tokens'] for row in rows)} tokens, max {max(row['max'] for row in rows):.1e}"
    return not wrong, f"{verdict}; {figures}, mean at most {worst[0]:.2f} times the unperturbed ({worst[1]})"


def _engine(
    folder: str, model: Any, arguments: dict[str, Any], graphs: bool, asynchronous: bool, rates: list[float]
) -> Iterator[dict[str, Any]]:
    from benchmarks import exactness
    from benchmarks.gpu import models
    from ngrpo.rollout import model_runner
    from tests.stack.harness import build_engine, gaps, sample

    ranks = arguments.get("tensor_parallel", 1)
    llm = build_engine(
        folder,
        {"name": "gumbel"},
        dtype=arguments["dtype"],
        enforce_eager=not graphs,
        enable_prefix_caching=True,
        max_num_batched_tokens=64,
        **({"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"} if ranks > 1 else {}),
        # On a CPU vLLM 0.29 takes neither.
        **({} if arguments["rehearse"] else {"async_scheduling": asynchronous, "gpu_memory_utilization": 0.2}),
    )
    config = llm.llm_engine.vllm_config
    kind = {
        "runner": model_runner(llm),
        "dtype": arguments["dtype"],
        "ranks": ranks,
        "graphs": config.compilation_config.cudagraph_mode.name if graphs else "off",
        "async": config.scheduler_config.async_scheduling,
    }
    prompts, tokens = models.prompts(llm, arguments["questions"]), arguments["tokens"]
    plain = gaps(model, sample(llm, prompts, [{"enabled": False}] * len(prompts), max_tokens=tokens))
    figures = {"tokens": len(plain), "max": plain.max().item(), "mean": plain.mean().item()}
    yield {**kind, "perturbation": "(off)", **figures}
    for name in arguments.get("only") or exactness.in_tree():
        for rate in rates:
            yield {**kind, **exactness.measure(llm, model, prompts, name, rate, tokens)}
