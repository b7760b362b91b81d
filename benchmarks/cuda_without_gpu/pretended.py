# SPDX-License-Identifier: Apache-2.0
"""A CPU's tensors that say they are on ``cuda:0``: with values, unlike fake ones, for what depends on them.

They mix with tensors of the host as a GPU's do, which is an error, and what would make the host wait is noted. A copy
to the host that does not wait holds rubbish until an event recorded after it has arrived, so that whoever reads it
too early reads rubbish.
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
from benchmarks.cuda_without_gpu.recorded import INDEXES, WAITS, RecordedGraph, on_host
from ngrpo.rollout import step_graphs
from perturbations import embeddings
from perturbations.compilation import Compiled

_MOVES = ("_to_copy", "to", "copy_")
# Of this clone, whatever its folder is called.
_OURS = tuple(str(Path(__file__).resolve().parents[2] / part) for part in ("ngrpo", "perturbations", "tests"))


@dataclass
class Device:
    """What happened on the pretended device.

    Attributes:
        lag: an event arrives when this many later ones have been recorded, or when it is waited for.
        waits: what made the host wait, with the line of this project that did.
    """

    lag: int = 0
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    _pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _recorded: int = 0

    def wait(self, kind: str) -> None:
        """Notes that the host waits."""
        frames = reversed(traceback.extract_stack())
        line = next((f"{f.filename}:{f.lineno}" for f in frames if f.filename.startswith(_OURS)), "?")
        self.waits[kind, line] += 1

    def late(self, copy: Tensor) -> None:
        """Takes a copy's values away until an event brings them."""
        values = copy.clone()
        copy.fill_(torch.nan if copy.is_floating_point() else 1 if copy.dtype == torch.bool else 77)
        self._pending.append((copy, values))


class Pretended(Tensor):
    """A tensor of the pretended device; ``values`` are the host's."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Pretended:
        values = values.to_dense() if values.is_sparse else values  # a gradient; a wrapper has strides
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
            raise RuntimeError(f"{func}: a tensor of a pretended device that is gone")
        return _dispatched(_device, func, args, kwargs or {})


_device: Device | None = None


def _cuda(place: Any) -> bool:
    return isinstance(place, str | torch.device) and torch.device(place).type == "cuda"


def _dispatched(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    if func.namespace == "perturbations":  # an operator of a compiled step: its Python reads tensors of this device
        return getattr(embeddings, f"_{func.overloadpacket.__name__}")._init_fn(*args, **kwargs)
    name, leaves = func.overloadpacket.__name__, tree_leaves((args, kwargs))
    tensors = [part for part in leaves if isinstance(part, Tensor)]
    ours = [part for part in tensors if isinstance(part, Pretended)]
    place = next((part for part in leaves if isinstance(part, torch.device)), kwargs.get("device"))
    there = _cuda(place) if place is not None else bool(ours)
    if name == "copy_":
        there = isinstance(args[0], Pretended)
    if name == "_pin_memory":
        return args[0]
    moves = name in _MOVES
    strangers = [part for part in tensors if not isinstance(part, Pretended) and part.dim()]
    if ours and name in INDEXES:
        indices = [part for part in args[1] if part is not None]
        if any(part.dtype == torch.bool for part in indices):
            device.wait("index by a mask")
        if any(not isinstance(part, Pretended) for part in indices):
            device.wait("index from the host")
        strangers = [part for part in strangers if all(part is not index for index in indices)]
    if ours and strangers and not moves:
        raise RuntimeError(f"{func}: expected all tensors on one device, found cuda:0 and cpu")
    if ours and name in WAITS:
        device.wait(name)
    waiting = not kwargs.get("non_blocking", name == "copy_" and len(args) > 2 and args[2])
    down, up = moves and ours and not there, moves and there and len(ours) < len(tensors) and bool(strangers)
    if waiting and (down or up):
        device.wait("copy to the host" if down else "copy to the device")

    plain_func, plain_args, plain = on_host(func, args, kwargs)
    with torch._C.DisableTorchFunction():
        if name == "to" and (down or up):
            plain["copy"] = True
        out = plain_func(*plain_args, **plain)
    if down:
        if not waiting:
            device.late(out)
        return out
    known = {id(part.values): part for part in ours}
    if not (there or ours):
        return out
    return tree_map_only(Tensor, lambda part: known[id(part)] if id(part) in known else Pretended(part), out)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatched(_device, func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and _cuda(kwargs.get("device")):
            made = func(*args, **{key: value for key, value in kwargs.items() if key != "device"})
            if made.numel():
                _device.wait("copy to the device")
            return Pretended(made)
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
        self._copies, _device._pending = _device._pending, []
        _device._recorded += 1
        self._at = _device._recorded

    def _arrive(self) -> None:
        for copy, values in self._copies:
            copy.copy_(values)
        self._copies = []

    def query(self) -> bool:
        arrived = _device._recorded >= self._at + _device.lag
        if arrived:
            self._arrive()
        return arrived

    def synchronize(self) -> None:
        _device.wait("event")
        self._arrive()


@contextlib.contextmanager
def pretended_cuda(lag: int = 0) -> Iterator[Device]:
    """A pretended device, on which the parts of a step run unchanged."""
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
