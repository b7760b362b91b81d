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

# For logits of the model's dtype and for filtered ones, with and without gradient, and where slots are added.
_VERSIONS = 16
_numbers = itertools.count()


def on_gpu(device: torch.device) -> bool:
    """Whether a device's functions are compiled: on a CPU an operation costs little and a compiler seconds."""
    return device.type not in ("cpu", "meta")  # a tensor without values has nothing to compute


def twice(part: Tensor) -> Tensor:
    """A batch of one as a batch of two: the compiler takes a size of 1 for a constant and would make it a version."""
    return torch.cat([part, part])


class Compiled:
    """A function of tensors compiled as a whole; uncompiled (``plain``) once the compiler has failed.

    ``dynamic`` is that of `torch.compile`.
    """

    def __init__(self, function: Callable[..., Any], purpose: str, dynamic: bool | None = None) -> None:
        self.plain, self._purpose, self._dynamic, self._failed = function, purpose, dynamic, False

    @cached_property
    def _fast(self) -> Callable[..., Any]:
        """Made for the first call: the compiler's import takes two seconds."""
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VERSIONS)
        return torch.compile(_of_its_own(self.plain), fullgraph=True, dynamic=self._dynamic)

    def __call__(self, *args: object) -> Any:
        if self._failed or torch.compiler.is_compiling():
            return self.plain(*args)
        from torch._dynamo.exc import TorchDynamoException
        from torch._inductor.exc import InductorError

        try:
            return self._fast(*args)
        except (TorchDynamoException, InductorError) as error:
            self._failed = True
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            logger.warning("%s: torch.compile does not take it (%s), so it runs uncompiled.", self._purpose, reason)
        return self.plain(*args)


def _of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with code of its own, since PyTorch counts the versions of a function by its code."""
    if isinstance(function, types.MethodType):
        return types.MethodType(_of_its_own(function.__func__), function.__self__)
    parts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    copy = types.FunctionType(code, *parts)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
