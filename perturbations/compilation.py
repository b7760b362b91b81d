# SPDX-License-Identifier: Apache-2.0
"""Compiled functions of tensors; most are for a GPU, and run uncompiled on a CPU."""

import itertools
import logging
import types
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("ngrpo.rollout")

# Recompilations that torch allows for each function. A function is compiled for each dtype of the logits, with and
# without the request's filters, with and without gradient, and again when the number of slots grows.
_VERSIONS = 16
_numbers = itertools.count()


def on_gpu(device: torch.device) -> bool:
    """Whether functions are compiled for a device. On a CPU an operation costs little, and a compiler takes seconds."""
    return device.type not in ("cpu", "meta")  # a tensor on the meta device has no values to compute


def twice(batch: Tensor) -> Tensor:
    """A batch of one as a batch of two equal rows: torch.compile specialises on a size of 1 and would compile again."""
    return torch.cat([batch, batch])


class Compiled:
    """A function of tensors, compiled as one graph; from the compiler's first failure on it runs uncompiled."""

    def __init__(self, function: Callable[..., Any], purpose: str, dynamic: bool | None = None) -> None:
        """``purpose``: what the function does, for the warning. ``dynamic``: as in `torch.compile`."""
        self.plain = function  # uncompiled
        self._purpose = purpose
        self._dynamic = dynamic
        self._failed = False

    @cached_property
    def _fast(self) -> Callable[..., Any]:
        """The compiled function, made at the first call: importing the compiler takes two seconds."""
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VERSIONS)
        return torch.compile(_with_own_code(self.plain), fullgraph=True, dynamic=self._dynamic)

    def __call__(self, *args: object) -> Any:
        if self._failed or torch.compiler.is_compiling():
            return self.plain(*args)
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
        from torch._inductor.exc import InductorError

        try:
            return self._fast(*args)
        except (TorchDynamoException, FailOnRecompileLimitHit, InductorError) as error:
            self._failed = True
            lines_of_error = str(error).strip().splitlines()
            reason = lines_of_error[0] if lines_of_error else type(error).__name__
            logger.warning("%s: torch.compile does not take it (%s), so it runs uncompiled.", self._purpose, reason)
        return self.plain(*args)


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of the function with a code object of its own.

    PyTorch counts recompilations by the code object, so two :class:`Compiled` of one function would share the limit.
    """
    if isinstance(function, types.MethodType):
        return types.MethodType(_with_own_code(function.__func__), function.__self__)
    copy = types.FunctionType(
        function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}"),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
