# SPDX-License-Identifier: Apache-2.0
"""A step as one CUDA graph for each bucket of batch sizes: the host launches one graph, and copies once each way.

With 64 to 256 sequences the host sets an engine's speed: it needs as long to launch a dozen kernels as the device needs
for a small model's forward. What is captured, in this order:

1. the keys of all draws, and the rows that rate and schedule select;
2. the draw of the tokens;
3. the proposal at **all** rows, and the gate's verdict, which is False where a row is not selected;
4. the state of a further gate;
5. the vectors to be fed;
6. one matrix of 32-bit words with all that the host records;
7. copies to fixed addresses: that matrix, the tokens, and the vectors in the embedding's override.

Where nothing changes the logits before the draw, the model's output layer is captured too, ahead of all this
(`output_layer.py`): the input of the graph is then the last hidden states.

These are the compiled parts of `step_kernels.py`, so that kernels and rounding are those of a step without a graph.
Inputs and outputs have fixed addresses. Rows beyond the batch have the slot of a scratch row in the gate's state, which
no trajectory has.

A graph holds the addresses of what it reads: the gate's state, neighbor tables, weights and learned parameters. Before
each replay the present addresses are compared with those of the capture; where one has changed, the step is captured
again.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ngrpo.rollout.async_scheduling import HostBuffer, HostBuffers
from ngrpo.rollout.input_override import InputOverride
from ngrpo.rollout.output_layer import OutputLayer
from ngrpo.rollout.step_kernels import StepKernels
from ngrpo.rollout.step_records import PackedRecord, RecordLayout
from ngrpo.rollout.step_rows import HostColumns, Logits, StepColumns
from perturbations.errors import require
from perturbations.gates.default import BoundGate

if TYPE_CHECKING:
    from torch.cuda.graphs import _POOL_HANDLE

logger = logging.getLogger("ngrpo.rollout")

# A larger step keeps the device busy for longer than the host needs for its launches.
SIZES = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)


class CaptureFailed(RuntimeError):
    """A step cannot be captured; the message says why."""


def available(device: torch.device) -> bool:
    """Whether a device has graphs."""
    return device.type == "cuda"


# Graphs whose capture failed. PyTorch 2.11's allocator of pinned memory goes on asking them, so they must stay.
_failed_captures: list[torch.cuda.CUDAGraph] = []


@lru_cache(maxsize=1)
def _capture_stream() -> torch.cuda.Stream:
    """The one stream of all captures: cuBLAS keeps a workspace for each stream that it has worked on."""
    return torch.cuda.Stream()


class CudaGraph:
    """A captured region of a CUDA stream. Graphs of one pool share the memory of their intermediate values."""

    def __init__(self, pool: "_POOL_HANDLE") -> None:
        """pool: of ``torch.cuda.graph_pool_handle()``."""
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    @staticmethod
    def pool() -> "_POOL_HANDLE":
        """A new pool."""
        return torch.cuda.graph_pool_handle()

    def capture(self, region: Callable[[], None]) -> None:
        """Captures a region that neither waits for the device nor reads memory of the host."""
        # `torch.cuda.graph` is not used, since it collects garbage and empties the cache each time. NCCL's watchdog
        # queries events in another thread meanwhile, so that only calls of this thread may invalidate the capture.
        current = torch.cuda.current_stream()
        side = _capture_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                region()
                self._graph.capture_end()
            except Exception:
                self._end_failed_capture()
                raise
        current.wait_stream(side)

    def _end_failed_capture(self) -> None:
        """Ends a capture that an operation made invalid, so that PyTorch's allocator works as before it.

        The end of an invalid capture fails too, with an error that does not say what was not permitted. PyTorch 2.11
        then leaves its allocator in the state of a capture (mended by pytorch#180395), in which the next
        ``torch.cuda.empty_cache()`` fails.
        """
        try:
            self._graph.capture_end()
        except RuntimeError:
            _failed_captures.append(self._graph)
            device = torch.cuda.current_device()
            with suppress(RuntimeError):  # a later PyTorch has ended the capture by itself
                torch._C._cuda_endAllocateToPool(device, self._pool)
                torch._C._cuda_releasePool(device, self._pool)

    def replay(self) -> None:
        """Runs what was captured, with the values that are at its addresses now."""
        self._graph.replay()


def bucket_sizes(most_rows: int) -> tuple[int, ...]:
    """The batch sizes that graphs are made for, where a step has at most ``most_rows`` rows."""
    smaller = [size for size in SIZES if size < most_rows]
    return SIZES[: len(smaller) + 1]


def rows_of_buffers(most_rows: int) -> int:
    """The rows of buffers that hold a step of ``most_rows`` rows and the graph that serves it."""
    return max(most_rows, bucket_sizes(most_rows)[-1])


class GraphKind(NamedTuple):
    """What a graph is captured for.

    Attributes:
        size: rows.
        dtype: of the logits or, where the graph computes them, of the last hidden states.
        filtered: whether filters left other logits to draw from.
        computes_logits: whether the graph runs the model's output layer.
    """

    size: int
    dtype: torch.dtype
    filtered: bool
    computes_logits: bool


class _RecordBuffers(NamedTuple):
    """The memory that a step's record goes through.

    Attributes:
        layout: of a row's W words.
        words: the matrix that graphs write, (rows of the largest size, W) int32, on the device.
        downloads: the host's copies of that matrix.
    """

    layout: RecordLayout
    words: Tensor
    downloads: HostBuffers


class StepGraphs:
    """The graphs of one perturbation and one model, and the buffers at fixed addresses that they share."""

    def __init__(
        self,
        kernels: StepKernels,
        gate: BoundGate,
        override: InputOverride,
        device: torch.device,
        watched: Callable[[], Sequence[Tensor]],
        output: OutputLayer | None = None,
    ) -> None:
        """
        Args:
            kernels: the parts of a step.
            gate: of the trajectories, with a scratch row after the last slot.
            override: of the embedding, which the vectors go to; it has the rows of the largest step.
            device: a CUDA device.
            watched: returns the tensors whose addresses a graph keeps, apart from the buffers that are made here.
            output: of the model, where graphs may compute the logits.
        """
        self.sizes = tuple(size for size in SIZES if size <= override.drawn_rows)
        self._kernels = kernels
        self._gate = gate
        self._override = override
        self._device = device
        self._watched = watched
        self._output = output
        largest = self.sizes[-1]
        self._columns = torch.zeros(len(StepColumns._fields) * largest, dtype=torch.int64, device=device)
        self._temperature = torch.ones(largest, device=device)
        self._greedy = torch.full((largest,), -1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(largest, dtype=torch.int64, device=device)
        self._record: _RecordBuffers | None = None  # made by the first step, from the fields that it records
        self._uploads = HostBuffers((len(self._columns),), torch.int64, device)
        self._wide: dict[tuple[str, torch.dtype, int], Tensor] = {}  # logits and hidden states: name, dtype, width
        # What the temperatures were copied from, compared by identity: `runners.py` makes a new tensor when the batch
        # changes, and at each step with a schedule's factor, and never writes into one.
        self._temperature_of: Tensor | None = None
        self._has_greedy = False  # whether ``self._greedy`` names a token
        self.forget()

    def forget(self) -> None:
        """Drops all graphs. Each is captured again when it is needed next, in a new pool."""
        self._graphs: dict[GraphKind, CudaGraph] = {}
        self._pool: _POOL_HANDLE | None = None
        self._addresses: tuple[int, ...] = ()

    def bucket(self, rows: int) -> int | None:
        """The size of the graph that serves so many rows; None where none does."""
        return next((size for size in self.sizes if size >= rows), None)

    def computes_logits(self, rows: int) -> bool:
        """Whether a graph for so many rows may compute the logits."""
        return self._output is not None and self.bucket(rows) is not None

    def run(
        self, columns: np.ndarray, batch: int, logits: Logits, output_hidden: Tensor | None = None
    ) -> tuple[Tensor, PackedRecord, HostBuffer]:
        """Runs a step of B = ``batch`` rows.

        Args:
            columns: :class:`HostColumns` as a matrix (6, bucket) int64; rows beyond the batch have the scratch slot.
            batch: B.
            logits: of the B rows.
            output_hidden: the last hidden states, (B, D), from which the graph computes the logits; ``logits.scaled``
                is a placeholder then. None where the logits are there.

        Returns:
            The next tokens, (B,) int64; the record, which is on its way to the host; the buffer that the record is in.

        Raises:
            CaptureFailed: where the step cannot be captured. Nothing has been drawn then.
        """
        if output_hidden is not None:
            output = require(self._output, "the output layer")
            try:
                return self._run(columns, batch, logits, output_hidden)
            except CaptureFailed as error:
                logger.warning(
                    "perturbation: the logits are computed outside of a step's graph, since they cannot be captured"
                    " (%s).",
                    error,
                )
                self._output = None
                logits = logits._replace(scaled=output.compute(output_hidden))
        return self._run(columns, batch, logits, output_hidden=None)

    def _run(
        self, columns: np.ndarray, batch: int, logits: Logits, output_hidden: Tensor | None
    ) -> tuple[Tensor, PackedRecord, HostBuffer]:
        """As :meth:`run`; raises :class:`CaptureFailed` also where only the logits cannot be captured."""
        size = columns.shape[1]
        self._uploads.upload(columns.ravel(), self._columns)
        static = self._placed(logits, batch, size)
        static_hidden = None
        if output_hidden is not None:
            static_hidden = self._wide_rows("output_hidden", output_hidden, size)
        self._check_addresses()
        kind = GraphKind(
            size=size,
            dtype=static.scaled.dtype if output_hidden is None else output_hidden.dtype,
            filtered=static.drawable is not None,
            computes_logits=output_hidden is not None,
        )
        if kind not in self._graphs:
            self._graphs[kind] = self._captured(static, static_hidden, size)
        self._graphs[kind].replay()
        # The next replay writes to the same addresses, and vLLM may copy its tokens on another stream.
        tokens = self._tokens[:batch].clone()
        record = require(self._record, "the record's buffers of a capture")
        buffer = record.downloads.take()
        buffer.tensor[:batch].copy_(record.words[:batch], non_blocking=True)
        return tokens, PackedRecord(buffer.tensor[:batch], record.layout), buffer

    def _placed(self, logits: Logits, batch: int, size: int) -> Logits:
        """Copies the step's tensors to their fixed addresses; returns them there, with ``size`` rows."""
        if logits.temperature is not self._temperature_of:
            self._temperature[:batch].copy_(logits.temperature)
            self._temperature_of = logits.temperature
        if logits.greedy is not None or self._has_greedy:
            self._greedy.fill_(-1)
        if logits.greedy is not None:
            self._greedy[:batch].copy_(logits.greedy)
        self._has_greedy = logits.greedy is not None
        return Logits(
            scaled=logits.scaled if logits.scaled.is_meta else self._wide_rows("scaled", logits.scaled, size),
            temperature=self._temperature[:size],
            drawable=None if logits.drawable is None else self._wide_rows("drawable", logits.drawable, size),
            greedy=self._greedy[:size],
            hidden=None if logits.hidden is None else self._wide_rows("hidden", logits.hidden, size),
        )

    def _wide_rows(self, name: str, rows: Tensor, size: int) -> Tensor:
        """Copies rows (B, n) to the buffer of this name; returns the first ``size`` rows of the buffer."""
        static = self._wide_buffer(name, rows)[:size]
        static[: len(rows)].copy_(rows)
        return static

    def _wide_buffer(self, name: str, like: Tensor) -> Tensor:
        """The buffer for rows like these, with their stride, since torch.compile specialises on strides."""
        width = like.shape[1]
        stride = like.stride(0) if len(like) > 1 else width
        key = (name, like.dtype, width)
        buffer = self._wide.get(key)
        if buffer is not None and (len(like) == 1 or buffer.stride(0) == stride):
            return buffer
        if buffer is not None:
            self.forget()  # graphs have its address
        memory = torch.zeros(self.sizes[-1], stride, dtype=like.dtype, device=self._device)
        self._wide[key] = memory[:, :width]
        return self._wide[key]

    def _check_addresses(self) -> None:
        """Drops the graphs where a tensor that they read has moved since they were captured."""
        if self._graphs and self._current_addresses() != self._addresses:
            self.forget()

    def _current_addresses(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self._watched())

    # --- capture -------------------------------------------------------------------------------------------------

    def rehearse(self, logits: Tensor) -> None:
        """Captures a step of every size and kind, for logits like these, (B, V), in the model's dtype.

        Where a request changes the logits, or filters them, they are float32. Hidden states take their place where a
        graph may compute the logits. The largest size comes first, so that the smaller ones find room in its pool.
        """
        scaled = logits.float()
        # Filters work on a clone (`runners.py`), which drops the padding that the strides of vLLM's logits have.
        self._rehearse(scaled, drawable=scaled.clone())
        self._rehearse(scaled, drawable=None)
        if logits.dtype != torch.float32:
            self._rehearse(logits, drawable=None)
        if self._output is not None:
            count = len(logits)
            self._rehearse(self._output.placeholder(count), drawable=None, output_hidden=self._output.examples(count))

    def _rehearse(self, scaled: Tensor, drawable: Tensor | None, output_hidden: Tensor | None = None) -> None:
        count = len(scaled)
        hidden = self._kernels.example_hidden(count, self._device)
        logits = Logits(scaled, torch.ones(count, device=self._device), drawable, greedy=None, hidden=hidden)
        for size in reversed(self.sizes):
            batch = min(count, size)
            logits_of_batch = tree_map_only(Tensor, itemgetter(slice(batch)), logits)
            columns = np.zeros((len(HostColumns._fields), size), dtype=np.int64)
            HostColumns(*columns).slots.fill(self._scratch)
            if output_hidden is not None and not self.computes_logits(batch):
                return  # a larger size has failed, and its warning says so
            hidden_of_batch = None if output_hidden is None else output_hidden[:batch]
            _tokens, _record, buffer = self.run(columns, batch, logits_of_batch, hidden_of_batch)
            buffer.give_back()

    @property
    def _scratch(self) -> int:
        """The slot of the gate's last row, which no trajectory has."""
        return len(self._gate.state[0]) - 1

    def _captured(self, logits: Logits, output_hidden: Tensor | None, size: int) -> CudaGraph:
        """Captures the step of these inputs, whose values are at their addresses."""
        flat = self._columns[: len(StepColumns._fields) * size]
        columns = StepColumns(*flat.view(-1, size))
        # A first run loads kernels, fills neighbor tables and makes the buffers of the record. All of its rows have the
        # scratch slot, so that it does not move the gate's state of a trajectory.
        values = flat.clone()
        columns.slots.fill_(self._scratch)
        columns.keeps_token.zero_()
        columns.eligible.zero_()
        self._step(columns, logits, output_hidden)
        self._check_addresses()  # the first run may have built a new table, and older graphs read the old one
        self._addresses = self._current_addresses()
        if self._pool is None:
            # A capture cannot free cached memory, that of an earlier pool included, so it is freed here.
            torch.cuda.empty_cache()
            self._pool = CudaGraph.pool()
        graph = CudaGraph(self._pool)
        try:
            graph.capture(lambda: self._step(columns, logits, output_hidden))
        except Exception as error:  # of any operation; the same step has just run outside of a capture
            self.forget()  # a further capture needs a pool of its own
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise CaptureFailed(reason) from error
        flat.copy_(values)
        return graph

    def _step(self, columns: StepColumns, logits: Logits, output_hidden: Tensor | None) -> None:
        """The captured region."""
        if output_hidden is not None:
            logits = logits._replace(scaled=require(self._output, "the output layer").compute(output_hidden))
        edited, words = self._kernels.step_in_graph(columns, logits)
        size = len(columns.slots)
        if self._record is None:
            layout = RecordLayout(edited.recorded)
            shape = (self.sizes[-1], layout.width)
            self._record = _RecordBuffers(
                layout=layout,
                words=torch.zeros(shape, dtype=torch.int32, device=self._device),
                downloads=HostBuffers(shape, torch.int32, self._device),
            )
        self._record.words[:size].copy_(words)
        self._tokens[:size].copy_(edited.tokens)
        self._override.drawn_vectors[:size].copy_(require(edited.vectors, "the vectors of a step"))
        self._override.drawn_fed[:size].copy_(edited.recorded["fed"])
