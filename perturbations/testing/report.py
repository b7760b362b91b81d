"""What a check that fails says, and the comparisons that several checks need."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

CLOSE = 1e-5


class PerturbationError(AssertionError):
    """A perturbation or a gate breaks its contract.

    Attributes:
        what: what is wrong, with what was seen.
        fix: what to do about it.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what} {fix}")
        self.what, self.fix = what, fix

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.fix)


def check_tensor(label: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raises where something is not a tensor of this shape, type and device; ``label`` names owner and tensor."""
    if not isinstance(tensor, Tensor):
        raise PerturbationError(f"{label} is a {type(tensor).__name__}.", f"It must be a tensor of shape {shape}.")
    if tuple(tensor.shape) != shape:
        raise PerturbationError(
            f"{label} has shape {tuple(tensor.shape)}.", f"It must be {shape}: one row for each position."
        )
    if tensor.dtype != dtype:
        raise PerturbationError(f"{label} is {tensor.dtype}.", f"It must be {dtype}: convert it with .to({dtype}).")
    if tensor.device != device:
        raise PerturbationError(
            f"{label} is on {tensor.device}.",
            f"It must be on the logits' device, {device}: make tensors with device=step.logits.device.",
        )


def differing(name: str, one: Tensor, two: Tensor, exact: bool = False) -> str | None:
    """Where two tensors differ, in words; None where they do not."""
    if one.shape != two.shape:
        return f"{name} has shape {tuple(one.shape)} and {tuple(two.shape)}"
    if one.dtype == torch.bool:
        one, two = one.to(torch.int8), two.to(torch.int8)
    tolerance = CLOSE if one.is_floating_point() and not exact else 0.0
    different = (one - two).abs() > tolerance * (1.0 + one.abs())
    return f"{name} is {one[different][0].item()} and {two[different][0].item()}" if different.any() else None


def global_random_state() -> tuple[Any, ...]:
    """The generators that nothing here may draw from."""
    _, words, position, *gauss = np.random.get_state()
    return torch.random.get_rng_state().numpy().tobytes(), words.tobytes(), position, gauss, random.getstate()
