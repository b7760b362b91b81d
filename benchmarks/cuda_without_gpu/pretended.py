# SPDX-License-Identifier: Apache-2.0
"""Tensors of a CPU that say they are on ``cuda:0``. Unlike fake tensors they have values.

As on a GPU it is an error to mix them with tensors of the host. What would make the host wait is noted. A copy to the
host that does not wait holds rubbish until an event that was recorded after it has arrived, so that a reader who is too
early reads rubbish.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.cuda_without_gpu import guard
from benchmarks.cuda_without_gpu.recorded import INDEXES, WAITS, RecordedGraph, on_host, tensors_in
from ngrpo.rollout import step_graphs
from perturbations import embeddings
from perturbations.compilation import Compiled

_MOVES = ("_to_copy", "to", "copy_")
_CLONE = Path(__file__).resolve().parents[2]
_OUR_FOLDERS = tuple(str(_CLONE / folder) for folder in ("ngrpo", "perturbations", "tests"))


@dataclass
class Device:
    """The state of the pretended device.

    Attributes:
        lag: an event arrives when this many later ones have been recorded, or when the host waits for it.
        waits: how often the host waited, by the kind of operation and the line of this project that called it.
    """

    lag: int = 0
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    _pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _recorded: int = 0

    def wait(self, kind: str) -> None:
        """Notes that the host waits."""
        for frame in reversed(traceback.extract_stack()):
            if frame.filename.startswith(_OUR_FOLDERS):
                self.waits[kind, f"{frame.filename}:{frame.lineno}"] += 1
                return
        self.waits[kind, "?"] += 1

    def late(self, copy: Tensor) -> None:
        """Fills a copy with rubbish; the next event brings its values."""
        values = copy.clone()
        if copy.is_floating_point():
            copy.fill_(torch.nan)
        elif copy.dtype == torch.bool:
            copy.fill_(True)
        else:
            copy.fill_(77)
        self._pending.append((copy, values))


class Pretended(Tensor):
    """A tensor of the pretended device; ``values`` are the host's."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Pretended:
        if values.is_sparse:  # a gradient; a wrapper must have strides
            values = values.to_dense()
        made = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device="cuda:0",
        )
        made.values = values
        return made

    def __init__(self, values: Tensor) -> None: ...

    def data_ptr(self) -> int:
        """The address on the host."""
        return self.values.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _device is None:
            raise RuntimeError(f"{func} on a tensor of a pretended device that is gone")
        return _dispatched(_device, func, args, kwargs or {})


def host_values(leaf: Any) -> Any:
    """The host's values of a tensor of the pretended device; anything else as it is."""
    return leaf.values if isinstance(leaf, Pretended) else leaf


_device: Device | None = None


def _is_cuda(place: Any) -> bool:
    return isinstance(place, str | torch.device) and torch.device(place).type == "cuda"


def _dispatched(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operation on the host's values; returns its results on the device where a GPU would have them."""
    if func.namespace == "perturbations":  # an operator of a compiled step: its Python reads tensors of this device
        return getattr(embeddings, f"_{func.overloadpacket.__name__}")._init_fn(*args, **kwargs)
    name = func.overloadpacket.__name__
    if name == "_pin_memory":
        return args[0]
    tensors = tensors_in((args, kwargs))
    device_tensors = [tensor for tensor in tensors if isinstance(tensor, Pretended)]
    # A number of the host, a tensor without dimensions, goes with either device.
    host_tensors = [tensor for tensor in tensors if not isinstance(tensor, Pretended) and tensor.dim()]
    if device_tensors and name in INDEXES:
        _note_indices(device, args[1])
        host_tensors = [tensor for tensor in host_tensors if all(tensor is not index for index in args[1])]
    moves = name in _MOVES
    if device_tensors and host_tensors and not moves:
        raise RuntimeError(f"{func}: expected all tensors on one device, found cuda:0 and cpu")
    if device_tensors and name in WAITS:
        device.wait(name)
    to_device = _results_on_device(name, args, kwargs)
    downloads = bool(moves and device_tensors and not to_device)
    uploads = bool(moves and to_device and host_tensors)
    waits = not kwargs.get("non_blocking", name == "copy_" and len(args) > 2 and args[2])
    if waits and downloads:
        device.wait("copy to the host")
    if waits and uploads:
        device.wait("copy to the device")

    function, host_args, host_kwargs = on_host(func, args, kwargs)
    if name == "to" and (downloads or uploads):
        host_kwargs["copy"] = True
    with torch._C.DisableTorchFunction():
        result = function(*host_args, **host_kwargs)
    if downloads:
        if not waits:
            device.late(result)
        return result
    if not (to_device or device_tensors):
        return result
    # An operation in place returns the tensor that it was given.
    inputs = {id(tensor.values): tensor for tensor in device_tensors}

    def on_device(values: Tensor) -> Pretended:
        return inputs[id(values)] if id(values) in inputs else Pretended(values)

    return tree_map_only(Tensor, on_device, result)


def _note_indices(device: Device, indices: Any) -> None:
    """Notes the waits of an index into a tensor of the device."""
    tensors = [index for index in indices if index is not None]
    if any(index.dtype == torch.bool for index in tensors):
        device.wait("index by a mask")
    if any(not isinstance(index, Pretended) for index in tensors):
        device.wait("index from the host")


def _results_on_device(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation's results are on the device, by its target, the device it names, or its inputs."""
    if name == "copy_":
        return isinstance(args[0], Pretended)
    leaves = tree_leaves((args, kwargs))
    place = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), kwargs.get("device"))
    if place is not None:
        return _is_cuda(place)
    return any(isinstance(leaf, Pretended) for leaf in leaves)


class _Operations(TorchDispatchMode):
    """Operations that name the device without having a tensor of it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatched(_device, func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Functions that PyTorch does not dispatch as operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and _is_cuda(kwargs.get("device")):
            del kwargs["device"]
            values = func(*args, **kwargs)
            if values.numel():
                _device.wait("copy to the device")
            return Pretended(values)
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.tolist and isinstance(args[0], Pretended):
            _device.wait("tolist")
            return args[0].values.tolist()
        if func is Tensor.numpy and isinstance(args[0], Pretended):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return func(*args, **kwargs)


class _Event:
    """``torch.cuda.Event``: the copies made before it arrive with it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def record(self, *_: Any) -> None:
        self._copies = _device._pending
        _device._pending = []
        _device._recorded += 1
        self._number = _device._recorded

    def _arrive(self) -> None:
        for copy, values in self._copies:
            copy.copy_(values)
        self._copies = []

    def query(self) -> bool:
        arrived = _device._recorded >= self._number + _device.lag
        if arrived:
            self._arrive()
        return arrived

    def synchronize(self) -> None:
        _device.wait("event")
        self._arrive()


@contextlib.contextmanager
def pretended_cuda(lag: int = 0) -> Iterator[Device]:
    """A pretended device, on which a step runs as on a GPU; compiled functions run as they are written."""
    global _device
    guard.load()
    device = _device = Device(lag)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(torch.cuda, "_lazy_init", lambda: None))
            stack.enter_context(patch.object(torch.cuda, "Event", _Event))
            stack.enter_context(patch.object(step_graphs, "CudaGraph", RecordedGraph))
            stack.enter_context(patch.object(Compiled, "__call__", lambda self, *args: self.plain(*args)))
            stack.enter_context(_Functions())
            stack.enter_context(_Operations())
            yield device
    finally:
        _device = None
