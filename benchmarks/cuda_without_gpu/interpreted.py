# SPDX-License-Identifier: Apache-2.0
"""Runs the code that PyTorch's compiler writes for an H100 on a CPU: Triton's interpreter executes each kernel.

    TRITON_INTERPRET=1 python -m benchmarks.cuda_without_gpu.interpreted [--perturbations gumbel,soft] [--plans all]

A made-up scheduler drives a whole perturber (:mod:`.simulated`). Each call of a compiled function is compared with the
function as it is written, and each request with the same request alone on a CPU. A kernel runs with one of the
configurations that Inductor would time on the device, the one with the fewest programs and the most turns of a loop.
Only a GPU shows speed, and the rounding of its own instructions: numpy computes log, exp and cos here, and sums in an
order of its own.
"""

import argparse
import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten_with_path

from benchmarks.command_line import in_tree
from benchmarks.cuda_without_gpu import inductor, pretended
from benchmarks.cuda_without_gpu.pretended import Device, Pretended, host_values, pretended_cuda
from benchmarks.cuda_without_gpu.recorded import RepeatedGraph
from benchmarks.cuda_without_gpu.simulated import Disagreement, simulate
from benchmarks.cuda_without_gpu.simulated_engine import Plan
from ngrpo.rollout import step_graphs
from perturbations import create
from perturbations.compilation import Compiled

TOLERANCE = 4e-6
"""The largest |Δ| / max(1, |x|) for float32: a few units in the last place, by which sums in another order differ."""
ROUNDED = 2.0**-7
"""The same for bfloat16: one unit in the last place."""

PLANS = {
    "float32": Plan(seed=2, lag=2, preempted=0.1, chunk=5, batch=4),
    "filtered": Plan(seed=3, lag=3, preempted=0.2, chunk=3, batch=5, masked=True, sampling="filtered"),
    "bfloat16": Plan(seed=4, lag=1, preempted=0.1, chunk=6, batch=3, dtype=torch.bfloat16),
    "greedy": Plan(seed=5, lag=2, chunk=100, batch=3, sampling="greedy", vocabulary=192),
    # Rows of more than 1,024 blocks are reduced in a loop.
    "large": Plan(seed=6, batch=2, vocabulary=70_001, dtype=torch.bfloat16),
}


@dataclass
class Part:
    """The comparisons of one compiled function.

    Attributes:
        versions: how many versions the compiler wrote.
        late: how many of them after the warm-up, while a request waits.
        calls: of all versions.
        largest: the largest |Δ| / max(1, |x|) to the function as it is written, by dtype.
    """

    versions: int = 0
    late: int = 0
    calls: int = 0
    largest: dict[str, float] = field(default_factory=dict)


@dataclass
class Parts:
    """The compiled functions by their names."""

    known: dict[str, Part] = field(default_factory=dict)
    warm: bool = False
    current: Part = field(default_factory=Part)

    def wrote(self) -> None:
        """The compiler has written a version of the function that is being called."""
        self.current.versions += 1
        self.current.late += self.warm

    def of(self, name: str) -> Part:
        """The entry of a function; the lambda is the one that mixes embeddings."""
        return self.known.setdefault(name.replace("<lambda>", "_mixed_rows"), Part())


def _numpy(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], Any]:
    """A function of libdevice, which the interpreter lacks."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return lambda x: tl.core.tensor(TensorHandle(function(x.handle.data), x.handle.dtype), x.type)


def _triton_tensor(data: Any, like: Any) -> Any:
    """An array as a tensor of Triton with the dtype of another one."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    handle = TensorHandle(np.asarray(data), like.handle.dtype)
    return tl.core.tensor(handle, tl.block_type(like.dtype, [*data.shape]))


def _max_with_index(value: Any, index: Any, dim: int) -> tuple[Any, Any]:
    """The largest values along a dimension, and what ``index`` has in their places."""
    values = value.handle.data
    places = np.expand_dims(np.argmax(values, axis=dim), dim)
    indices = np.broadcast_to(index.handle.data, values.shape)
    largest = np.take_along_axis(values, places, dim).squeeze(dim)
    indices_of_largest = np.take_along_axis(indices, places, dim).squeeze(dim)
    return _triton_tensor(largest, value), _triton_tensor(indices_of_largest, index)


def _rounded(cast: Callable[..., Any]) -> Callable[..., Any]:
    """A cast of the interpreter's that rounds float32 to the nearest bfloat16 as a device; its own cuts bits off."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def cast_rounded(self: Any, source: Any, to: Any) -> Any:
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, to)
        float32 = torch.from_numpy(np.array(source.data, np.float32))
        bits = float32.bfloat16().view(torch.int16).numpy()
        return TensorHandle(bits.view(np.uint16), tl.bfloat16)

    return cast_rounded


@contextlib.contextmanager
def _interpreter() -> Iterator[None]:
    """Replaces what Triton's interpreter lacks, and what it would compute element by element in Python."""
    from torch._inductor.runtime import triton_helpers
    from triton.runtime.interpreter import InterpreterBuilder

    names = ("log1p", "exp", "log", "sqrt", "sin", "cos", "expm1", "tanh", "exp2")
    library = SimpleNamespace(isnan=lambda x: x != x, **{name: _numpy(getattr(np, name)) for name in names})
    replaced = {
        "libdevice": library,
        "max2": lambda value, dim: _triton_tensor(np.max(value.handle.data, axis=dim), value),
        "min2": lambda value, dim: _triton_tensor(np.min(value.handle.data, axis=dim), value),
        "max_with_index": _max_with_index,
    }
    rounded = _rounded(InterpreterBuilder.cast_impl)
    with patch.multiple(triton_helpers, **replaced), patch.object(InterpreterBuilder, "cast_impl", rounded):
        yield


@contextlib.contextmanager
def interpreted_cuda(parts: Parts, lag: int = 0) -> Iterator[Device]:
    """As :func:`pretended_cuda`, where compiled functions are compiled for an H100 and interpreted.

    Args:
        parts: gets the comparisons.
        lag: as for :func:`pretended_cuda`.
    """
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton reads TRITON_INTERPRET=1 when it is imported: set it for the whole process.")
    device_dispatch = vars(Pretended)["__torch_dispatch__"]
    original_load = GraphLowering.compile_to_module
    original_call = Compiled.__call__
    original_run = CachingAutotuner.run

    def load(graph: Any) -> Any:
        """Loads the code that the compiler wrote, so that its tensors are those of the pretended device."""
        parts.wrote()
        module = original_load(graph)
        call = module.call

        def call_on_device(args: list[Any]) -> Any:
            with (
                patch.object(Pretended, "__torch_dispatch__", device_dispatch),
                pretended._Operations(),
                pretended._Functions(),
            ):
                return call(args)

        module.empty_strided_cuda = _empty_strided
        module.reinterpret_tensor = _reinterpreted
        module.copy_if_misaligned = lambda tensor: tensor
        module.call = call_on_device
        return module

    def interpret(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a kernel in its first configuration, with the fewest programs and the most turns of a loop."""
        self.configs.sort(key=lambda config: (-config.kwargs.get("XBLOCK", 1), config.kwargs.get("R0_BLOCK", 1)))
        with _disable_current_modes():
            return original_run(self, *map(host_values, args), **kwargs)

    def call_compared(self: Compiled, *args: Any) -> Any:
        """Calls a function as it is written, restores the gate's state, and calls it compiled."""
        if torch.compiler.is_compiling():
            return self.plain(*args)
        name = self.plain.__name__
        part = parts.of(name)
        gate = getattr(getattr(self.plain, "__self__", None), "_gate", None)
        state = () if gate is None else gate.state
        before = [tensor.values.clone() for tensor in state]
        expected = self.plain(*args), [tensor.values.clone() for tensor in state]
        for tensor, values in zip(state, before, strict=True):
            tensor.values.copy_(values)
        # The compiler takes a tensor with a dispatch of its own for an object, and a mode for code to be compiled.
        plain_dispatch = patch.object(Pretended, "__torch_dispatch__", Tensor.__torch_dispatch__)
        with _disable_current_modes(), _pop_mode_temporarily(), plain_dispatch:
            parts.current = part
            result = original_call(self, *args)
        if self._failed:
            raise Disagreement(f"{name} was not compiled")
        part.calls += 1
        _compare(name, part, (result, list(state)), expected)
        return result

    with contextlib.ExitStack() as stack:
        device = stack.enter_context(pretended_cuda(lag))
        stack.enter_context(patch.object(step_graphs, "CudaGraph", RepeatedGraph))
        stack.enter_context(inductor.target(90))
        stack.enter_context(_interpreter())
        stack.enter_context(patch.object(GraphLowering, "compile_to_module", load))
        stack.enter_context(patch.object(CachingAutotuner, "run", interpret))
        stack.enter_context(patch.object(CachingAutotuner, "precompile", lambda *_, **__: None))
        stack.enter_context(patch.object(Compiled, "__call__", call_compared))
        yield device


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype, **_: Any) -> Pretended:
    return Pretended(torch.empty_strided(size, stride, dtype=dtype))


def _reinterpreted(tensor: Pretended, size: Any, stride: Any, offset: int = 0) -> Pretended:
    values = tensor.values
    return Pretended(values.as_strided(size, stride, values.storage_offset() + offset))


def _compare(name: str, part: Part, result: Any, expected: Any) -> None:
    """Notes the largest differences; raises where integers differ, or floats by more than the tolerance."""
    result_leaves = tree_flatten_with_path(result)[0]
    expected_leaves = tree_flatten_with_path(expected)[0]
    for (path, leaf), (_path, expected_leaf) in zip(result_leaves, expected_leaves, strict=True):
        if leaf is None and expected_leaf is None:  # of a part that only changes the gate's state
            continue
        values = host_values(leaf)
        expected_values = host_values(expected_leaf)
        where = f"{name}{''.join(map(str, path))}"
        if values.dtype != expected_values.dtype or values.shape != expected_values.shape:
            raise Disagreement(
                f"{where}: {values.dtype} {list(values.shape)},"
                f" as written {expected_values.dtype} {list(expected_values.shape)}"
            )
        if not values.is_floating_point():
            if not torch.equal(values, expected_values):
                differing = int((values != expected_values).sum())
                raise Disagreement(f"{where}: {differing} of {values.numel()} differ")
            continue
        dtype = str(values.dtype).removeprefix("torch.")
        largest = _largest_difference(values.float(), expected_values.float())
        part.largest[dtype] = max(part.largest.get(dtype, 0.0), largest)
        tolerance = ROUNDED if dtype == "bfloat16" else TOLERANCE
        if not largest <= tolerance:  # NaN is not
            raise Disagreement(f"{where}: off by {largest:.3g}")


def _largest_difference(values: Tensor, expected: Tensor) -> float:
    """The largest |Δ| / max(1, |x|), where infinities of one sign are equal; 0 for no elements."""
    if not values.numel():
        return 0.0
    differences = (values - expected).abs() / expected.abs().clamp_min(1.0)
    return float(torch.where(values == expected, 0.0, differences).max())


def rehearse(name: str, plan: Plan, count: int = 4, graphs: bool = True, **options: Any) -> Parts:
    """Runs requests of a perturbation through compiled kernels.

    Args:
        name: of the perturbation.
        plan: how requests are run.
        count: of requests.
        graphs: whether a step is one graph.
        **options: of the perturbation.

    Raises:
        Disagreement: where kernels differ from their functions, or requests from the same ones alone on a CPU.
    """
    parts = Parts()

    @contextlib.contextmanager
    def device(lag: int) -> Iterator[Device]:
        available = step_graphs.available if graphs else lambda _device: False
        with interpreted_cuda(parts, lag) as interpreted, patch.object(step_graphs, "available", available):
            yield interpreted

    def warmed_up() -> None:
        parts.warm = True

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        perturbation = create(name) if name == "none" else create(name, **{"rate": 0.7, **options})
        simulate(perturbation, plan, count, pretended=device, warmed_up=warmed_up)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--perturbations", default=",".join(sorted(in_tree())), help="separated by commas")
    parser.add_argument("--plans", default="float32", help=f"of {', '.join(PLANS)}; or all")
    parser.add_argument("--no-graphs", action="store_true", help="the parts of a step run one by one")
    parser.add_argument("--json", action="store_true", help="a line of JSON instead of the table")
    options = parser.parse_args()
    import triton

    results: dict[str, Any] = {"triton": triton.__version__, "torch": torch.__version__}
    print(f"PyTorch {torch.__version__}, Triton {triton.__version__}'s interpreter, code for an H100", flush=True)
    for plan in PLANS if options.plans == "all" else options.plans.split(","):
        for name in options.perturbations.split(","):
            start = time.perf_counter()
            requests = 2 if plan == "large" else 4
            parts = rehearse(name, PLANS[plan], requests, graphs=not options.no_graphs)
            results[f"{name} {plan}"] = {function: vars(part) for function, part in parts.known.items()}
            print(f"{name}, {plan}: {time.perf_counter() - start:.1f} s", flush=True)
            for function, part in parts.known.items():
                print(f"    {function}: {vars(part)}", flush=True)
    if options.json:
        print(f"RESULT {json.dumps(results)}")


if __name__ == "__main__":
    main()
