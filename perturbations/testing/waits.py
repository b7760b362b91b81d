# SPDX-License-Identifier: Apache-2.0
"""The check that a method never waits for the device, nor mixes it with the host, on tensors without values."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perturbations import Step, user_files
from perturbations.embeddings import matrix_embeddings
from perturbations.testing.report import PerturbationError, expect, mapped, tensors_of

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


def check_without_values(
    where: str,
    method: str,
    call: Callable[[Any], Any],
    argument: object,
    *,
    fix: str = "Make tensors where the step's are: torch.zeros(n, device=step.logits.device).",
    in_training: bool = False,
) -> None:
    """A method runs on fake tensors, which have no values: on a GPU it then waits for none, and returns GPU tensors.

    Args:
        where: owner and step, for messages.
        method: its name, for messages.
        call: maps a dataclass or a mapping of tensors to a tensor, or to a dataclass or mapping of tensors.
        argument: the dataclass or mapping.
        fix: how to make a tensor on the device, for messages.
        in_training: whether the method runs in training steps, which may wait for the device.
    """
    fails = "on a GPU the first training step would fail." if in_training else "on a GPU the first token would fail."
    on_meta = mapped(argument, lambda tensor: tensor.to("meta"))
    if isinstance(argument, Step):
        embeddings = matrix_embeddings(argument.embeddings.matrix().to("meta"))
        on_meta = dataclasses.replace(on_meta, embeddings=embeddings)
    with _without_torchs_log(), fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), _Waits():
        try:
            result = call(on_meta)
        except Exception as error:
            place = user_files.line(error)
            if "devices" in str(error):
                raise PerturbationError(
                    f"{where} {method}{place} computes with a tensor on the CPU: {fails}", fix
                ) from error
            waits = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
            is_wait = isinstance(error, waits) or "to numpy" in str(error)
            if in_training or not is_wait:
                return  # where it is no wait, torch has no fake form of an operation, so nothing can be said
            operation = str(getattr(error, "func", "numpy()"))
            raise PerturbationError(
                f"{where} {method}{place} waits for the device ({_CALLS.get(operation, operation)}):"
                " the rollout would stop there at every token.",
                "No .item(), .cpu() or nonzero(), no `if` on a tensor, no indexing with a mask: use torch.where.",
            ) from error
    for name, tensor in tensors_of(result):
        of_result = f" ({name})" if name else ""
        expect(tensor.device.type != "cpu", f"{where} {method} returns a tensor on the CPU{of_result}: {fails}", fix)
