# SPDX-License-Identifier: Apache-2.0
"""The gap between rollout and replay of perturbations in a kind of engine, and the gap without a perturbation."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, NamedTuple


class EngineKind(NamedTuple):
    """An engine of a stage.

    Attributes:
        graphs: whether vLLM compiles the model and captures CUDA graphs.
        asynchronous: whether it schedules asynchronously.
        rates: of the perturbations that it is measured with.
    """

    graphs: bool
    asynchronous: bool
    rates: list[float]


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """For each engine one row without a perturbation, then one for each perturbation and rate."""
    from tests.stack import as_on_cuda

    kinds = [EngineKind(*fields) for fields in arguments["engines"]]
    rehearse = arguments["rehearse"]
    if rehearse and any(kind.asynchronous for kind in kinds):
        as_on_cuda.interpret_triton()
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.gpu import models

    folder, name = models.folder_of(arguments["model"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments["dtype"])).to(device).eval()
    for kind in kinds:
        scheduling = as_on_cuda.asynchronous() if rehearse and kind.asynchronous else contextlib.nullcontext()
        try:
            with scheduling:
                for row in _rows_of_engine(folder, model, arguments, kind):
                    yield {"model": name, **row}
        except Exception as error:  # the other engines are still worth a look
            engine = f"graphs {kind.graphs}, async {kind.asynchronous}"
            yield {"error": f"{engine}: {type(error).__name__}: {error}"[:1500]}
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def judge(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """Exact: the tests' bounds for float32, or a mean of at most twice the unperturbed mean of the same engine."""
    unperturbed_mean = 0.0
    largest_factor = 0.0
    worst_case = ""
    wrong_cases = []
    for row in rows:
        if row["perturbation"] == "(off)":
            unperturbed_mean = row["mean"]
            continue
        case = f"{row['perturbation']} {row['rate']:g}"
        factor = row["mean"] / max(unperturbed_mean, 1e-7)
        if factor > largest_factor:
            largest_factor = factor
            worst_case = case
        is_within_bounds = row["mean"] <= 1e-5 and row["max"] <= 1e-4
        is_exact = factor <= 2.0 or is_within_bounds
        if not is_exact or not row["edits"]:
            wrong_cases.append(case)
    verdict = f"NOT EXACT: {', '.join(dict.fromkeys(wrong_cases))}" if wrong_cases else "exact"
    tokens = sum(row["tokens"] for row in rows)
    largest_gap = max(row["max"] for row in rows)
    return not wrong_cases, (
        f"{verdict}; {tokens} tokens, max {largest_gap:.1e},"
        f" mean at most {largest_factor:.2f} times the unperturbed ({worst_case})"
    )


def _rows_of_engine(folder: str, model: Any, arguments: dict[str, Any], kind: EngineKind) -> Iterator[dict[str, Any]]:
    from benchmarks import exactness
    from benchmarks.command_line import in_tree
    from benchmarks.gpu import models
    from ngrpo.rollout import model_runner
    from tests.stack.harness import build_engine, gaps, sample

    ranks = arguments.get("tensor_parallel", 1)
    settings: dict[str, Any] = {
        "dtype": arguments["dtype"],
        "enforce_eager": not kind.graphs,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 64,
    }
    if ranks > 1:
        settings |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
    if not arguments["rehearse"]:  # on a CPU vLLM 0.29 takes neither
        settings |= {"async_scheduling": kind.asynchronous, "gpu_memory_utilization": 0.2}
    llm = build_engine(folder, {"name": "gumbel"}, **settings)
    config = llm.llm_engine.vllm_config
    columns = {
        "runner": model_runner(llm),
        "dtype": arguments["dtype"],
        "ranks": ranks,
        "graphs": config.compilation_config.cudagraph_mode.name if kind.graphs else "off",
        "async": config.scheduler_config.async_scheduling,
    }
    tokens = arguments["tokens"]
    prompts = models.prompts(llm, arguments["questions"])
    unperturbed = gaps(model, sample(llm, prompts, [{"enabled": False}] * len(prompts), max_tokens=tokens))
    yield {
        **columns,
        "perturbation": "(off)",
        "tokens": len(unperturbed),
        "max": unperturbed.max().item(),
        "mean": unperturbed.mean().item(),
    }
    for name in arguments.get("only") or in_tree():
        for rate in kind.rates:
            yield {**columns, **exactness.measure(llm, model, prompts, name, rate, tokens)}
