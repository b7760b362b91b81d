# SPDX-License-Identifier: Apache-2.0
"""A perturber's decode step on fake tensors with the sizes of a real model: its kernels and the bytes that they move.

For a part that is compiled on a GPU, the code that the compiler writes for an H100 is counted. The operations between
these parts are counted one by one. An operation on a mixture of devices raises an error, as on a GPU.
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
from benchmarks.cuda_without_gpu.recorded import RepeatedGraph, tensors_in
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
_WARM_UP = 2  # the second step clears what the first one wrote to the override, as every later one does
# Compiled parts that do not depend on the perturbation, by their name and what they are compiled for.
_SHARED: dict[tuple[Any, ...], Region] = {}
_GATHERS = ("index", "index_select", "gather", "embedding")
_SCATTERS = ("index_copy_", "index_put_", "scatter_", "index_fill_", "_index_put_impl_")


@dataclass
class Cost:
    """The work of a step.

    Attributes:
        kernels: launches.
        bytes: read from the device's memory and written to it.
        between: names of the operations outside of compiled parts.
        regions: the compiled parts by the name of their function.
    """

    kernels: int = 0
    bytes: int = 0
    between: list[str] = field(default_factory=list)
    regions: dict[str, Region] = field(default_factory=dict)

    @property
    def beyond_draw(self) -> int:
        """Launches without those that draw the tokens."""
        return self.kernels - self.regions["draw"].kernels


class _Operations(TorchDispatchMode):
    """Counts an operation on the device as one kernel, which reads or writes each operand and result once."""

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self._cost = cost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        operands = tensors_in((args, kwargs or {}))
        results = tensors_in(result)
        on_device = any(tensor.device.type == "cuda" for tensor in (*operands, *results))
        if not on_device or func.is_view or _launches_nothing(name, operands, results):
            return result
        if name in _GATHERS:  # the first operand is read only where an index picks it
            moved = 2 * _bytes(results) + _bytes(operands[1:])
        elif name in _SCATTERS:
            moved = 2 * _bytes(operands[1:])
        else:
            moved = _bytes(results) + _bytes(operands)
        self._cost.kernels += inductor.OPERATORS.get(name, 1)
        self._cost.bytes += moved
        self._cost.between.append(name)
        return result


def _launches_nothing(name: str, operands: list[Tensor], results: list[Tensor]) -> bool:
    """Whether an operation allocates only, or returns its operand."""
    if name in ("device", "detach") or name.startswith(("empty", "new_empty")):
        return True
    if name in ("to", "_to_copy") and operands and results:
        return results[0] is operands[0]
    return False


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _Event:
    """``torch.cuda.Event``, whose copies have always arrived."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class _Lists(TorchFunctionMode):
    """``torch.tensor(…, device="cuda")`` calls CUDA itself, also in a fake mode: the tensor is made, then moved."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            return torch.tensor(*args, dtype=kwargs.get("dtype")).to(kwargs["device"])
        return func(*args, **kwargs)


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Tensors that are made in this context hold nothing; those on ``cuda`` behave as on a GPU."""
    guard.load()
    with contextlib.ExitStack() as stack:
        # At the default, tensors of up to one element are constants with a value, which is really copied to the device.
        stack.enter_context(patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", -1))
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda self, *_: self))
        stack.enter_context(patch.object(torch.cuda, "Event", _Event))
        stack.enter_context(patch.object(step_graphs, "CudaGraph", RepeatedGraph))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_Lists())
        yield


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on real tensors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def _arrived(tensor: Tensor) -> Tensor:
    """The real tensor that the host reads in the place of a fake one."""
    with unset_fake_temporarily():
        return torch.ones(tuple(tensor.shape), dtype=tensor.dtype)


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
        device = torch.device("cuda")
        dtype = torch.bfloat16
        embedding = nn.Embedding(vocabulary, hidden, dtype=dtype, device=device).requires_grad_(False)
        store = TrajectoryStore(batch, 1 << 15)
        texts = ["a"] * vocabulary
        gate = BoundGate(perturbation, lambda: [b"a"] * vocabulary, vocabulary, store.slots, device)
        override = InputOverride(
            embedding,
            max_tokens=max(batch, 64),
            drawn_rows=rows_of_buffers(batch),
            hidden=hidden,
            dtype=dtype,
            device=device,
        )
        embeddings = ModelEmbeddings(override.lookup, lambda: embedding.weight, None, lambda: (), lambda: texts)
        module = perturbation.module(hidden)
        if module is not None:
            _move_module(module, dtype, device)
        self.perturber = RolloutPerturber(perturbation, store, gate, embeddings, override, device, module)
        pending = self.perturber.pending
        pending._drain_edits = _on_host(pending._drain_edits)
        self.perturber._download = lambda tensor: _arrived(tensor.to("cpu", non_blocking=True))
        perturbation.prepare(embeddings)
        self._reads_hidden = perturbation.reads_hidden
        self._hidden = hidden
        self.names = [f"request-{number}" for number in range(batch)]
        for number, name in enumerate(self.names):
            store.open(name, 100 + number, _PROMPT, True)
            self.perturber.opened(name)
        self._position = _PROMPT - 1 + getattr(perturbation, "burn_in", 0)
        self._shape = (batch, vocabulary)

    def step(self, dtype: torch.dtype = torch.float32) -> None:
        """One decode step of all requests, from logits of a dtype."""
        logits = torch.empty(self._shape, dtype=dtype, device="cuda")
        temperature = torch.empty(len(self.names), device="cuda")
        starts = np.full(len(self.names), self._position)
        self.perturber.begin(self.names, starts, np.ones_like(starts), np.zeros(len(starts), dtype=bool))
        if self._reads_hidden:
            self.perturber.keep_hidden(torch.empty(len(self.names), self._hidden, dtype=torch.bfloat16, device="cuda"))
        self.perturber.finish(logits, temperature, None, None)
        self._position += 1


def _move_module(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Moves a perturbation's module to the device, which ``Module.to`` cannot do with fake parameters."""
    for submodule in module.modules():
        for name, parameter in list(submodule._parameters.items()):
            moved = torch.empty_like(parameter, dtype=dtype, device=device)
            submodule._parameters[name] = nn.Parameter(moved, requires_grad=False)
    if hasattr(module, "lambda_start"):
        module.lambda_start = torch.empty_like(module.lambda_start, device=device)


def decode_step(
    perturbation: Perturbation,
    batch: int,
    vocabulary: int,
    hidden: int,
    dtype: torch.dtype = torch.float32,
    capability: int = 90,
) -> Cost:
    """Counts one decode step of all requests, after a warm-up.

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
        compiled_for = (capability, batch, vocabulary, perturbation.active, perturbation.until is None)
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        fake_mode = next(mode for mode in modes if isinstance(mode, FakeTensorMode))

        def count_compiled(self: Compiled, *args: Any) -> Any:
            with torch.utils._python_dispatch._disable_current_modes(), fake_mode:
                leaves = tree_leaves(args)  # of named tuples too
                for tensor in tensors_in(args):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
                name = self.plain.__name__
                dtypes = [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in leaves]
                key = (name, *compiled_for, *dtypes)
                if name.startswith(("proposed", "realised")) or key not in _SHARED:
                    _SHARED[key] = region(self.plain, *args)
                compiled = _SHARED[key]
                cost.regions[name] = compiled
                cost.kernels += compiled.kernels
                cost.bytes += compiled.bytes
                with plain:  # a compiled function within this one is part of it
                    return self.plain(*args)

        with patch.object(Compiled, "__call__", count_compiled), _Operations(cost):
            decoding.step(dtype)
    return cost


class _Table(TableIndex):
    """A neighbor table that is full. To fill one waits for the device, which an engine does outside of steps."""

    def search(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def precompute(self, k: int) -> None:
        self._widen(k)

    @property
    def most(self) -> int:
        return self._size - 1


def _prepared() -> dict[tuple[Any, str], Any]:
    """Replacements: tables are full, and the gate's state is not set row by row, which is slow on fake tensors."""
    return {
        (BoundGate, "reset"): lambda self, row, prompt: None,
        (library_embeddings, "create_index"): lambda shard, *_: _Table(shard.size, shard.rows.device),
    }
