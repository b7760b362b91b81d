# SPDX-License-Identifier: Apache-2.0
"""Seconds that an engine takes to start, and to check its overrides, with perturbations against stock vLLM.

    python -m benchmarks.start_up [--perturbations neighbor,gumbel] [--pairs 3]

Each engine has a process of its own, and they take turns. `start` ends with the engine's constructor, the check at its
end included; `first` is the first rollout, of 16 requests, which compiles what is compiled; `probe` is the share of
the check in `start`, and `synced` the check alone, as it runs after a weight sync. On a CPU each engine has one thread
and CPU seconds are told, which other work on the machine hardly changes; on a GPU the clock.
"""

import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

import torch

from benchmarks.against import QUESTION
from benchmarks.command_line import add_model, names, parser_of
from benchmarks.machine import ROOT, describe
from ngrpo.machine.models.packaged import resolve

_COLUMNS = ("start", "first", "probe", "synced")
_REQUESTS = 16


def started(model: str, name: str, clock: str) -> dict[str, float]:
    """Seconds of an engine's start in this process, by column.

    Args:
        model: its folder.
        name: of the perturbation; "" for stock vLLM.
        clock: "cpu" or "wall".
    """
    from vllm import LLM, SamplingParams

    seconds = time.process_time if clock == "cpu" else time.perf_counter
    check_seconds = _timed_checks(seconds) if name else []
    settings: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 64}
    if torch.cuda.is_available():
        settings["gpu_memory_utilization"] = 0.4
    else:
        settings |= {"distributed_executor_backend": "uni", "kv_cache_memory_bytes": 1 << 30}
    if name:
        settings["additional_config"] = {"perturbation": {"name": name}}
    chats = [[{"role": "user", "content": f"{QUESTION} ({number})"}] for number in range(_REQUESTS)]
    began = seconds()
    llm = LLM(model, **settings)
    ready = seconds()
    llm.chat(chats, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    answered = seconds()
    times = {"start": ready - began, "first": answered - ready, "probe": sum(check_seconds), "synced": 0.0}
    if check_seconds:
        llm.llm_engine.engine_core.engine_core.collective_rpc("perturbation_check")
        times["synced"] = check_seconds[-1]
    return times


def _timed_checks(seconds: Any) -> list[float]:
    """A list to which each of the engine's checks adds what it took."""
    from ngrpo.rollout import startup_check

    check_seconds: list[float] = []
    check_core = startup_check.check_core

    def timed(core: Any) -> Any:
        began = seconds()
        result = check_core(core)
        check_seconds.append(seconds() - began)
        return result

    startup_check.check_core = timed
    return check_seconds


def in_own_process(model: str, name: str, clock: str) -> dict[str, float]:
    """:func:`started` in a process of its own."""
    environment = dict(os.environ)
    if clock == "cpu":
        environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.start_up", "--started", model, name, clock],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise SystemExit(f"an engine with {name or 'no perturbation'} ended: {process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def main() -> None:
    parser = parser_of(__doc__)
    add_model(parser)
    default = ["neighbor", "gaussian", "gumbel", "soft", "multiplex"]
    parser.add_argument("--perturbations", type=names, default=default, help="separated by commas")
    parser.add_argument("--pairs", type=int, default=3, help="starts of each engine")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    clock = "wall" if torch.cuda.is_available() else "cpu"
    model = resolve(options.model)
    engines = {"stock": "", **{name: name for name in options.perturbations}}
    times: dict[str, list[dict[str, float]]] = {label: [] for label in engines}
    for _ in range(options.pairs):
        for label, name in engines.items():
            times[label].append(in_own_process(model, name, clock))
    print(f"{describe()}; {options.model}, bfloat16, eager, {clock} seconds, medians of {options.pairs}; start: range")
    print(f"{'':18s}" + "".join(f"{column:>8s}" for column in _COLUMNS) + "   range of start")
    for label, rows in times.items():
        medians = "".join(f"{statistics.median(row[column] for row in rows):8.2f}" for column in _COLUMNS)
        starts = [row["start"] for row in rows]
        print(f"{label:18s}{medians}   {min(starts):.2f}-{max(starts):.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--started"]:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        warnings.simplefilter("ignore")
        print(json.dumps(started(*sys.argv[2:])))
    else:
        main()
