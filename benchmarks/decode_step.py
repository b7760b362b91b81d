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
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
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
from ngrpo.rollout.output_layer import OutputLayer
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.step_graphs import rows_of_buffers
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import available, create
from perturbations.base import Perturbation
from perturbations.embeddings import matrix_embeddings
from perturbations.gates.default import BoundGate

_PROMPT = 20
# Operations that need a value on the host, and operations that wait for the count of a mask where an index is one.
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "allclose")
_INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_")
_OUR_FOLDERS = ("/ngrpo/", "/perturbations/")


@dataclass
class Counts:
    """Totals of some decode steps of a perturber.

    Attributes:
        steps: steps in which every request decodes.
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
        # nonzero_static is told the number of its results, so that it does not wait.
        waits = name.startswith(_WAITS) and name != "nonzero_static"
        if name in _INDEXES:
            waits = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if waits:
            self._counts.waits += (name,)
        if not func.is_view:
            self._counts.launches += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting(perturber: RolloutPerturber) -> Iterator[Counts]:
    """Counts the decode steps of a perturber, which may be that of an engine in this process. Prefills are left out.

    On CUDA a step that waits for the device raises ``RuntimeError``.
    """
    counter = _Counter(perturber)
    kernels = perturber._kernels
    graphs = perturber._graphs
    # On a CPU only the draw counts as compiled: it may look at numbers there.
    names = ("draw", "proposed", "realised", "advance_gate") if kernels.compiled else ("draw",)
    with contextlib.ExitStack() as stack:
        for name in ("begin", "finish", "_upload", "_download"):
            counted_method = partial(getattr(counter, name.strip("_")), getattr(perturber, name))
            stack.enter_context(patch.object(perturber, name, counted_method))
        for name in names:
            stack.enter_context(patch.object(kernels, name, partial(counter.compiled_part, getattr(kernels, name))))
        if graphs is not None:
            stack.enter_context(patch.object(graphs, "run", partial(counter.run_graph, graphs.run)))
        yield counter.counts


class _Counter:
    """Calls the methods of a perturber and counts what they do. Each method here has the original one first."""

    def __init__(self, perturber: RolloutPerturber) -> None:
        self.counts = Counts()
        self._operations = _Operations(self.counts)
        self._on_cuda = perturber.device.type == "cuda"
        self._decoding = False  # whether every request of the step in flight decodes

    def begin(self, original: Callable[..., None], names: Any, starts: Any, counts: Any, discard: Any) -> None:
        self._decoding = bool((counts == 1).all() and not discard.any())
        if self._decoding:
            self.counts.steps += 1
        self._counted(original, names, starts, counts, discard)

    def finish(self, original: Callable[..., Any], *args: Any) -> Any:
        return self._counted(original, *args)

    def upload(self, original: Callable[[np.ndarray], torch.Tensor], array: np.ndarray) -> torch.Tensor:
        if self._decoding:
            self.counts.uploads += 1
        return original(array)

    def download(self, original: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        if self._decoding:
            self.counts.downloads += 1
        return original(tensor)

    def run_graph(self, original: Callable[..., Any], *args: Any) -> Any:
        """A step as one graph: its replay, and one copy each way."""
        if self._decoding:
            self.counts.launches += 1
            self.counts.uploads += 1
            self.counts.downloads += 1
        return original(*args)

    def compiled_part(self, original: Callable[..., Any], *args: Any) -> Any:
        """A compiled part is one launch, and the operations and lines within it do not count."""
        if self._decoding:
            self.counts.launches += 1
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            with torch.utils._python_dispatch._disable_current_modes():
                return original(*args)
        finally:
            sys.settrace(tracer)

    def _counted(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function; in a decode step with its operations and lines counted."""
        if not self._decoding:
            return function(*args)
        tracer = sys.gettrace()
        with self._operations:
            sys.settrace(self._count_lines)
            if self._on_cuda:
                torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*args)
            finally:
                if self._on_cuda:
                    torch.cuda.set_sync_debug_mode("default")
                sys.settrace(tracer)

    def _count_lines(self, frame: Any, event: str, _argument: Any) -> Any:
        """A trace function, as of ``sys.settrace``."""
        if not any(folder in frame.f_code.co_filename for folder in _OUR_FOLDERS):
            return None
        if event == "line":
            self.counts.lines += 1
        return self._count_lines


class Decoding:
    """A perturber with requests that decode, and no model: the logits are random."""

    def __init__(
        self,
        perturbation: Perturbation,
        batch: int,
        vocabulary: int = 1024,
        hidden: int = 64,
        device: str = "cpu",
        with_logits: bool = False,
    ) -> None:
        """
        Args:
            perturbation: what acts; its ``until`` is three tokens here.
            batch: number of requests.
            vocabulary: V.
            hidden: D.
            device: where the perturber works.
            with_logits: whether a graph may compute the logits, by a tied output layer.
        """
        draws = torch.Generator().manual_seed(0)
        self._device = torch.device(device)
        embedding = nn.Embedding(vocabulary, hidden).requires_grad_(False).to(self._device)
        store = TrajectoryStore(batch, 1 << 15)
        gate = BoundGate(perturbation, lambda: [b"a"] * vocabulary, vocabulary, store.slots, self._device)
        override = InputOverride(
            embedding,
            max_tokens=batch,
            drawn_rows=rows_of_buffers(batch),
            hidden=hidden,
            dtype=torch.float32,
            device=self._device,
        )
        # HRPO has a module too, of which the figures of earlier releases were without; a router's is part of the draw.
        module = perturbation.module(hidden) if perturbation.reads_hidden else None
        embeddings = matrix_embeddings(embedding.weight)
        weight = embedding.weight
        model = SimpleNamespace(compute_logits=lambda hidden: nn.functional.linear(hidden, weight))
        self._output_layer = OutputLayer(model, tensors=[weight.data], example=weight.data[:1], vocabulary=vocabulary)
        self._model = model
        self._last_hidden = torch.zeros(batch, hidden, device=self._device)
        self.perturber = RolloutPerturber(
            perturbation,
            store,
            gate,
            embeddings,
            override,
            self._device,
            module=module,
            output=self._output_layer if with_logits else None,
        )
        self._reads_hidden = perturbation.reads_hidden
        self.requests = [f"request-{number}" for number in range(batch)]
        for number, name in enumerate(self.requests):
            store.open(name, 1000 + number, _PROMPT, True)
            self.perturber.opened(name)
        self._logits = torch.randn(batch, vocabulary, generator=draws).to(self._device) * 3
        self._temperature = torch.ones(batch, device=self._device)
        self._position = _PROMPT - 1

    def step(self) -> None:
        """One decode step of the requests."""
        count = len(self.requests)
        starts = np.full(count, self._position)
        self.perturber.begin(self.requests, starts, np.ones_like(starts), np.zeros(count, dtype=bool))
        if self._reads_hidden:
            self.perturber.computed(torch.zeros_like(self._last_hidden[:count]))
        if len(self._temperature) != count:  # as in an engine, one tensor serves as long as the batch stays the same
            self._temperature = torch.ones(count, device=self._device)
        if self.perturber.computes_logits(count):  # as in the runner's wrapper
            with self._output_layer.left_to_graph():
                logits = self._model.compute_logits(self._last_hidden[:count])
                self.perturber.finish(logits, self._temperature, logits, None, self._output_layer.take())
        else:
            logits = self._logits[:count]
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
        decoding.perturber._graphs._words[:batch, 0] = torch.where(fed, 3, 0)
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
    store = TrajectoryStore(1, positions + _PROMPT)
    slot = np.array([store.open("a", 1, _PROMPT, True)])
    for position in range(_PROMPT, _PROMPT + positions):
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--perturbations", default=None, help="separated by commas; all by default")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=49152)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    names = [name for name in available() if name != "none"]
    if options.perturbations:
        names = options.perturbations.split(",")
    print(f"{describe()}; {options.batch} requests, {options.vocabulary} tokens, rate {options.rate:g}")
    columns = f"{'name':10s} {'waits':>5s} {'loops':>5s} {'launches':>8s} {'up':>4s} {'down':>4s} {'µs':>7s}"
    print(f"{columns}  host µs of a graph: requests@rate")
    for name in names:
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
