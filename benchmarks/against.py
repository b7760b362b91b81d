# SPDX-License-Identifier: Apache-2.0
"""Speed of perturbed rollouts with this code against another checkout of this repository.

    git worktree add --detach /tmp/before REVISION
    python -m benchmarks.against /tmp/before [--perturbations gumbel,gaussian] [--rates 0.1,1] [--batch 16] [--pairs 5]

Two processes, each with an engine, take turns, each first as often as the other. Printed: the median of the paired
ratios of speed (this code's over the other's, higher is better), and the range. On a CPU each engine has one thread
and CPU seconds are compared, which other work on the machine hardly changes; on a GPU the clock is compared.
"""

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

QUESTION = "Explain step by step how to find the sum of the first hundred odd numbers."


def serve(model: str) -> None:
    """Serves requests in a process that runs this file under the PYTHONPATH of a checkout.

    Each line of JSON asks for a perturbation (`{"set": name, "rate": rate}`) or for a rollout (`{"batch": 16,
    "tokens": 32}`); the answer is a line with the seconds it took, on the clock and of the CPU. Nothing of this
    repository is imported but what the other checkout has too.
    """
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed must not mix with the answers
    import torch
    from vllm import LLM, SamplingParams

    from ngrpo.rollout import set_perturbation, take_records

    settings: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 64}
    if torch.cuda.is_available():
        settings["gpu_memory_utilization"] = 0.4
    else:
        settings |= {"distributed_executor_backend": "uni", "kv_cache_memory_bytes": 1 << 30}
    llm = LLM(model, additional_config={"perturbation": {"name": "gumbel"}}, **settings)

    def act(request: dict[str, Any]) -> None:
        if "set" in request:
            set_perturbation(llm, request["set"], rate=request["rate"])
            return
        chats = []
        for number in range(request["batch"]):
            chats.append([{"role": "user", "content": f"{QUESTION} ({number})"}])
        llm.chat(chats, SamplingParams(max_tokens=request["tokens"], ignore_eos=True), use_tqdm=False)

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        wall_start = time.perf_counter()
        cpu_start = time.process_time()
        act(json.loads(line))
        seconds = {"wall": time.perf_counter() - wall_start, "cpu": time.process_time() - cpu_start}
        take_records(llm)  # before the answer: the other process's turn begins with it
        print(json.dumps(seconds), file=answers, flush=True)


class Checkout:
    """An engine in a process of its own that runs the code of a checkout."""

    def __init__(self, path: Path, model: str, clock: str) -> None:
        """
        Args:
            path: of the checkout.
            model: its folder.
            clock: "cpu" or "wall", which of the seconds are compared.
        """
        self._clock = clock
        environment = {**os.environ, "PYTHONPATH": str(path)}
        if clock == "cpu":
            environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", model],
            cwd=path,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def answer(self) -> str:
        """The next line that the process prints."""
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the engine ended; run {self._process.args} by hand to see why.")
        return line

    def ask(self, **request: str | float) -> float:
        """Seconds that a request took."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self.answer())[self._clock]

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def seconds_in_pairs(other: Checkout, ours: Checkout, run: dict[str, Any], pairs: int) -> list[tuple[float, float]]:
    """(our seconds, the other's) of rollouts in turn, after one of each that does not count."""
    seconds = []
    for pair in range(-1, pairs):
        order = (other, ours) if pair % 2 == 0 else (ours, other)
        spent = {checkout: checkout.ask(**run) for checkout in order}
        seconds.append((spent[ours], spent[other]))
    return seconds[1:]


def main() -> None:
    import torch

    from benchmarks.command_line import add_model, names, numbers, parser_of
    from benchmarks.machine import ROOT, describe
    from benchmarks.pairs import ratio_and_range, summary
    from ngrpo.machine.models.packaged import resolve

    parser = parser_of(__doc__)
    parser.add_argument("other", type=Path, help="another checkout")
    add_model(parser)
    parser.add_argument("--perturbations", type=names, default=["gumbel", "gaussian"], help="separated by commas")
    parser.add_argument("--rates", type=numbers, default=[0.1, 1.0], help="separated by commas")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    model = resolve(options.model)
    clock = "wall" if torch.cuda.is_available() else "cpu"
    rollout_size = f"{options.batch} requests of {options.tokens} tokens"
    print(f"{describe()}; {options.model}, bfloat16, eager, {rollout_size}, {clock} seconds")
    print(f"{'':16s} {'ratio':>7s}  range", flush=True)
    other = Checkout(options.other.resolve(), model, clock)
    ours = Checkout(ROOT, model, clock)
    run = {"batch": options.batch, "tokens": options.tokens}
    try:
        other.answer()
        ours.answer()
        for name in options.perturbations:
            for rate in options.rates:
                other.ask(set=name, rate=rate)
                ours.ask(set=name, rate=rate)
                figures = summary(seconds_in_pairs(other, ours, run, options.pairs), "our_seconds")
                label = f"{name} {rate:g}"
                print(f"{label:16s} {ratio_and_range(figures)}", flush=True)
    finally:
        other.close()
        ours.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main()
