# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs on the pretended device: operations that are recorded once, then run at the addresses of the recording.

As a real graph a recording keeps what Python decided meanwhile, and the address of every tensor. All memory that the
region made for itself is filled with rubbish before and after a replay, as another graph of the same pool may use it.
What a capture forbids is a ``RuntimeError``: operations that wait for the device, and reading memory of the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

# Operations that need a value from the device, and those that do where an index is a mask.
WAITS = (
    "_local_scalar_dense",
    "item",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "equal",
    "bincount",
    "is_nonzero",
)
INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_")


class _Operation(NamedTuple):
    """A recorded operation on the host's values, by reference and not copied: a graph keeps addresses."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    results: list[Tensor]  # that a replay writes to


def on_host(function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """An operation on tensors of the pretended device as one on the host's values, which its result is made of."""

    def place(leaf: Any) -> Any:
        named = isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf.startswith("cuda"))
        return torch.device("cpu") if named else leaf

    args, kwargs = tree_map_only(Tensor, _host, (args, kwargs))
    args = tuple(map(place, args))
    kwargs = {name: place(value) if name == "device" else value for name, value in kwargs.items()}
    if function is torch.ops.aten.mm.dtype:  # of two bfloat16 matrices in float32, which CPUs do not have
        return torch.ops.aten.mm.default, (args[0].float(), args[1].float()), kwargs
    return function, args, kwargs


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self.made: dict[int, Tensor] = {}  # tensors of the region's own memory, by address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name} waits for the device")
        if name in INDEXES and any(index is not None and index.dtype == torch.bool for index in args[1]):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name} by a mask waits")
        if any(tensor.device.type == "cpu" and tensor.dim() for tensor in tensors):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name} reads memory of the host")
        result = func(*args, **kwargs)
        if name == "device":
            return result
        read = {_address(tensor) for tensor in tensors}
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for leaf in results:
            if leaf.numel() and _address(leaf) not in read:
                self.made[_address(leaf)] = leaf
        self.operations.append(_Operation(*on_host(func, args, kwargs), [_host(leaf) for leaf in results]))
        return result


def _host(tensor: Tensor) -> Tensor:
    """The values of a tensor of the pretended device."""
    values = getattr(tensor, "values", tensor)
    return tensor if callable(values) else values


def _address(tensor: Tensor) -> int:
    return _host(tensor).untyped_storage().data_ptr()


def _spoil(tensor: Tensor) -> None:
    values = _host(tensor)
    memory = values.untyped_storage()
    rubbish = 0xFF if values.is_floating_point() else 0x4D  # NaN, or a number that is absurd in any type
    ctypes.memset(memory.data_ptr(), rubbish, memory.nbytes())


def capturing() -> bool:
    """Whether a region is being recorded."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, _Recorder) for mode in modes)


class RecordedGraph:
    """The contract of :class:`ngrpo.rollout.step_graphs.CudaGraph`."""

    replays = 0  # of all graphs

    def __init__(self, pool: Any) -> None: ...

    @staticmethod
    def pool() -> Any:
        """A pool is nothing here: no two graphs share memory, but all spoil what they made."""
        return object()

    def capture(self, region: Callable[[], None]) -> None:
        """Runs the region and records what it does."""
        with _Recorder() as recorder:
            region()
        self._operations = recorder.operations
        self._made = recorder.made
        self._spoil_all()

    def replay(self) -> None:
        """Runs the recorded operations again, with the values that are at their addresses now."""
        RecordedGraph.replays += 1
        self._spoil_all()
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            for operation in self._operations:
                made = operation.function(*operation.args, **operation.kwargs)
                new_results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
                for new, recorded in zip(new_results, operation.results, strict=True):
                    if recorded.numel() and _address(recorded) in self._made and _address(new) != _address(recorded):
                        recorded.copy_(new)
        self._spoil_all()

    def _spoil_all(self) -> None:
        for tensor in self._made.values():
            _spoil(tensor)


class RepeatedGraph:
    """Runs its region again at each replay: for kernels that are no operations of PyTorch, and for counting them."""

    def __init__(self, pool: Any) -> None: ...

    @staticmethod
    def pool() -> Any:
        """A pool is nothing here."""
        return object()

    def capture(self, region: Callable[[], None]) -> None:
        """Keeps the region."""
        self.replay = region
