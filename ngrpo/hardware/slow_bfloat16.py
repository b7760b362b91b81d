# SPDX-License-Identifier: Apache-2.0
"""Linear layers in bfloat16 on an x86 processor without AVX-512, as laptops have.

torch 2.13 multiplies bfloat16 there by converting one number at a time: a training step takes many times as long as in
float32. Each product is the same sum of the same products in float32, rounded once to bfloat16, whichever way it is
made, so that it is made in float32 and rounded; only the order of the sum differs.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

CONDITION = "slow_bfloat16"


def is_slow(machine: str | None = None, processor: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine multiplies bfloat16 slowly; False where that cannot be told.

    Args:
        machine: what ``platform.machine()`` says.
        processor: Linux's description of the processor.
    """
    if (machine or platform.machine()) not in ("x86_64", "AMD64") or not processor.is_file():
        return False
    flags = next((line for line in processor.read_text().splitlines() if line.startswith("flags")), "")
    return bool(flags) and "avx512f" not in flags.split()


def linear_in_float32(original: Callable[[nn.Linear, Tensor], Tensor]) -> Callable[[nn.Linear, Tensor], Tensor]:
    """`torch.nn.Linear.forward`: bfloat16 is multiplied in float32, forwards and backwards."""
    import torch
    from torch.nn import functional

    builtin = functional.linear

    class RoundedLinear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x if weight.requires_grad else None, weight)
            return builtin(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            x, weight = ctx.saved_tensors
            wide, (of_x, of_weight, of_bias) = gradient.float(), ctx.needs_input_grad
            rows = wide.reshape(-1, wide.shape[-1])
            return (
                (wide @ weight.float()).to(gradient.dtype) if of_x else None,
                (rows.T @ x.reshape(-1, x.shape[-1]).float()).to(weight.dtype) if of_weight else None,
                rows.sum(0).to(weight.dtype) if of_bias else None,
            )

    @wraps(original)
    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        is_ours = input.dtype == self.weight.dtype == torch.bfloat16 and input.device.type == "cpu"
        # DeepSpeed's ZeRO-3 has a linear function of its own, which does not keep the gathered weight.
        if is_ours and functional.linear is builtin:
            return RoundedLinear.apply(input, self.weight, self.bias)
        return original(self, input)

    return forward
