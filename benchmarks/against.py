# SPDX-License-Identifier: Apache-2.0
"""Speed of perturbed rollouts, or of replay, with this code against another checkout of this repository.

    git worktree add --detach /tmp/before REVISION
    python -m benchmarks.against /tmp/before [--perturbations gumbel,gaussian] [--rates 0.1,1] [--batch 16] [--pairs 5]

Two processes, each with an engine, take turns, each first as often as the other. Printed: the median of the paired
ratios of speed (this code's over the other's, higher is better), and the range. On a CPU each engine has one thread
and CPU seconds are compared, which other work on the machine hardly changes; with `--wall` both have all cores, and
the clock is compared, as it is on a GPU. With `--replay`, a forward and backward in Hugging Face takes the place of
the rollout: plain, and with the records of `benchmarks.replay` replayed.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUESTION = "Explain step by step how to find the sum of the first hundred odd numbers."

# Rate, candidates and noise of the records of benchmarks.replay, which an earlier checkout may not name.
REPLAYED = {"neighbor 0.1": (0.1, 3, False), "gumbel 1": (1.0, 5, False), "gaussian 1": (1.0, 1, True)}


def serve(model: str, replay: bool) -> None:
    """Answers questions, in a process that runs this file under the PYTHONPATH of a checkout.

    Each line of JSON asks for a perturbation (`{"set": name, "rate": rate}`), a rollout (`{"batch": 16, "tokens": 32}`)
    or a replayed step (`{"record": "gaussian 1"}`); the answer is a line with the seconds it took.
    """
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    act = replays(model) if replay else rollouts(model)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        after = act(json.loads(line))
        spent = {"wall": time.perf_counter() - began, "cpu": time.process_time() - used}
        after()  # before the answer: the other process's turn begins with it
        print(json.dumps(spent), file=answers, flush=True)


def rollouts(model: str) -> Callable[[dict[str, Any]], Callable[[], object]]:
    """What does a rollout with an engine, and returns what is to be done outside the measured time."""
    import torch
    from vllm import LLM, SamplingParams

    from ngrpo.rollout import set_perturbation, take_records

    on_cpu = {"distributed_executor_backend": "uni", "kv_cache_memory_bytes": 1 << 30}
    where = {"gpu_memory_utilization": 0.4} if torch.cuda.is_available() else on_cpu
    common = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 64}
    llm = LLM(model, additional_config={"perturbation": {"name": "gumbel"}}, **common, **where)

    def act(request: dict[str, Any]) -> Callable[[], object]:
        if "set" in request:
            set_perturbation(llm, request["set"], rate=request["rate"])
        else:
            messages = [[{"role": "user", "content": f"{QUESTION} ({i})"}] for i in range(request["batch"])]
            llm.chat(messages, SamplingParams(max_tokens=request["tokens"], ignore_eos=True), use_tqdm=False)
        return lambda: take_records(llm)

    return act


def replays(model: str) -> Callable[[dict[str, Any]], Callable[[], object]]:
    """As :func:`rollouts`, for a step of a trainer: 4 samples of 128 tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.replay import random_record
    from perturbations import replaying

    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device)
    size = policy.config.vocab_size
    tokens = torch.randint(0, size, (4, 128), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(tokens)
    records = {
        label: [random_record(128, rate, k, size, i, noisy) for i in range(4)]
        for label, (rate, k, noisy) in REPLAYED.items()
    }

    def act(request: dict[str, Any]) -> Callable[[], object]:
        policy.zero_grad()
        label = request["record"]
        scope = replaying(policy, records[label], attention_mask=mask) if label else contextlib.nullcontext()
        with scope:
            loss = policy(tokens, attention_mask=mask, labels=tokens).loss
        loss.backward()
        loss.item()
        return lambda: None

    return act


class Checkout:
    """An engine in a process of its own that runs the code of a checkout."""

    def __init__(self, path: Path, model: str, clock: str, replay: bool) -> None:
        self._clock = clock
        one = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if clock == "cpu" else {}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(path), "--serve", model, *(["--replay"] if replay else [])],
            cwd=path,
            env={**os.environ, **one, "PYTHONPATH": str(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def answer(self) -> str:
        """The next line that it prints."""
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the engine ended; run {self._process.args} by hand to see why.")
        return line

    def ask(self, **what: str | float) -> float:
        """Seconds that something took."""
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return json.loads(self.answer())[self._clock]

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()


def compare(label: str, theirs: Checkout, ours: Checkout, run: dict[str, Any], pairs: int) -> None:
    """Prints our speed over theirs, after a run of each that does not count."""
    ratios = []
    for pair in range(-1, pairs):
        order = (theirs, ours) if pair % 2 == 0 else (ours, theirs)
        spent = {checkout: checkout.ask(**run) for checkout in order}
        ratios.append(spent[theirs] / spent[ours])
    ratios = ratios[1:]
    print(f"{label:16s} {statistics.median(ratios):7.3f}  {min(ratios):.3f}-{max(ratios):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="another checkout")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--perturbations", default="gumbel,gaussian")
    parser.add_argument("--rates", default="0.1,1")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--wall", action="store_true", help="all cores of a CPU, and the clock instead of CPU seconds")
    parser.add_argument("--replay", action="store_true", help="steps of a trainer instead of rollouts")
    parser.add_argument("--serve", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.replay)
        return
    import torch

    from benchmarks.machine import describe
    from ngrpo.machine.models.packaged import resolve

    model, here = resolve(options.model), Path(__file__).resolve().parents[1]
    clock = "wall" if options.wall or torch.cuda.is_available() else "cpu"
    what = "4 x 128 tokens" if options.replay else f"eager, {options.batch} requests of {options.tokens} tokens"
    print(f"{describe()}; {options.model}, bfloat16, {what}, {clock} seconds")
    print(f"{'':16s} {'ratio':>7s}  range", flush=True)
    checkouts = [Checkout(path, model, clock, options.replay) for path in (options.other.resolve(), here)]
    try:
        for checkout in checkouts:
            checkout.answer()
        if options.replay:
            for label in ("", *REPLAYED):
                compare(label or "plain", *checkouts, {"record": label}, options.pairs)
            return
        for name in options.perturbations.split(","):
            for rate in map(float, options.rates.split(",")):
                for checkout in checkouts:
                    checkout.ask(set=name, rate=rate)
                run = {"batch": options.batch, "tokens": options.tokens}
                compare(f"{name} {rate:g}", *checkouts, run, options.pairs)
    finally:
        for checkout in checkouts:
            checkout.close()


if __name__ == "__main__":
    main()
