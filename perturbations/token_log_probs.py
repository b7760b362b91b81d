# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens from a forward's logits, with little memory beside the logits.

The gradient log π = z − log Σ exp z has in the logits is as large as they are. Autograd makes one such tensor for every
operation that reads logits, and for every slice of them. Here one function makes one.
"""

from typing import Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

_SLICE = 1024
"""Rows of logits that are summed at once, as in OpenRLHF 0.11.2, so that the sums round as its own do."""


def log_probs_at(
    logits: Float[Tensor, "forward vocabulary"],
    rows: Int64[Tensor, " positions"],
    ids: Int64[Tensor, "positions candidates"],
    scale: float = 1.0,
) -> Float[Tensor, "positions candidates"]:
    """log softmax(scale · z) of the tokens ``ids`` at rows of the logits z, (N, n), with gradient to all of these rows.

    A row may be there several times.
    """
    return _LogProbs.apply(logits, rows, ids, scale)


class _Context(Protocol):
    """What :class:`_LogProbs` keeps between forward and backward."""

    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    scale: float

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keeps ``saved_tensors``."""


class _LogProbs(torch.autograd.Function):
    """:func:`log_probs_at`. With p = softmax(scale · z), ∂ log p_i / ∂ z = scale · (onehot(i) − p)."""

    @staticmethod
    def forward(ctx: _Context, logits: Tensor, rows: Tensor, ids: Tensor, scale: float) -> Tensor:
        log_totals = torch.cat([_scaled(part, scale).logsumexp(dim=-1) for part in logits.split(_SLICE)])  # (R,)
        ctx.save_for_backward(logits, rows, ids, log_totals)
        ctx.scale = scale
        return scale * logits[rows.unsqueeze(-1), ids] - log_totals[rows].unsqueeze(-1)

    @staticmethod
    @once_differentiable  # a second derivative would take log Σ exp for a constant
    def backward(  # type: ignore[override]
        ctx: _Context, *output_gradients: Tensor
    ) -> tuple[Tensor, None, None, None]:
        logits, rows, ids, log_totals = ctx.saved_tensors
        scaled_gradients = ctx.scale * output_gradients[0]  # (N, n)
        row_gradients = torch.zeros_like(log_totals).index_add_(0, rows, scaled_gradients.sum(dim=-1))
        probabilities = (_scaled(logits, ctx.scale) - log_totals.unsqueeze(-1)).exp_()
        total = probabilities.mul_(-row_gradients.unsqueeze(-1))  # in place: one tensor of the logits' size
        total.index_put_((rows.unsqueeze(-1), ids), scaled_gradients, accumulate=True)
        return total, None, None, None


def _scaled(logits: Tensor, scale: float) -> Tensor:
    """Logits times a factor; a factor of 1 makes no copy."""
    return logits if scale == 1.0 else logits * scale
