# SPDX-License-Identifier: Apache-2.0
"""Seconds that an engine takes to start, and to check its overrides, with perturbations against stock vLLM.

    python -m benchmarks.start_up [--perturbations neighbor,gumbel] [--pairs 3] [--other CHECKOUT] [--wall]

Each engine has a process of its own, and they take turns. `start` ends with the engine's constructor, the probe at its
end included; `first` is the first rollout, of 16 requests, which compiles what is compiled; `probe` is the share of
the probe in `start`, and `synced` the probe alone, as it runs after a weight sync. With `--other`, the engines of
another checkout of this repository take turns with them. On a CPU each engine has one thread and CPU seconds are
told, which other work on the machine hardly changes; with `--wall`, all cores and the clock.
"""

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

QUESTION = "Explain step by step how to find the sum of the first hundred odd numbers."
_COLUMNS = ("start", "first", "probe", "synced")


def started(model: str, name: str, clock: str) -> dict[str, float]:
    """Seconds of an engine's start in this process; PYTHONPATH chooses the checkout.

    Args:
        model: its folder.
        name: of the perturbation; "" for stock vLLM.
        clock: "cpu" or "wall".
    """
    from vllm import LLM, SamplingParams

    seconds = time.process_time if clock == "cpu" else time.perf_counter
    proofs = _timed_proofs(seconds) if name else []
    settings: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 64}
    if _cuda():
        settings["gpu_memory_utilization"] = 0.4
    else:
        settings |= {"distributed_executor_backend": "uni", "kv_cache_memory_bytes": 1 << 30}
    if name:
        settings["additional_config"] = {"perturbation": {"name": name}}
    began = seconds()
    llm = LLM(model, **settings)
    ready = seconds()
    messages = [[{"role": "user", "content": f"{QUESTION} ({i})"}] for i in range(16)]
    llm.chat(messages, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    times = {"start": ready - began, "first": seconds() - ready, "probe": sum(proofs), "synced": 0.0}
    if proofs:
        llm.llm_engine.engine_core.engine_core.collective_rpc("perturbation_check")
        times["synced"] = proofs[-1]
    return times


def _timed_proofs(seconds: Any) -> list[float]:
    """A list to which each of the engine's proofs adds what it took; a checkout from before them has none."""
    proofs: list[float] = []
    try:
        from ngrpo.rollout import startup_check
    except ImportError:
        return proofs
    prove = startup_check.check_core

    def timed(core: Any) -> Any:
        began = seconds()
        result = prove(core)
        proofs.append(seconds() - began)
        return result

    startup_check.check_core = timed
    return proofs


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def in_own_process(checkout: Path, model: str, name: str, clock: str) -> dict[str, float]:
    """:func:`started` with the code of a checkout."""
    one = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if clock == "cpu" else {}
    done = subprocess.run(
        [sys.executable, __file__, "--started", model, name, clock],
        cwd=checkout,
        env={**os.environ, **one, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"an engine with {name or 'no perturbation'} ended: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--perturbations", default="neighbor,gaussian,gumbel,soft,multiplex")
    parser.add_argument("--pairs", type=int, default=3, help="starts of each")
    parser.add_argument("--other", type=Path, help="another checkout of this repository")
    parser.add_argument("--wall", action="store_true", help="all cores of a CPU, and the clock instead of CPU seconds")
    parser.add_argument("--started", nargs=3, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.started:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        print(json.dumps(started(*options.started)))
        return

    from benchmarks.machine import describe
    from ngrpo.machine.models.packaged import resolve

    clock = "wall" if options.wall or _cuda() else "cpu"
    model, here = resolve(options.model), Path(__file__).resolve().parents[1]
    names = options.perturbations.split(",")
    engines = {"stock": (here, ""), **{name: (here, name) for name in names}}
    if options.other:
        engines |= {f"{name}, other": (options.other.resolve(), name) for name in names}
    times: dict[str, list[dict[str, float]]] = {label: [] for label in engines}
    for _ in range(options.pairs):
        for label, (checkout, name) in engines.items():
            times[label].append(in_own_process(checkout, model, name, clock))
    print(f"{describe()}; {options.model}, bfloat16, eager, {clock} seconds, medians of {options.pairs}; start: range")
    print(f"{'':18s}" + "".join(f"{column:>8s}" for column in _COLUMNS) + "   range of start")
    for label, each in times.items():
        medians = "".join(f"{statistics.median(one[column] for one in each):8.2f}" for column in _COLUMNS)
        starts = [one["start"] for one in each]
        print(f"{label:18s}{medians}   {min(starts):.2f}-{max(starts):.2f}")


if __name__ == "__main__":
    main()
