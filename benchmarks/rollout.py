# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of perturbed rollouts against stock vLLM, interleaved in one process.

    python -m benchmarks.rollout [--dtype bfloat16] [--pairs 5] [--batches 1,16,64] [--rates 0.1,1]

A stock engine and a perturbed one live side by side; each pair times both on the same prompts, in alternating order.
Printed: the median of the paired ratios (perturbed / stock, higher is better), and the range. With `--cpu-seconds` the
engines have one thread, and its CPU seconds are compared, which other work on the machine hardly changes.
"""

import argparse
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.machine import describe
from benchmarks.pairs import summary
from ngrpo.machine.models.packaged import resolve
from ngrpo.rollout import set_perturbation, take_records
from perturbations import available

Clock = Callable[[], float]
QUESTION = "Explain step by step how to find the sum of the first hundred odd numbers."


def engine(model: str, spec: dict[str, Any] | None, compiled: bool, **options: Any) -> Any:
    """An engine in this process, in float32 on a CPU; two of them fit together."""
    from vllm import LLM

    extra = {"additional_config": {"perturbation": spec}} if spec else {}
    on_cpu = {"distributed_executor_backend": "uni", "kv_cache_memory_bytes": 1 << 30}
    settings = {"dtype": _dtype(), "enforce_eager": not compiled, "max_model_len": 1024, "max_num_seqs": 64}
    # With a size of the cache, the share of a GPU's memory is only what must be free at the start.
    settings |= {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 8 << 30} if _cuda() else on_cpu
    return LLM(model, **{**settings, **options}, **extra)


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _dtype() -> str:
    return "bfloat16" if _cuda() else "float32"


def questions(llm: Any, batch: int) -> list[list[int]]:
    """Chat-templated token prompts, all different."""
    tokenizer = llm.get_tokenizer()
    result = []
    for i in range(batch):
        message = [{"role": "user", "content": f"{QUESTION} ({i})"}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        result.append(tokenizer.encode(text, add_special_tokens=False))
    return result


def rate_of(llm: Any, prompts: list[list[int]], tokens: int, clock: Clock = time.perf_counter) -> float:
    """Generated tokens per second of a clock."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    began = clock()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return len(prompts) * tokens / (clock() - began)


def paired(
    stock: Any, perturbed: Any, prompts: list[list[int]], tokens: int, pairs: int, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """Times both engines in turn, every second time the perturbed one first.

    Returns:
        ``stock``: its median of tokens per second; ``ratio``, ``lowest``, ``highest``: perturbed over stock, the
        median and the range of the pairs.
    """
    # The first runs fill the neighbor table and compile the sampler for this batch.
    both = (stock, perturbed)
    for llm in both:
        rate_of(llm, prompts, tokens, clock)
    rates = []
    for pair in range(pairs):
        found = [rate_of(llm, prompts, tokens, clock) for llm in both[:: -1 if pair % 2 else 1]]
        rates.append(tuple(found[:: -1 if pair % 2 else 1]))
    take_records(perturbed)
    return summary(rates, "stock")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--rates", default="0.1,1")
    parser.add_argument(
        "--perturbations", "--operators", default=None, help="by commas; neighbor:variant=released; all by default"
    )
    parser.add_argument("--dtype", default=_dtype(), choices=("float32", "bfloat16"), help="default: %(default)s")
    parser.add_argument("--compiled", action="store_true", help="torch.compile and CUDA graphs on")
    parser.add_argument("--cpu-seconds", action="store_true", help="CPU seconds of one thread instead of the clock")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.cpu_seconds:
        import torch

        os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        torch.set_num_threads(1)
    model = resolve(options.model)
    stock, perturbed = (
        engine(model, spec, options.compiled, dtype=options.dtype) for spec in (None, {"name": "gumbel"})
    )
    in_tree = [n for n, source in available().items() if source.startswith("perturbations.") and n != "none"]
    names = options.perturbations.split(",") if options.perturbations else in_tree
    batches = [int(b) for b in options.batches.split(",")]
    clock, used = (time.process_time, ", CPU seconds of one thread") if options.cpu_seconds else (time.perf_counter, "")
    print(f"{describe()}; {options.model}, {options.dtype}, {'compiled' if options.compiled else 'eager'}{used}")
    print(f"{'name':10s} {'rate':>5s} {'batch':>5s} {'stock tok/s':>12s} {'ratio':>7s}  range")
    for each in names:
        name, *settings = each.split(":")
        choices = dict(word.split("=") for word in settings)
        label = choices.get("variant", name)
        for rate in (float(r) for r in options.rates.split(",")):
            set_perturbation(perturbed, name, rate=rate, **choices)
            for batch in batches:
                speed = paired(stock, perturbed, questions(stock, batch), options.tokens, options.pairs, clock)
                print(
                    f"{label:10s} {rate:5g} {batch:5d} {speed['stock']:12.1f} {speed['ratio']:7.3f}"
                    f"  {speed['lowest']:.3f}-{speed['highest']:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
