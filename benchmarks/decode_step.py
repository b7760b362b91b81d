# SPDX-License-Identifier: Apache-2.0
"""What the perturber adds to one decode step of an engine: operations, copies, waits for the device, and time.

    python -m benchmarks.decode_step [--perturbations gumbel,gaussian] [--rate 1] [--batch 16] [--vocabulary 49152]

There is no model and no engine: a real perturber gets random logits, on CUDA where there is a GPU. What is counted, in
steps in which every request decodes:

- `waits`: operations that need a value from the device (`.item()`, `nonzero`, indexing with a mask). On CUDA PyTorch's
  own check is on as well, and any wait is an error.
- `loops`: lines of Python that each further request adds.
- `launches`: operations on tensors without views; a compiled part is one.
- `up`, `down`: copies between host and device.
- `host µs of a graph`: time of one core for a step that is one CUDA graph, without the replay, by requests and rate;
  the logits are there before it.
- `with logits`: the same at rate 1, where the graph computes the logits too.

The last line has the time for the record of a long response, when its request has finished.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.command_line import add_perturbations, parser_of
from benchmarks.decoding import PROMPT, Counts, Decoding, counting
from benchmarks.machine import describe
from ngrpo.rollout import step_graphs
from ngrpo.rollout.async_scheduling import STEPS_AT_ONCE
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import available, create
from perturbations.base import Perturbation


def count(
    perturbation: Perturbation, batch: int = 16, steps: int = 8, vocabulary: int = 1024, device: str = "cpu"
) -> Counts:
    """Counts over some decode steps of a batch, after one that warms up."""
    decoding = Decoding(perturbation, batch, vocabulary, device=device)
    decoding.step()
    with counting(decoding.perturber) as counts:
        for _ in range(steps):
            decoding.step()
    return counts


def loops(perturbation: Perturbation, device: str = "cpu") -> float:
    """Lines of Python that a decode step executes for each further request: 0 where nothing loops over them."""
    of_4_requests = count(perturbation, 4, device=device)
    of_64_requests = count(perturbation, 64, device=device)
    return (of_64_requests.lines - of_4_requests.lines) / of_4_requests.steps / (64 - 4)


def microseconds(perturbation: Perturbation, batch: int, vocabulary: int, device: str, steps: int = 100) -> float:
    """Median time of a decode step: of one core of a CPU; on CUDA of the host until the device has done it."""
    decoding = Decoding(perturbation, batch, vocabulary, 576, device)
    clock = time.perf_counter if device == "cuda" else time.thread_time
    times = []
    for step in range(steps + 10):
        start = clock()
        decoding.step()
        if device == "cuda":
            torch.cuda.synchronize()
        if step >= 10:
            times.append(clock() - start)
    return statistics.median(times) * 1e6


class _NoGraph:
    """A captured step whose replay does nothing, so that what remains is the host's own work."""

    def __init__(self, pool: Any) -> None: ...

    @staticmethod
    def pool() -> Any:
        """There is no memory to share."""

    def capture(self, region: Callable[[], None]) -> None:
        """Nothing is captured: a first run of the step, before this call, has made its buffers."""

    def replay(self) -> None:
        """A replay is one call on the host, and its kernels run on the device."""


def host_microseconds(
    perturbation: Perturbation, batch: int, steps: int = 400, with_logits: bool = False
) -> tuple[float, float]:
    """Microseconds of one core for a decode step as one graph without its replay: least and mean of many steps.

    ``with_logits``: whether the graph computes the logits. Copies are within the host's memory, so that the time of a
    launch on CUDA is not in these numbers.
    """
    times = []
    with (
        patch.object(step_graphs, "available", lambda device: True),
        patch.object(step_graphs, "CudaGraph", _NoGraph),
        torch.inference_mode(),
    ):
        decoding = Decoding(perturbation, batch, vocabulary=64, with_logits=with_logits)
        decoding.step()
        # The records that a replay would write at this rate. Their flags: 1 for a row that is fed, 2 for tokens that
        # agree.
        fed = torch.from_numpy(np.random.default_rng(0).random(batch) < perturbation.rate)
        decoding.perturber._graphs._record.words[:batch, 0] = torch.where(fed, 3, 0)
        for _ in range(2 * STEPS_AT_ONCE):
            decoding.step()
        for _ in range(steps // STEPS_AT_ONCE):
            # Records of sixteen steps are written at once, so that sixteen steps are timed together.
            start = time.thread_time_ns()
            for _ in range(STEPS_AT_ONCE):
                decoding.step()
            times.append((time.thread_time_ns() - start) / STEPS_AT_ONCE / 1e3)
    return min(times), statistics.mean(times)


def sampled(name: str, rate: float) -> Perturbation:
    """A perturbation by name; one that offers it leaves the token in the text to sampling, also at rate 1."""
    options = {"realization": "sampled"} if name == "neighbor" else {}
    return create(name, rate=rate, **options)


def device_microseconds(perturbation: Perturbation, batch: int, vocabulary: int, device: str, steps: int = 20) -> float:
    """A CUDA device's own time in a decode step, without its waits for the host; 0 on a CPU."""
    if device != "cuda":
        return 0.0
    from torch.profiler import ProfilerActivity, profile

    decoding = Decoding(perturbation, batch, vocabulary, 576, device)
    for _ in range(10):
        decoding.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            decoding.step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in trace.key_averages()) / steps


def record_milliseconds(positions: int = 32_000, candidates: int = 5) -> tuple[float, float]:
    """Milliseconds to build the record of a finished request with so many perturbed positions, and to pack it."""
    draws = np.random.default_rng(0)
    store = TrajectoryStore(1, positions + PROMPT)
    slot = np.array([store.open("a", 1, PROMPT, True)])
    for position in range(PROMPT, PROMPT + positions):
        weights = draws.random((1, candidates), dtype=np.float32)
        ids = draws.integers(0, 1 << 16, (1, candidates), dtype=np.int32)
        store.write_tokens(slot, np.array([position]), weights[:, 0])
        edits = {"ids": ids, "weights": weights, "agreed": np.ones(1, dtype=bool)}
        store.write_edits(slot, np.array([position]), edits)

    def fastest(function: Callable[[], object]) -> float:
        times = []
        for _ in range(9):
            start = time.thread_time()
            function()
            times.append(time.thread_time() - start)
        return min(times) * 1e3

    record, _log_probs = store.record("a")
    return fastest(lambda: store.record("a")), fastest(record.to_bytes)


def main() -> None:
    parser = parser_of(__doc__)
    add_perturbations(parser, [name for name in available() if name != "none"])
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=49152)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    print(f"{describe()}; {options.batch} requests, {options.vocabulary} tokens, rate {options.rate:g}")
    columns = f"{'name':10s} {'waits':>5s} {'loops':>5s} {'launches':>8s} {'up':>4s} {'down':>4s} {'µs':>7s}"
    print(f"{columns}  host µs of a graph: requests@rate")
    for name in options.perturbations:
        _print_row(name, options, device)
    built, packed = record_milliseconds()
    print(f"record of 32,000 positions with 5 candidates: built in {built:.1f} ms, packed in {packed:.1f} ms")


def _print_row(name: str, options: argparse.Namespace, device: str) -> None:
    """The measurements of one perturbation."""
    perturbation = sampled(name, options.rate)
    counts = count(perturbation, options.batch, device=device)
    fields = (
        f"{name:10s}",
        f"{len(counts.waits) / counts.steps:5g}",
        f"{loops(sampled(name, 1.0), device):5.2g}",
        f"{counts.launches / counts.steps:8.1f}",
        f"{counts.uploads / counts.steps:4.2g}",
        f"{counts.downloads / counts.steps:4.2g}",
        f"{microseconds(perturbation, options.batch, options.vocabulary, device):7.0f}",
    )
    of_graphs = []
    for batch in (64, 256):
        for rate in (0.1, 1.0):
            least, _mean = host_microseconds(sampled(name, rate), batch)
            of_graphs.append(f"{batch}@{rate:g} {least:.0f}")
    if not perturbation.reads_hidden:
        of_graphs.append("with logits")
        for batch in (64, 256):
            least, _mean = host_microseconds(sampled(name, 1.0), batch, with_logits=True)
            of_graphs.append(f"{batch}@1 {least:.0f}")
    print(" ".join(fields), *of_graphs, sep="  ", flush=True)


if __name__ == "__main__":
    main()
