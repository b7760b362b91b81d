# SPDX-License-Identifier: Apache-2.0
"""Runs the code that PyTorch's compiler writes for an H100 on a CPU: Triton's interpreter executes each kernel.

    TRITON_INTERPRET=1 python -m benchmarks.cuda_without_gpu.interpreted [--perturbations gumbel,soft] [--plans all]

A made-up scheduler drives a whole perturber (:mod:`.simulated`). Each call of a compiled function is compared with the
function as it is written, and each request with the same request alone on a CPU. Each kernel runs with one of the
configurations that Inductor would time on the device: the fewest programs, the most turns of a loop. Not seen here:
rounding by the device's own instructions (numpy computes log, exp and cos, and sums in its own order), and speed.
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

from benchmarks.cuda_without_gpu import inductor, pretended
from benchmarks.cuda_without_gpu.pretended import Device, Pretended, pretended_cuda
from benchmarks.cuda_without_gpu.recorded import RepeatedGraph
from benchmarks.cuda_without_gpu.simulated import Disagreement, Plan, simulate
from benchmarks.exactness import in_tree
from ngrpo.rollout import step_graphs
from perturbations import create
from perturbations.compilation import Compiled

TOLERANCE = 4e-6
"""|Δ| ≤ this · max(1, |x|) for float32: a few units in the last place, which sums in another order differ by."""
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
    """What became of one compiled function.

    Attributes:
        versions: how many the compiler wrote.
        late: those of them that were written after the warm-up, while a request waits.
        calls: of all of them.
        largest: the largest |Δ| / max(1, |x|) to the function as it is written, for float32 and for bfloat16.
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
        """The part of a function; the one that mixes embeddings has no name."""
        return self.known.setdefault(name.replace("<lambda>", "_mixed_rows"), Part())


def _numpy(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], Any]:
    """A function of libdevice, which the interpreter lacks."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return lambda x: tl.core.tensor(TensorHandle(function(x.handle.data), x.handle.dtype), x.type)


def _made(data: Any, like: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.core.tensor(TensorHandle(np.asarray(data), like.handle.dtype), tl.block_type(like.dtype, [*data.shape]))


def _max_with_index(value: Any, index: Any, dim: int) -> tuple[Any, Any]:
    values, at = value.handle.data, np.expand_dims(np.argmax(value.handle.data, axis=dim), dim)
    places = np.broadcast_to(index.handle.data, values.shape)
    return tuple(
        _made(np.take_along_axis(data, at, dim).squeeze(dim), like) for data, like in ((values, value), (places, index))
    )


def _rounded(cast: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter cuts float32 to bfloat16; a device rounds to the nearest."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def call(self: Any, source: Any, to: Any) -> Any:
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, to)
        bits = torch.from_numpy(np.array(source.data, np.float32)).bfloat16().view(torch.int16).numpy()
        return TensorHandle(bits.view(np.uint16), tl.bfloat16)

    return call


@contextlib.contextmanager
def _interpreter() -> Iterator[None]:
    """What Triton's interpreter lacks, and what it computes element by element in Python."""
    from torch._inductor.runtime import triton_helpers
    from triton.runtime.interpreter import InterpreterBuilder

    names = ("log1p", "exp", "log", "sqrt", "sin", "cos", "expm1", "tanh", "exp2")
    library = SimpleNamespace(isnan=lambda x: x != x, **{name: _numpy(getattr(np, name)) for name in names})
    replaced = {
        "libdevice": library,
        "max2": lambda a, dim: _made(np.max(a.handle.data, axis=dim), a),
        "min2": lambda a, dim: _made(np.min(a.handle.data, axis=dim), a),
        "max_with_index": _max_with_index,
    }
    rounded = _rounded(InterpreterBuilder.cast_impl)
    with patch.multiple(triton_helpers, **replaced), patch.object(InterpreterBuilder, "cast_impl", rounded):
        yield


@contextlib.contextmanager
def interpreted_cuda(parts: Parts, lag: int = 0) -> Iterator[Device]:
    """As :func:`pretended_cuda`, where compiled functions are compiled for an H100 and interpreted.

    Args:
        parts: filled with what was compiled and compared.
        lag: as for :func:`pretended_cuda`.
    """
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton reads TRITON_INTERPRET=1 when it is imported: set it for the whole process.")
    dispatch, compile_to_module = vars(Pretended)["__torch_dispatch__"], GraphLowering.compile_to_module
    original, run = Compiled.__call__, CachingAutotuner.run

    def on_device(part: Any) -> Any:
        return part.values if isinstance(part, Pretended) else part

    def load(graph: Any) -> Any:
        parts.wrote()
        module = compile_to_module(graph)
        call = module.call

        def strided(part: Any, size: Any, stride: Any, offset: int = 0) -> Pretended:
            return Pretended(part.values.as_strided(size, stride, part.values.storage_offset() + offset))

        def called(args: list[Any]) -> Any:
            with (
                patch.object(Pretended, "__torch_dispatch__", dispatch),
                pretended._Operations(),
                pretended._Functions(),
            ):
                return call(args)

        module.empty_strided_cuda = lambda *shape, **__: Pretended(torch.empty_strided(*shape[:2], dtype=shape[2]))
        module.reinterpret_tensor, module.copy_if_misaligned = strided, lambda part: part
        module.call = called
        return module

    def interpret(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.configs.sort(key=lambda config: (-config.kwargs.get("XBLOCK", 1), config.kwargs.get("R0_BLOCK", 1)))
        with _disable_current_modes():
            return run(self, *map(on_device, args), **kwargs)

    def compiled(self: Compiled, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.plain(*args)
        part = parts.of(self.plain.__name__)
        gate = getattr(getattr(self.plain, "__self__", None), "_gate", None)
        state = () if gate is None else gate.state
        before = [each.values.clone() for each in state]
        expected = self.plain(*args), [each.values.clone() for each in state]
        for each, values in zip(state, before, strict=True):
            each.values.copy_(values)
        # The compiler takes a tensor with a dispatch of its own for an object, and a mode for code to be compiled.
        plain = patch.object(Pretended, "__torch_dispatch__", Tensor.__torch_dispatch__)
        with _disable_current_modes(), _pop_mode_temporarily(), plain:
            parts.current = part
            found = original(self, *args)
        if self._failed:
            raise Disagreement(f"{self.plain.__name__} was not compiled")
        part.calls += 1
        _compare(self.plain.__name__, part, (found, list(state)), expected)
        return found

    with contextlib.ExitStack() as stack:
        device = stack.enter_context(pretended_cuda(lag))
        stack.enter_context(patch.object(step_graphs, "CudaGraph", RepeatedGraph))
        stack.enter_context(inductor.target(90))
        stack.enter_context(_interpreter())
        stack.enter_context(patch.object(GraphLowering, "compile_to_module", load))
        stack.enter_context(patch.object(CachingAutotuner, "run", interpret))
        stack.enter_context(patch.object(CachingAutotuner, "precompile", lambda *_, **__: None))
        stack.enter_context(patch.object(Compiled, "__call__", compiled))
        yield device


def _compare(name: str, part: Part, found: Any, expected: Any) -> None:
    """Notes the largest differences; raises where integers differ, or floats by more than the tolerance."""
    pairs = zip(tree_flatten_with_path(found)[0], tree_flatten_with_path(expected)[0], strict=True)
    for (path, one), (_, other) in pairs:
        if one is None is other:  # a part that changes the state only
            continue
        a, b = (each.values if isinstance(each, Pretended) else each for each in (one, other))
        where = f"{name}{''.join(map(str, path))}"
        if a.dtype != b.dtype or a.shape != b.shape:
            raise Disagreement(f"{where}: {a.dtype} {list(a.shape)}, as written {b.dtype} {list(b.shape)}")
        if not a.is_floating_point():
            if not torch.equal(a, b):
                raise Disagreement(f"{where}: {int((a != b).sum())} of {a.numel()} differ")
            continue
        dtype, a, b = str(a.dtype).removeprefix("torch."), a.float(), b.float()
        off = torch.where(a == b, 0.0, (a - b).abs() / b.abs().clamp_min(1.0))
        largest = float(off.max()) if off.numel() else 0.0
        part.largest[dtype] = max(part.largest.get(dtype, 0.0), largest)
        if not largest <= (ROUNDED if dtype == "bfloat16" else TOLERANCE):
            raise Disagreement(f"{where}: off by {largest:.3g}")


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
        with interpreted_cuda(parts, lag) as made, patch.object(step_graphs, "available", available):
            yield made

    def warmed_up() -> None:
        parts.warm = True

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        perturbation = create(name) if name == "none" else create(name, **{"rate": 0.7, **options})
        simulate(perturbation, plan, count, device, warmed_up)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--perturbations", default=",".join(sorted(in_tree())), help="separated by commas")
    parser.add_argument("--plans", default="float32", help=f"of {', '.join(PLANS)}; or all")
    parser.add_argument("--no-graphs", action="store_true", help="the parts of a step run one by one")
    parser.add_argument("--json", action="store_true", help="a line of JSON instead of the table")
    options = parser.parse_args()
    import triton

    found: dict[str, Any] = {"triton": triton.__version__, "torch": torch.__version__}
    print(f"PyTorch {torch.__version__}, Triton {triton.__version__}'s interpreter, code for an H100", flush=True)
    for plan in PLANS if options.plans == "all" else options.plans.split(","):
        for name in options.perturbations.split(","):
            start = time.perf_counter()
            parts = rehearse(name, PLANS[plan], 2 if plan == "large" else 4, not options.no_graphs)
            found[f"{name} {plan}"] = {each: vars(part) for each, part in parts.known.items()}
            print(f"{name}, {plan}: {time.perf_counter() - start:.1f} s", flush=True)
            for each, part in parts.known.items():
                print(f"    {each}: {vars(part)}", flush=True)
    if options.json:
        print(f"RESULT {json.dumps(found)}")


if __name__ == "__main__":
    main()
