# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs on the pretended device: operations are recorded once, and replayed at the addresses of the recording.

Like a real graph a recording keeps what Python decided at the capture, and the address of every tensor. The memory that
the region made for itself is filled with rubbish before and after each replay, since another graph of the same pool may
use it then. What a capture forbids is a ``RuntimeError``: operations that wait for the device, and operations that read
memory of the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

# Operations that need a value from the device.
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
# Operations that need one where an index is a mask.
INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_")


class _Operation(NamedTuple):
    """A recorded operation on the host's values. It refers to its tensors and does not copy them, as a graph does.

    Attributes:
        function: of PyTorch.
        args: its positional arguments.
        kwargs: its keyword arguments.
        results: the tensors that a replay writes to.
    """

    function: Any
    args: Any
    kwargs: dict[str, Any]
    results: list[Tensor]


def on_host(function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The operation on the host's values, for an operation on tensors of the pretended device."""

    def host_device(leaf: Any) -> Any:
        if isinstance(leaf, str | torch.device) and torch.device(leaf).type == "cuda":
            return torch.device("cpu")
        return leaf

    host_args, host_kwargs = tree_map_only(Tensor, _host, (args, kwargs))
    host_args = tuple(host_device(leaf) if isinstance(leaf, torch.device) else leaf for leaf in host_args)
    if "device" in host_kwargs:
        host_kwargs = {**host_kwargs, "device": host_device(host_kwargs["device"])}
    if function is torch.ops.aten.mm.dtype:
        # A product of bfloat16 matrices in float32, which PyTorch has for CUDA only.
        matrix, other_matrix = host_args[:2]
        return torch.ops.aten.mm.default, (matrix.float(), other_matrix.float()), host_kwargs
    return function, host_args, host_kwargs


class _Recorder(TorchDispatchMode):
    """Runs operations and records them.

    Attributes:
        operations: in their order.
        made: tensors in the region's own memory, by address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self.made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        inputs = tensors_in((args, kwargs))
        if name in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name} waits for the device")
        if name in INDEXES and any(index is not None and index.dtype == torch.bool for index in args[1]):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name} by a mask waits")
        if any(tensor.device.type == "cpu" and tensor.dim() for tensor in inputs):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name} reads memory of the host")
        result = func(*args, **kwargs)
        if name == "device":
            return result
        results = tensors_in(result)
        input_addresses = {_address(tensor) for tensor in inputs}
        for tensor in results:
            if tensor.numel() and _address(tensor) not in input_addresses:
                self.made[_address(tensor)] = tensor
        function, host_args, host_kwargs = on_host(func, args, kwargs)
        self.operations.append(_Operation(function, host_args, host_kwargs, [_host(tensor) for tensor in results]))
        return result


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _host(tensor: Tensor) -> Tensor:
    """The values of a tensor of the pretended device; a tensor of the host as it is."""
    values = getattr(tensor, "values", tensor)
    return tensor if callable(values) else values


def _address(tensor: Tensor) -> int:
    return _host(tensor).untyped_storage().data_ptr()


def _spoil(tensor: Tensor) -> None:
    """Fills the memory of a tensor with rubbish."""
    values = _host(tensor)
    memory = values.untyped_storage()
    rubbish = 0xFF if values.is_floating_point() else 0x4D  # bytes of NaN, or of an absurd integer
    ctypes.memset(memory.data_ptr(), rubbish, memory.nbytes())


def capturing() -> bool:
    """Whether a region is being recorded."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, _Recorder) for mode in modes)


class RecordedGraph:
    """The contract of :class:`ngrpo.rollout.step_graphs.CudaGraph`.

    Attributes:
        replays: the number of replays of all graphs.
    """

    replays = 0

    def __init__(self, pool: Any) -> None: ...

    @staticmethod
    def pool() -> Any:
        """No two graphs share memory here; each spoils its own instead."""
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
                results = tensors_in(operation.function(*operation.args, **operation.kwargs))
                for result, recorded in zip(results, operation.results, strict=True):
                    self._put(result, recorded)
        self._spoil_all()

    def _put(self, result: Tensor, recorded: Tensor) -> None:
        """Copies a result to its address in the recording, unless it is there or in memory of another owner."""
        if recorded.numel() and _address(recorded) in self._made and _address(result) != _address(recorded):
            recorded.copy_(result)

    def _spoil_all(self) -> None:
        for tensor in self._made.values():
            _spoil(tensor)


class RepeatedGraph:
    """Runs its region again at each replay: for kernels that are no operations of PyTorch, and to count kernels."""

    def __init__(self, pool: Any) -> None: ...

    @staticmethod
    def pool() -> Any:
        """There is no memory to share."""
        return object()

    def capture(self, region: Callable[[], None]) -> None:
        """Keeps the region."""
        self.replay = region
