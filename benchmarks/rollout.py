"""Tokens per second of perturbed rollouts against stock vLLM, interleaved in one process.

    python -m benchmarks.rollout [--model smollm2-135m] [--pairs 5] [--batches 1,16,64] [--rates 0.1,1]

A stock engine and a perturbed one live side by side; each pair times stock, then the perturbation, on the same prompts.
Printed: the median of the paired ratios (perturbed / stock, higher is better), and the range.

With `--against PATH`, another checkout of this repository takes the place of stock vLLM: two processes take turns, each
first as often as the other, and the ratio is this code's speed over that one's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.machine import describe
from ngrpo.models import resolve
from ngrpo.rollout import set_perturbation, take_records
from perturbations import available

QUESTION = "Explain step by step how to find the sum of the first hundred odd numbers."


def settings(compiled: bool) -> dict[str, Any]:
    """Of each engine."""
    on_cpu = {} if _cuda() else {"distributed_executor_backend": "uni", "kv_cache_memory_bytes": 1 << 30}
    on_gpu = {"gpu_memory_utilization": 0.4} if _cuda() else {}
    common = {"dtype": "bfloat16", "enforce_eager": not compiled, "max_model_len": 1024, "max_num_seqs": 64}
    return {**common, **on_cpu, **on_gpu}


def engine(model: str, spec: dict[str, Any] | None, compiled: bool) -> Any:
    from vllm import LLM

    return LLM(model, **settings(compiled), **({"additional_config": {"perturbation": spec}} if spec else {}))


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def rate_of(llm: Any, batch: int, tokens: int) -> float:
    """Generated tokens per second."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    messages = [[{"role": "user", "content": f"{QUESTION} ({i})"}] for i in range(batch)]
    began = time.perf_counter()
    llm.chat(messages, params, use_tqdm=False)
    return batch * tokens / (time.perf_counter() - began)


class Checkout:
    """An engine in a process of its own that runs the code of a checkout."""

    def __init__(self, path: Path, model: str, compiled: bool) -> None:
        worker = Path(__file__).with_name("rollout_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(worker), model, json.dumps(settings(compiled))],
            cwd=path,
            env={**os.environ, "PYTHONPATH": str(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def answer(self) -> str:
        """The next line that it prints."""
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the engine of {self._process.args} ended; run it by hand to see why.")
        return line

    def ask(self, **what: Any) -> float:
        """Seconds that something took."""
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return float(self.answer())

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()


def against(
    other: Path, model: str, options: argparse.Namespace, names: list[str], rates: list[float], batches: list[int]
) -> None:
    """Prints this code's speed over that of another checkout."""
    checkouts = [Checkout(path, model, options.compiled) for path in (other, Path(__file__).parents[1])]
    try:
        [checkout.answer() for checkout in checkouts]
        for name, rate in ((name, rate) for name in names for rate in rates):
            for checkout in checkouts:
                checkout.ask(set=name, rate=rate)
            for batch in batches:
                run = {"batch": batch, "tokens": options.tokens}
                [checkout.ask(**run) for checkout in checkouts]
                ratios, seconds = [], []
                for pair in range(options.pairs):
                    turns = checkouts if pair % 2 == 0 else checkouts[::-1]
                    spent = {checkout: checkout.ask(**run) for checkout in turns}
                    ratios.append(spent[checkouts[0]] / spent[checkouts[1]])
                    seconds.append(spent[checkouts[0]])
                show(name, rate, batch, batch * options.tokens / statistics.median(seconds), ratios)
    finally:
        [checkout.close() for checkout in checkouts]


def show(name: str, rate: float, batch: int, theirs: float, ratios: list[float]) -> None:
    """One line of the table."""
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    print(f"{name:10s} {rate:5g} {batch:5d} {theirs:12.1f} {middle:7.3f}  {low:.3f}-{high:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--rates", default="0.1,1")
    parser.add_argument("--perturbations", "--operators", default=None, help="separated by commas; all by default")
    parser.add_argument("--compiled", action="store_true", help="torch.compile and CUDA graphs on")
    parser.add_argument("--against", type=Path, default=None, help="another checkout, in place of stock vLLM")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    model = resolve(options.model)
    in_tree = [n for n, source in available().items() if source.startswith("perturbations.") and n != "none"]
    names = options.perturbations.split(",") if options.perturbations else in_tree
    batches, rates = [int(b) for b in options.batches.split(",")], [float(r) for r in options.rates.split(",")]
    print(f"{describe()}; {options.model}, bfloat16, {'compiled' if options.compiled else 'eager'}")
    base = "stock" if options.against is None else "other"
    print(f"{'name':10s} {'rate':>5s} {'batch':>5s} {base + ' tok/s':>12s} {'ratio':>7s}  range", flush=True)
    if options.against is not None:
        against(options.against.resolve(), model, options, names, rates, batches)
        return
    stock, perturbed = engine(model, None, options.compiled), engine(model, {"name": "gumbel"}, options.compiled)
    for name in names:
        for rate in rates:
            set_perturbation(perturbed, name, rate=rate)
            for batch in batches:
                # The first runs fill the neighbor table and compile the sampler for this batch.
                rate_of(stock, batch, options.tokens), rate_of(perturbed, batch, options.tokens)
                pairs = [
                    (rate_of(stock, batch, options.tokens), rate_of(perturbed, batch, options.tokens))
                    for _ in range(options.pairs)
                ]
                take_records(perturbed)
                ratios = [ours / theirs for theirs, ours in pairs]
                show(name, rate, batch, statistics.median(theirs for theirs, _ in pairs), ratios)


if __name__ == "__main__":
    main()
