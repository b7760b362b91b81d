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

from benchmarks.against import QUESTION
from benchmarks.command_line import add_model, add_perturbations, in_tree, integers, numbers, parser_of
from benchmarks.machine import describe
from benchmarks.pairs import ratio_and_range, summary
from ngrpo.machine.models.packaged import resolve
from ngrpo.rollout import set_perturbation, take_records

Clock = Callable[[], float]


def engine(model: str, spec: dict[str, Any] | None, compiled: bool, **options: Any) -> Any:
    """An engine in this process; two of them fit together.

    Args:
        model: its folder.
        spec: of the perturbation; None for stock vLLM.
        compiled: whether vLLM compiles the model, and captures CUDA graphs on a GPU.
        options: of vLLM's ``LLM``, before those of this function. The default dtype is bfloat16 on a GPU and float32
            on a CPU.
    """
    from vllm import LLM

    settings: dict[str, Any] = {
        "dtype": _dtype(),
        "enforce_eager": not compiled,
        "max_model_len": 1024,
        "max_num_seqs": 64,
    }
    if _on_cuda():
        # With a size of the cache, the share of a GPU's memory is only what must be free at the start.
        settings |= {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 8 << 30}
    else:
        settings |= {"distributed_executor_backend": "uni", "kv_cache_memory_bytes": 1 << 30}
    settings |= options
    if spec:
        settings["additional_config"] = {"perturbation": spec}
    return LLM(model, **settings)


def _on_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _dtype() -> str:
    return "bfloat16" if _on_cuda() else "float32"


def questions(llm: Any, batch: int) -> list[list[int]]:
    """Chat-templated token prompts, all different."""
    tokenizer = llm.get_tokenizer()
    prompts = []
    for number in range(batch):
        chat = [{"role": "user", "content": f"{QUESTION} ({number})"}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    return prompts


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
    rate_of(stock, prompts, tokens, clock)
    rate_of(perturbed, prompts, tokens, clock)
    rates = []
    for pair in range(pairs):
        if pair % 2 == 0:
            stock_rate = rate_of(stock, prompts, tokens, clock)
            perturbed_rate = rate_of(perturbed, prompts, tokens, clock)
        else:
            perturbed_rate = rate_of(perturbed, prompts, tokens, clock)
            stock_rate = rate_of(stock, prompts, tokens, clock)
        rates.append((stock_rate, perturbed_rate))
    take_records(perturbed)
    return summary(rates, "stock")


def main() -> None:
    options = _options()
    warnings.simplefilter("ignore")
    model = resolve(options.model)
    clock: Clock = time.perf_counter
    conditions = f"{options.model}, {options.dtype}, {'compiled' if options.compiled else 'eager'}"
    if options.cpu_seconds:
        clock = time.process_time
        conditions += ", CPU seconds of one thread"
        _use_one_thread()
    stock = engine(model, None, options.compiled, dtype=options.dtype)
    perturbed = engine(model, {"name": "gumbel"}, options.compiled, dtype=options.dtype)
    print(f"{describe()}; {conditions}")
    print(f"{'name':10s} {'rate':>5s} {'batch':>5s} {'stock tok/s':>12s} {'ratio':>7s}  range")
    for words in options.perturbations:
        name, *settings = words.split(":")
        choices = dict(setting.split("=") for setting in settings)
        label = choices.get("variant", name)
        for rate in options.rates:
            set_perturbation(perturbed, name, rate=rate, **choices)
            for batch in options.batches:
                speed = paired(stock, perturbed, questions(stock, batch), options.tokens, options.pairs, clock)
                row = f"{label:10s} {rate:5g} {batch:5d} {speed['stock']:12.1f} {ratio_and_range(speed)}"
                print(row, flush=True)


def _options() -> argparse.Namespace:
    parser = parser_of(
        f"{__doc__}\nOptions of a perturbation follow its name: --perturbations neighbor:variant=released"
    )
    add_model(parser)
    add_perturbations(parser, in_tree())
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batches", type=integers, default=[1, 16, 64], help="separated by commas")
    parser.add_argument("--rates", type=numbers, default=[0.1, 1.0], help="separated by commas")
    parser.add_argument("--dtype", default=_dtype(), choices=("float32", "bfloat16"), help="default: %(default)s")
    parser.add_argument("--compiled", action="store_true", help="torch.compile and CUDA graphs on")
    parser.add_argument("--cpu-seconds", action="store_true", help="CPU seconds of one thread instead of the clock")
    return parser.parse_args()


def _use_one_thread() -> None:
    """Gives the engines of this process, which are built later, one thread."""
    import torch

    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
