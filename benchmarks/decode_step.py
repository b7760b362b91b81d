# SPDX-License-Identifier: Apache-2.0
"""What the perturber adds to one decode step of an engine: operations, copies, waits for the device, and time.

    python -m benchmarks.decode_step [--perturbations gumbel,gaussian] [--rate 1] [--batch 16] [--vocabulary 49152]

No model and no engine: random logits are given to a real perturber, on CUDA where there is one. Counted per step, with
every request decoding. `waits`: operations that need a value from the device (`.item()`, `nonzero`, indexing with a
mask); on CUDA PyTorch's own check is on as well, and any wait is an error. `loops`: lines of Python that each further
request adds. `launches`: operations on tensors, views left out, and each compiled part taken as one; up and down:
copies between host and device. `host µs of a graph`: what a step that is one CUDA graph costs the host beside the
replay, by requests and rate. At last, what the record of a long response costs when its request has finished.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.machine import describe
from ngrpo.rollout import step_graphs
from ngrpo.rollout.async_scheduling import STEPS_AT_ONCE
from ngrpo.rollout.input_override import InputOverride
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.step_graphs import rows_of_buffers
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import available, create
from perturbations.base import Perturbation
from perturbations.embeddings import matrix_embeddings
from perturbations.gates.default import BoundGate

_PROMPT = 20
# What needs a value on the host, by the name of the operation. Others read a mask and wait for its count.
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "allclose")
_OURS = ("/ngrpo/", "/perturbations/")
_MASKED = ("index", "index_put", "index_put_", "_index_put_impl_")


@dataclass
class Counts:
    """What was seen in some decode steps of a perturber.

    Attributes:
        steps: decode steps of all requests.
        waits: operations that wait for the device, by name.
        launches: operations on tensors.
        uploads: copies from the host to the device.
        downloads: copies from the device to the host.
        lines: lines of this project's Python.
    """

    steps: int = 0
    waits: tuple[str, ...] = ()
    launches: int = 0
    uploads: int = 0
    downloads: int = 0
    lines: int = 0


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in _MASKED and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if masks or (name.startswith(_WAITS) and name != "nonzero_static"):  # which is told how many there are
            self._counts.waits += (name,)
        self._counts.launches += not func.is_view
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting(perturber: RolloutPerturber) -> Iterator[Counts]:
    """Counts what the perturber of an engine in this process does in its decode steps; prefills are left out.

    On CUDA a step that waits for the device raises ``RuntimeError``.
    """
    counts, begin, finish = Counts(), perturber.begin, perturber.finish
    upload, download, kernels = perturber._upload, perturber._download, perturber._kernels
    graphs = perturber._graphs
    run = None if graphs is None else graphs.run
    # On a CPU the draw alone is compiled, and it may look at numbers.
    names = ("draw", "proposed", "realised", "advance_gate") if kernels.compiled else ("draw",)
    parts = {name: getattr(kernels, name) for name in names}
    operations, decoding = _Operations(counts), False

    def lines(frame: Any, event: str, _: Any) -> Any:
        ours = any(part in frame.f_code.co_filename for part in _OURS)
        counts.lines += ours and event == "line"
        return lines if ours else None

    def counted(act: Callable[..., Any], *args: Any) -> Any:
        on_cuda, tracer = perturber.device.type == "cuda", sys.gettrace()
        with operations:
            sys.settrace(lines)
            if on_cuda:
                torch.cuda.set_sync_debug_mode("error")
            try:
                return act(*args)
            finally:
                if on_cuda:
                    torch.cuda.set_sync_debug_mode("default")
                sys.settrace(tracer)

    def counted_begin(names: Any, starts: Any, computed: Any, discard: Any) -> None:
        nonlocal decoding
        decoding = bool((computed == 1).all() and not discard.any())
        counts.steps += decoding
        (counted if decoding else lambda act, *args: act(*args))(begin, names, starts, computed, discard)

    def counted_finish(*args: Any) -> Any:
        return counted(finish, *args) if decoding else finish(*args)

    def counted_upload(array: np.ndarray) -> torch.Tensor:
        counts.uploads += decoding
        return upload(array)

    def counted_download(part: torch.Tensor) -> torch.Tensor:
        counts.downloads += decoding
        return download(part)

    def counted_run(columns: np.ndarray, batch: int, logits: Any) -> Any:
        """A step as one graph: its replay, and one copy each way."""
        counts.launches += decoding
        counts.uploads += decoding
        counts.downloads += decoding
        return run(columns, batch, logits)

    def compiled(part: Callable[..., Any], *args: Any) -> Any:
        counts.launches += decoding
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            with torch.utils._python_dispatch._disable_current_modes():
                return part(*args)
        finally:
            sys.settrace(tracer)

    perturber.begin, perturber.finish = counted_begin, counted_finish
    perturber._upload, perturber._download = counted_upload, counted_download
    vars(kernels).update({name: partial(compiled, part) for name, part in parts.items()})
    if graphs is not None:
        graphs.run = counted_run
    try:
        yield counts
    finally:
        vars(kernels).update(parts)
        if graphs is not None:
            del graphs.run
        for name in ("begin", "finish", "_upload", "_download"):
            delattr(perturber, name)


class Decoding:
    """A perturber with requests that decode, and no model: the logits are random."""

    def __init__(
        self, perturbation: Perturbation, batch: int, vocabulary: int = 1024, hidden: int = 64, device: str = "cpu"
    ) -> None:
        """
        Args:
            perturbation: what acts; its ``until`` is three tokens here.
            batch: number of requests.
            vocabulary: V.
            hidden: D.
            device: where the perturber works.
        """
        draws = torch.Generator().manual_seed(0)
        embedding = nn.Embedding(vocabulary, hidden).requires_grad_(False).to(device)
        store = TrajectoryStore(batch, 1 << 15)
        gate = BoundGate(perturbation, lambda: [b"a"] * vocabulary, vocabulary, store.slots, torch.device(device))
        override = InputOverride(embedding, batch, rows_of_buffers(batch), hidden, torch.float32, torch.device(device))
        # HRPO's gate was never among what is counted here; a router is a part of the draw.
        module = perturbation.module(hidden) if perturbation.reads_hidden else None
        self.perturber = RolloutPerturber(
            perturbation, store, gate, matrix_embeddings(embedding.weight), override, torch.device(device), module
        )
        self._reads_hidden, self._hidden = perturbation.reads_hidden, hidden
        self.requests = [f"request-{i}" for i in range(batch)]
        for i, name in enumerate(self.requests):
            store.open(name, 1000 + i, _PROMPT, True)
            self.perturber.opened(name)
        self._logits = torch.randn(batch, vocabulary, generator=draws).to(device) * 3
        self._temperature = torch.ones(batch, device=device)
        self._position = _PROMPT - 1

    def step(self) -> None:
        """One decode step of the requests."""
        count = len(self.requests)
        starts = np.full(count, self._position)
        self.perturber.begin(self.requests, starts, np.ones_like(starts), np.zeros(count, dtype=bool))
        if self._reads_hidden:
            self.perturber.computed(torch.zeros(count, self._hidden, device=self._logits.device))
        logits = self._logits[:count]
        if len(self._temperature) != count:  # as in an engine, one tensor serves as long as the batch stays the same
            self._temperature = torch.ones(count, device=logits.device)
        self.perturber.finish(logits, self._temperature, logits, None)
        self._position += 1


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
    few, many = (count(perturbation, batch, device=device) for batch in (4, 64))
    return (many.lines - few.lines) / few.steps / 60


def microseconds(perturbation: Perturbation, batch: int, vocabulary: int, device: str, steps: int = 100) -> float:
    """Median time of a decode step: of one core of a CPU; on CUDA of the host until the device has done it."""
    decoding, times = Decoding(perturbation, batch, vocabulary, 576, device), []
    clock = time.perf_counter if device == "cuda" else time.thread_time
    for step in range(steps + 10):
        began = clock()
        decoding.step()
        if device == "cuda":
            torch.cuda.synchronize()
        if step >= 10:
            times.append(clock() - began)
    return statistics.median(times) * 1e6


class _NoGraph:
    """A captured step whose replay is left out: what is done on the host beside it."""

    def __init__(self, pool: Any) -> None: ...

    @staticmethod
    def pool() -> Any:
        """A pool is nothing here."""

    def capture(self, region: Callable[[], None]) -> None:
        """The step has run once before, which makes its buffers."""

    def replay(self) -> None:
        """The kernels of a replay run on the device, and launching them is one call."""


def host_microseconds(perturbation: Perturbation, batch: int, steps: int = 400) -> tuple[float, float]:
    """Time of one core for a decode step as one graph, the replay left out: the least, and the mean, of many steps.

    Copies are between places of the host's memory, so that what a launch adds on CUDA is counted and not measured.
    """
    rate, times = perturbation.rate, []
    with (
        patch.object(step_graphs, "available", lambda device: True),
        patch.object(step_graphs, "CudaGraph", _NoGraph),
        torch.inference_mode(),
    ):
        decoding = Decoding(perturbation, batch, vocabulary=64)
        decoding.step()
        # What the verdict would say at this rate; bit 0 of a record is that it is fed, and bit 1 that the tokens agree.
        fed = torch.from_numpy(np.random.default_rng(0).random(batch) < rate)
        decoding.perturber._graphs._words[:batch, 0] = torch.where(fed, 3, 0)
        for _ in range(2 * STEPS_AT_ONCE):
            decoding.step()
        for _ in range(steps // STEPS_AT_ONCE):
            # Records of sixteen steps are written at once, so that sixteen steps are timed together.
            began = time.thread_time_ns()
            for _ in range(STEPS_AT_ONCE):
                decoding.step()
            times.append((time.thread_time_ns() - began) / STEPS_AT_ONCE / 1e3)
    return min(times), statistics.mean(times)


def sampled(name: str, rate: float) -> Perturbation:
    """A perturbation that leaves the token in the text to sampling where it may, since rate 1 would else be greedy."""
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
    """Time to build the record of a finished request with this many perturbed positions, and to pack it."""
    store, draws = TrajectoryStore(1, positions + _PROMPT), np.random.default_rng(0)
    slot = np.array([store.open("a", 1, _PROMPT, True)])
    for position in range(_PROMPT, _PROMPT + positions):
        weights = draws.random((1, candidates), dtype=np.float32)
        ids = draws.integers(0, 1 << 16, (1, candidates), dtype=np.int32)
        store.write_tokens(slot, np.array([position]), weights[:, 0])
        parts = {"ids": ids, "weights": weights, "agreed": np.ones(1, dtype=bool)}
        store.write_edits(slot, np.array([position]), parts)

    def fastest(act: Callable[[], object]) -> float:
        times = []
        for _ in range(9):
            began = time.thread_time()
            act()
            times.append(time.thread_time() - began)
        return min(times) * 1e3

    return fastest(lambda: store.record("a")), fastest(store.record("a")[0].to_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--perturbations", default=None, help="separated by commas; all by default")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=49152)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    names = options.perturbations.split(",") if options.perturbations else [n for n in available() if n != "none"]
    print(f"{describe()}; {options.batch} requests, {options.vocabulary} tokens, rate {options.rate:g}")
    columns = f"{'name':10s} {'waits':>5s} {'loops':>5s} {'launches':>8s} {'up':>4s} {'down':>4s} {'µs':>7s}"
    print(f"{columns}  host µs of a graph: requests@rate")
    for name in names:
        perturbation = sampled(name, options.rate)
        counts, lines = count(perturbation, options.batch, device=device), loops(sampled(name, 1.0), device)
        spent = microseconds(perturbation, options.batch, options.vocabulary, device)
        row = (
            f"{name:10s} {len(counts.waits) / counts.steps:5g} {lines:5.2g} {counts.launches / counts.steps:8.1f}"
            f" {counts.uploads / counts.steps:4.2g} {counts.downloads / counts.steps:4.2g} {spent:7.0f}"
        )
        of_graphs = [
            f"{batch}@{rate:g} {host_microseconds(sampled(name, rate), batch)[0]:.0f}"
            for batch in (64, 256)
            for rate in (0.1, 1.0)
        ]
        print(row, *of_graphs, sep="  ", flush=True)
    built, packed = record_milliseconds()
    print(f"record of 32,000 positions with 5 candidates: built in {built:.1f} ms, packed in {packed:.1f} ms")


if __name__ == "__main__":
    main()
