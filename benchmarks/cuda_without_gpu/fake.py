# SPDX-License-Identifier: Apache-2.0
"""A perturber's decode step on fake tensors of a real model's size: its kernels and the bytes that they move.

What is compiled on a GPU is counted in the code that the compiler writes for an H100; the operations between these
parts are counted one by one. A mixture of devices is an error of the operation, as on a GPU.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.cuda_without_gpu import guard, inductor
from benchmarks.cuda_without_gpu.inductor import Region
from benchmarks.cuda_without_gpu.recorded import RepeatedGraph
from ngrpo.rollout import step_graphs
from ngrpo.rollout.input_override import InputOverride
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.step_graphs import rows_of_buffers
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import embeddings as library_embeddings
from perturbations.base import Perturbation
from perturbations.compilation import Compiled
from perturbations.embeddings import ModelEmbeddings
from perturbations.gates.default import BoundGate
from perturbations.neighbors.base import TableIndex

_PROMPT = 20
_WARM_UP = 2  # steps until each one clears what the last one wrote
# The parts that all perturbations share, compiled once.
_SHARED: dict[tuple[Any, ...], Region] = {}
_GATHERS = ("index", "index_select", "gather", "embedding")
_SCATTERS = ("index_copy_", "index_put_", "scatter_", "index_fill_", "_index_put_impl_")


@dataclass
class Cost:
    """What a part of a step takes.

    Attributes:
        kernels: launches.
        bytes: read from memory and written to it.
        between: names of the operations outside of compiled parts.
        regions: the compiled parts by the name of their function.
    """

    kernels: int = 0
    bytes: int = 0
    between: list[str] = field(default_factory=list)
    regions: dict[str, Region] = field(default_factory=dict)

    @property
    def beyond_draw(self) -> int:
        """Launches without those of the token's draw."""
        return self.kernels - self.regions["draw"].kernels


class _Operations(TorchDispatchMode):
    """Counts each operation on the device as one kernel: of its operands and results each element once."""

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self._cost = cost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        tensors = [part for part in tree_leaves((args, kwargs or {})) if isinstance(part, Tensor)]
        made = [part for part in tree_leaves(out) if isinstance(part, Tensor)]
        on_device = any(part.device.type == "cuda" for part in (*tensors, *made))
        same = name in ("to", "_to_copy") and made and tensors and made[0] is tensors[0]
        if (
            not on_device
            or func.is_view
            or same
            or name in ("device", "detach")
            or name.startswith(("empty", "new_empty"))
        ):
            return out
        size = _bytes(made) + _bytes(tensors)
        if name in _GATHERS:  # only what is picked is read
            size = 2 * _bytes(made) + _bytes(tensors[1:])
        elif name in _SCATTERS:
            size = 2 * _bytes(tensors[1:])
        self._cost.kernels += inductor.OPERATORS.get(name, 1)
        self._cost.bytes += size
        self._cost.between.append(name)
        return out


def _bytes(tensors: list[Tensor]) -> int:
    return sum(part.numel() * part.element_size() for part in tensors)


class _Event:
    """``torch.cuda.Event`` of copies that have arrived."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class _Lists(TorchFunctionMode):
    """``torch.tensor(…, device="cuda")`` asks CUDA itself, fake mode or not: here it is made first and then moved."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            return torch.tensor(*args, dtype=kwargs.get("dtype")).to(kwargs["device"])
        return func(*args, **kwargs)


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Tensors made here hold nothing; those on ``cuda`` behave as on a GPU."""
    guard.load()
    with contextlib.ExitStack() as stack:
        # Or tensors of one element, or of none, would really be copied to the device.
        stack.enter_context(patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", -1))
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda self, *_: self))
        stack.enter_context(patch.object(torch.cuda, "Event", _Event))
        stack.enter_context(patch.object(step_graphs, "CudaGraph", RepeatedGraph))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_Lists())
        yield


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def _arrived(part: Tensor) -> Tensor:
    """What the host finds in the place of a fake tensor."""
    with unset_fake_temporarily():
        return torch.ones(tuple(part.shape), dtype=part.dtype)


class FakeDecoding:
    """A perturber with decoding requests, on fake tensors."""

    def __init__(self, perturbation: Perturbation, batch: int, vocabulary: int, hidden: int) -> None:
        """
        Args:
            perturbation: what acts; its ``until`` is three tokens.
            batch: B.
            vocabulary: V.
            hidden: D, of embeddings in bfloat16.
        """
        device, dtype = torch.device("cuda"), torch.bfloat16
        embedding = nn.Embedding(vocabulary, hidden, dtype=dtype, device=device).requires_grad_(False)
        store = TrajectoryStore(batch, 1 << 15)
        texts = ["a"] * vocabulary
        gate = BoundGate(perturbation, lambda: [b"a"] * vocabulary, vocabulary, store.slots, device)
        override = InputOverride(embedding, max(batch, 64), rows_of_buffers(batch), hidden, dtype, device)
        embeddings = ModelEmbeddings(override.lookup, lambda: embedding.weight, None, lambda: (), lambda: texts)
        module = perturbation.module(hidden)
        if module is not None:  # `Module.to` cannot swap fake parameters
            for owner in module.modules():
                for name, part in list(owner._parameters.items()):
                    owner._parameters[name] = nn.Parameter(torch.empty_like(part, dtype=dtype, device=device), False)
            if hasattr(module, "lambda_start"):
                module.lambda_start = torch.empty_like(module.lambda_start, device=device)
        self.perturber = RolloutPerturber(perturbation, store, gate, embeddings, override, device, module)
        notes = self.perturber.notes
        notes._drain_edits = _on_host(notes._drain_edits)
        self.perturber._download = lambda part: _arrived(part.to("cpu", non_blocking=True))
        perturbation.prepare(embeddings)
        self.names = [f"request-{i}" for i in range(batch)]
        self._reads_hidden, self._hidden = perturbation.reads_hidden, hidden
        for i, name in enumerate(self.names):
            store.open(name, 100 + i, _PROMPT, True)
            self.perturber.opened(name)
        self._position, self._shape = _PROMPT - 1 + getattr(perturbation, "burn_in", 0), (batch, vocabulary)

    def step(self, dtype: torch.dtype = torch.float32) -> None:
        """One decode step of all requests, from logits of a dtype."""
        logits = torch.empty(self._shape, dtype=dtype, device="cuda")
        temperature = torch.empty(len(self.names), device="cuda")
        starts = np.full(len(self.names), self._position)
        self.perturber.begin(self.names, starts, np.ones_like(starts), np.zeros(len(starts), dtype=bool))
        if self._reads_hidden:
            self.perturber.computed(torch.empty(len(self.names), self._hidden, dtype=torch.bfloat16, device="cuda"))
        self.perturber.finish(logits, temperature, logits, None)
        self._position += 1


def decode_step(
    perturbation: Perturbation,
    batch: int,
    vocabulary: int,
    hidden: int,
    dtype: torch.dtype = torch.float32,
    capability: int = 90,
) -> Cost:
    """Counts one decode step with every request in it, after one that warms up.

    Args:
        perturbation: what acts.
        batch: B.
        vocabulary: V.
        hidden: D.
        dtype: of the logits.
        capability: 90 for an H100, 80 for an A100.
    """
    cost = Cost()
    with contextlib.ExitStack() as stack:
        region = stack.enter_context(inductor.compiling_for(capability))
        stack.enter_context(fake_cuda())
        stack.enter_context(torch.inference_mode())
        for name, value in _prepared().items():
            stack.enter_context(patch.object(*name, value))
        decoding = FakeDecoding(perturbation, batch, vocabulary, hidden)
        plain = patch.object(Compiled, "__call__", lambda self, *args: self.plain(*args))
        with plain:
            for _ in range(_WARM_UP):
                decoding.step(dtype)
        operations = _Operations(cost)
        known = capability, batch, vocabulary, perturbation.active, perturbation.until is None

        def compiled(self: Compiled, *args: Any) -> Any:
            with torch.utils._python_dispatch._disable_current_modes(), contextlib.ExitStack() as inner:
                inner.enter_context(mode)
                parts = tree_leaves(args)  # of named tuples too
                for part in parts:
                    if isinstance(part, Tensor):
                        torch._dynamo.maybe_mark_dynamic(part, 0)
                name = self.plain.__name__
                key = (name, *known, *(part.dtype if isinstance(part, Tensor) else None for part in parts))
                if name.startswith(("proposed", "realised")) or key not in _SHARED:
                    _SHARED[key] = region(self.plain, *args)
                entry = cost.regions[name] = _SHARED[key]
                cost.kernels, cost.bytes = cost.kernels + entry.kernels, cost.bytes + entry.bytes
                with plain:  # what is compiled within it is part of it
                    return self.plain(*args)

        mode = next(
            m for m in torch.utils._python_dispatch._get_current_dispatch_mode_stack() if isinstance(m, FakeTensorMode)
        )
        with patch.object(Compiled, "__call__", compiled), operations:
            decoding.step(dtype)
    return cost


class _Table(TableIndex):
    """A neighbor table that is full: to fill one waits for the device, by design and outside of steps."""

    def search(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def precompute(self, k: int) -> None:
        self._widen(k)

    @property
    def most(self) -> int:
        return self._size - 1


def _prepared() -> dict[tuple[Any, str], Any]:
    """Tables are there, and no row of the gate's state needs to be set, which takes long on fake tensors."""
    return {
        (BoundGate, "reset"): lambda self, row, prompt: None,
        (library_embeddings, "create_index"): lambda shard, *_: _Table(shard.size, shard.rows.device),
    }
