# SPDX-License-Identifier: Apache-2.0
"""The check that a method never waits for the device, on tensors without values."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perturbations import GateStep, Step, user_files
from perturbations.embeddings import matrix_embeddings
from perturbations.testing.report import PerturbationError, mapped

# The calls that a user writes, by torch's names of their operations.
_CALLS = {
    "aten._local_scalar_dense.default": "item(), which an `if` on a tensor calls too",
    "aten._to_copy.default": "cpu()",
}


class _Waits(TorchDispatchMode):
    """Raises for two operations that fake tensors allow: copies to the host, and values set by a mask."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _copies_to_host(func, args, kwargs) or _sets_by_mask(func, args):
            raise fake_tensor.DataDependentOutputException(func)
        return func(*args, **kwargs)


@contextmanager
def _without_torchs_log() -> Iterator[None]:
    """torch 2.13 logs the traceback of each operation without a fake form, before it raises the error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _copies_to_host(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return "to_copy" in str(func) and str(kwargs.get("device")) == "cpu" and args[0].device.type != "cpu"


def _sets_by_mask(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether ``tensor[mask] = values`` is called with several values: their number depends on the mask."""
    if "index_put" not in str(func):
        return False
    has_mask = any(index is not None and index.dtype == torch.bool for index in args[1])
    return has_mask and args[2].numel() != 1


def check_without_values(where: str, method: str, call: Callable[[Any], Any], step: Step | GateStep) -> None:
    """A method runs on fake tensors, which have no values: on a GPU it then waits for none at every token."""
    embeddings = matrix_embeddings(step.embeddings.matrix().to("meta"))
    meta_step = dataclasses.replace(mapped(step, lambda tensor: tensor.to("meta")), embeddings=embeddings)
    with _without_torchs_log(), fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), _Waits():
        try:
            call(meta_step)
        except Exception as error:
            if "devices" in str(error):
                raise PerturbationError(
                    f"{where} {method} computes with a tensor on the CPU: on a GPU the first token would fail.",
                    "Make tensors where the step's are: torch.zeros(n, device=step.logits.device).",
                ) from error
            waits = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
            if not isinstance(error, waits) and "to numpy" not in str(error):
                return  # torch has no fake form of an operation, so nothing can be said
            operation = str(getattr(error, "func", "numpy()"))
            raise PerturbationError(
                f"{where} {method}{user_files.line(error)} waits for the device ({_CALLS.get(operation, operation)}):"
                " the rollout would stop there at every token.",
                "No .item(), .cpu() or nonzero(), no `if` on a tensor, no indexing with a mask: use torch.where.",
            ) from error
