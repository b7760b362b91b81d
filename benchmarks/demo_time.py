# SPDX-License-Identifier: Apache-2.0
"""How long `make demo` takes on this machine: ``python -m benchmarks.demo_time STEPS``.

A start is mostly imports, and a step is mostly matrix products. One of each is timed, and the factors are those of a
run on 2 cores of an AMD EPYC: a start of 18 imports, and 1,800 products a step. Both are timed in seconds of the
processor, which other processes hardly change. Then the time grows by the number of those that compute now.
"""

import os
import sys
import time
from pathlib import Path
from statistics import median

from ngrpo.machine.console import span

_STARTS = 18  # imports of a start
_PRODUCTS = 1800  # matrix products of a step
_REPETITIONS = 50
_LOOKS = 20
_LOOK_SECONDS = 0.05


def other_processes() -> float:
    """The mean number of other threads on this machine that compute, or wait for a core, over a second."""
    loadavg = Path("/proc/loadavg")
    if not loadavg.exists():  # not Linux: the mean of the last minute
        return os.getloadavg()[0]
    counts = []
    for _ in range(_LOOKS):
        time.sleep(_LOOK_SECONDS)
        running, _, _ = loadavg.read_text().split()[3].partition("/")
        counts.append(int(running) - 1)  # without this thread
    return sum(counts) / len(counts)


def slowdown(others: float, cores_of_machine: int, cores_of_run: int) -> float:
    """How much longer a run takes that keeps all of its cores busy beside ``others`` threads that compute."""
    return max(1.0, (cores_of_run + others) / cores_of_machine)


def import_seconds() -> float:
    """The seconds of the processor for an import of torch and a model; the wall time depends on other processes."""
    began = time.process_time()
    import torch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    return time.process_time() - began


def product_seconds(cores: int) -> float:
    """The seconds of a matrix product on all cores: the tokens of a step by the shape of an MLP."""
    import torch

    torch.set_num_threads(cores)
    tokens = torch.ones(1632, 576)
    weights = torch.ones(576, 1536)
    seconds = []
    for _ in range(_REPETITIONS):
        began = time.process_time()  # of all threads together
        tokens @ weights
        seconds.append((time.process_time() - began) / cores)
    return median(seconds)


def message(steps: int, idle_seconds: float, factor: float) -> str:
    """What `make demo` prints before it starts; ``factor``: of :func:`slowdown`."""
    subject = "1 step takes" if steps == 1 else f"{steps} steps take"
    text = f"{subject} about {span(max(factor * idle_seconds, 60.0))} on this machine"
    if factor < 1.15:
        return text
    return f"{text}, {factor:.1f} times as long as without the other work that it does now"


def main(steps: int) -> None:
    """Prints the estimate."""
    cores_of_machine = os.cpu_count() or 1
    cores_of_run = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores_of_machine
    factor = slowdown(other_processes(), cores_of_machine, cores_of_run)
    idle_seconds = _STARTS * import_seconds() + steps * _PRODUCTS * product_seconds(cores_of_run)
    print(message(steps, idle_seconds, factor), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
