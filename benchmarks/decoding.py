# SPDX-License-Identifier: Apache-2.0
"""A perturber with decoding requests and no model, and what its steps do, counted.

:class:`Decoding` drives a real perturber with random logits. :func:`counting` counts the decode steps of any perturber:
operations on tensors, those that wait for the device, copies, and lines of this project's Python.
"""

import contextlib
import sys
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

from ngrpo.rollout.input_override import InputOverride
from ngrpo.rollout.output_layer import OutputLayer
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.step_graphs import rows_of_buffers
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations.base import Perturbation
from perturbations.embeddings import matrix_embeddings
from perturbations.gates.default import BoundGate

PROMPT = 20
"""Tokens of each request's prompt."""
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


class OperationCounter(TorchDispatchMode):
    """Counts operations on tensors without views, and those that wait for the device."""

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
        self._operations = OperationCounter(self.counts)
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
            store.open(name, 1000 + number, PROMPT, True)
            self.perturber.opened(name)
        self._logits = torch.randn(batch, vocabulary, generator=draws).to(self._device) * 3
        self._temperature = torch.ones(batch, device=self._device)
        self._position = PROMPT - 1

    def step(self) -> None:
        """One decode step of the requests."""
        count = len(self.requests)
        starts = np.full(count, self._position)
        self.perturber.begin(self.requests, starts, np.ones_like(starts), np.zeros(count, dtype=bool))
        if self._reads_hidden:
            self.perturber.keep_hidden(torch.zeros_like(self._last_hidden[:count]))
        if len(self._temperature) != count:  # as in an engine, one tensor serves as long as the batch stays the same
            self._temperature = torch.ones(count, device=self._device)
        if self.perturber.computes_logits(count):  # as in the runner's wrapper
            with self._output_layer.left_to_graph():
                logits = self._model.compute_logits(self._last_hidden[:count])
                self.perturber.finish(logits, self._temperature, None, None, self._output_layer.take())
        else:
            logits = self._logits[:count]
            self.perturber.finish(logits, self._temperature, None, None)
        self._position += 1
