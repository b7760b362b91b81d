# SPDX-License-Identifier: Apache-2.0
"""The code that PyTorch's compiler writes for a GPU, its cost, and Triton's machine code, on a machine without one."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

# Kernels that PyTorch launches for an operator that the compiler leaves to it; 1 for any other.
# - topk (ATen/native/cuda/TensorTopK.cu, torch 2.13): one block selects from a row below 10,000 elements, and one more
#   kernel sorts the selection.
# - Our own operators: rms copies a number; neighbors notes the anchors and gathers from two tables.
OPERATORS = {"topk": 2, "neighbors": 4, "rms": 1}


class _Driver:
    """Triton's driver of a device to compile for, which cannot launch anything."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    @staticmethod
    def is_active() -> bool:
        return True


def _properties(capability: int) -> Any:
    """The properties of an H100 (90) or an A100 (80), by NVIDIA's data sheets."""
    hopper = capability >= 90
    return SimpleNamespace(
        name="NVIDIA H100 80GB HBM3" if hopper else "NVIDIA A100-SXM4-80GB",
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=132 if hopper else 108,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 << 30,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448 if hopper else 166912,
        shared_memory_per_multiprocessor=233472 if hopper else 167936,
        L2_cache_size=(50 if hopper else 40) << 20,
        gcnArchName="",
    )


def _interface(capability: int) -> Any:
    """What the compiler asks a device for, answered without one."""
    from torch._dynamo.device_interface import DeviceInterface

    properties = _properties(capability)

    class Worker:
        set_device = staticmethod(lambda device: None)
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: properties)

    names: dict[str, Any] = {
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "synchronize": lambda device=None: None,
        "get_device_properties": lambda device=None: properties,
        "get_compute_capability": lambda device=None: capability,
        "get_raw_stream": lambda device: 0,
        "exchange_device": lambda device: 0,
        "maybe_exchange_device": lambda device: 0,
        "is_bf16_supported": lambda including_emulation=False: True,
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None,
        "memory_allocated": lambda device=None: 0,
    }
    members = {name: staticmethod(function) for name, function in names.items()}
    members |= {"Worker": Worker, "device": _Nowhere, "Event": object, "Stream": object}
    return type("InterfaceWithoutGPU", (DeviceInterface,), members)


class _Nowhere(contextlib.nullcontext):
    """``torch.cuda.device`` of a device that is not there."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


@dataclass
class Region:
    """The compiler's result for one function.

    Attributes:
        code: Python with Triton kernels in it.
        bytes: read and written by each kernel: its inputs and outputs once, of what is picked by an index only that.
    """

    code: str
    bytes: int
    operators: list[str] = field(init=False)
    triton: list[tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        pattern = r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)"
        self.triton = re.findall(pattern, self.code, re.S)
        called = self.code[self.code.find("def call") :]
        self.operators = re.findall(r"torch\.ops\.\w+\.(\w+)\.\w+\(", called)
        self.operators += re.findall(r"extern_kernels\.(\w+)\(", called)
        self.launches = len(re.findall(r"^\s+triton_\w+\.run\(", called, re.M))

    @property
    def kernels(self) -> int:
        """Launches of a call."""
        return self.launches + sum(OPERATORS.get(name, 1) for name in self.operators)


class _Written(BaseException):
    """The code is written, and nothing is to be loaded or run. No ``Exception``, since PyTorch catches those."""


@contextlib.contextmanager
def target(capability: int = 90) -> Iterator[None]:
    """The compiler writes for a GPU, as if the machine had one.

    Args:
        capability: 90 for an H100, 80 for an A100.
    """
    import torch._inductor.config as config
    import torch.utils._triton as torch_triton
    import triton
    from torch._dynamo import device_interface
    from torch._inductor import compile_fx, scheduler
    from torch._inductor.fx_passes import fuse_attention, pad_mm
    from torch._inductor.runtime import triton_helpers

    properties, interface = _properties(capability), _interface(capability)
    device_interface.get_registered_device_interfaces()
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_name": lambda device=None: properties.name,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "synchronize": lambda *_: None,
        "device": _Nowhere,
        "_DeviceGuard": _Nowhere,
    }
    active = triton.runtime.driver
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True))
        stack.enter_context(patch.object(torch.version, "cuda", "13.0"))
        for module in (torch_triton, compile_fx, scheduler, pad_mm):  # each has imported the name
            stack.enter_context(patch.object(module, "has_triton", lambda *_: True))
        stack.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        # These two compile patterns by running them on the device.
        stack.enter_context(patch.object(fuse_attention, "_sfdp_init", lambda *_, **__: None))
        stack.enter_context(patch.object(pad_mm, "_pad_mm_init", lambda *_, **__: None))
        stack.enter_context(patch.dict(device_interface.device_interfaces, {"cuda": interface, "cuda:0": interface}))
        stack.enter_context(config.patch(compile_threads=1, fx_graph_cache=False, fx_graph_remote_cache=False))
        stack.enter_context(config.patch(joint_graph_constant_folding=False, use_static_triton_launcher=False))
        before = active._active
        active.set_active(_Driver(capability))
        try:
            yield
        finally:
            active._active = before
            torch._dynamo.reset()


@contextlib.contextmanager
def compiling_for(capability: int = 90) -> Iterator[Callable[..., Region]]:
    """Yields a function that compiles another function for its arguments, and returns the code.

    Args:
        capability: as in :func:`target`.
    """
    from torch._inductor.graph import GraphLowering

    written: list[Region] = []

    def write(graph: Any) -> None:
        code, _line_map = graph.codegen()
        bytes_moved = sum(_memory(node) for node in graph.scheduler.nodes)
        written.append(Region(code=getattr(code, "value", code), bytes=bytes_moved))
        raise _Written

    def region(function: Callable[..., Any], *args: Any) -> Region:
        torch._dynamo.reset()
        try:
            torch.compile(function, fullgraph=True)(*args)
        except _Written:
            return written.pop()
        raise RuntimeError("the compiler had nothing to do")

    with target(capability), patch.object(GraphLowering, "compile_to_module", write):
        yield region


def _memory(node: Any) -> int:
    """Bytes that a kernel of Inductor's schedule reads and writes.

    Inductor's own count takes a tensor of which a fused kernel picks some rows by an index for wholly read.
    """
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.ir import MultiOutputLayout
    from torch._inductor.virtualized import V

    def number(expression: Any) -> int:
        return V.graph.sizevars.optimization_hint(expression, fallback=0)

    def is_tensor(name: str) -> bool:
        """False for a node of several results of one operator, each of which is counted separately."""
        return not isinstance(getattr(V.graph.name_to_buffer.get(name), "layout", None), MultiOutputLayout)

    def elements(dependency: Any) -> tuple[Any, int]:
        """The index of an access, None where it is not by an index; and how many elements it touches at most."""
        numel = number(V.graph.get_numel(dependency.name))
        if not isinstance(dependency, MemoryDep):
            return None, numel
        if dependency.is_indirect():
            return dependency.index, min(numel, math.prod(map(number, dependency.size)))
        return None, min(numel, number(dependency.get_numel()))

    fused_nodes = node.get_nodes()
    names = {fused.get_name() for fused in fused_nodes}
    outputs = {buffer.get_name(): buffer for fused in fused_nodes for buffer in fused.get_outputs()}
    # A buffer that only this kernel reads stays in registers.
    inside = {name for name, buffer in outputs.items() if all(user.get_name() in names for user in buffer.users)}
    accesses: list[tuple[str, Any]] = []
    for fused in fused_nodes:
        operator = getattr(fused.node, "op_overload", None)
        # Our own operators do not read all of their operands.
        if getattr(operator, "namespace", "") != "perturbations":
            reads = [read for read in fused.read_writes.reads if read.name not in outputs]
            accesses += [("read", read) for read in reads]
        accesses += [("write", write) for write in fused.read_writes.writes]
    touched: dict[tuple[str, str], dict[Any, int]] = {}  # elements by buffer and kind of access, and by index
    for kind, dependency in accesses:
        if dependency.name in inside or not is_tensor(dependency.name):
            continue
        # Accesses to the same elements in another order of loops count once; another index may pick other elements.
        index, numel = elements(dependency)
        by_index = touched.setdefault((dependency.name, kind), {})
        by_index[index] = max(numel, by_index.get(index, 0))
    total = 0
    for (name, _kind), by_index in touched.items():
        numel = min(sum(by_index.values()), number(V.graph.get_numel(name)))
        total += numel * V.graph.get_dtype(name).itemsize
    return total


def cubins(region: Region) -> dict[str, int]:
    """Compiles each Triton kernel of a region to machine code: bytes of the binary by kernel.

    Raises:
        RuntimeError: for a kernel that does not compile.
    """
    from torch._inductor.codecache import PyCodeCache

    sizes = {}
    for name, source in region.triton:
        kernel = getattr(PyCodeCache.load(source), name)
        for config in kernel.configs:
            try:
                compiled = kernel._precompile_config(config)
            except Exception as error:
                raise RuntimeError(f"{name} does not compile: {error}") from error
            sizes[name] = len(compiled.kernel.asm["cubin"])
    return sizes
