# SPDX-License-Identifier: Apache-2.0
"""Token draws from counter-based streams: the same token for a trajectory in any batch.

The token with the smallest exponential draw over probability is taken (equivalently, Gumbel-max), as in vLLM's own
sampler, with noise that is a hash of the trajectory's key and the token's id. It stays the same token under float
rounding of the logits, where inversion of the cumulative distribution would not: there a shift of 1e-6 moves every
boundary among the tail's 10^5 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perturbations.row_blocks import BLOCK, Summary, blocks, summary

# A request with a lower temperature is greedy; vLLM's own threshold (v1/sample/sampler.py, 0.26 to 0.29).
GREEDY_BELOW = 1e-5

# The 32-bit multipliers of Wellons' lowbias32, as the signed integers that hold the same bits.
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B - (1 << 32)

# Below this, compiling costs more (five seconds at an engine's start) than it saves (0.1 ms a step of 64 rows).
_COMPILED_FROM = 2048  # tokens of the vocabulary


def _mix32(x: Tensor) -> Tensor:
    """A bijection of 32 bits with good avalanche, in wrapping int32 arithmetic (whose own shifts keep the sign)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MIX_1
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _MIX_2
    return x ^ ((x >> 16) & 0xFFFF)


def exponentials(keys: Tensor, size: int) -> Tensor:
    """Exponential(1) draws, one per key and token: (B,) int64 keys to (B, size) float32.

    Small values, which decide who is drawn, are resolved to 2^-32. All are finite and above 0, so that the only token
    allowed at a position is drawn whatever its key.
    """
    first, second = keys.to(torch.int32).unsqueeze(-1), (keys >> 32).to(torch.int32).unsqueeze(-1)
    token = torch.arange(size, dtype=torch.int32, device=keys.device)
    bits = _mix32(_mix32(token ^ first) + second)
    unsigned = ((bits >> 16) & 0xFFFF).float() * 65536.0 + (bits & 0xFFFF).float()  # rounded once, as int64's would be
    # The 128 largest of 2^32 hashes round to a share of 1, whose exponential is infinite.
    return -torch.log1p(-((unsigned + 0.5) * 2.0**-32).clamp_max(1.0 - 2.0**-24))


def sample_tokens(drawable: Tensor, scaled: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Draws tokens on a CPU, the scores compiled into one pass, as vLLM compiles its own sampler.

    A small vocabulary's are not compiled. The vocabulary alone decides, so that a row's bits never depend on its batch.

    Args:
        drawable: logits after top-k, top-p and min-p, (B, V) float32; -inf is never drawn.
        scaled: z̃, the logits before these, (B, V) float32.
        keys: (B,) int64 of :data:`perturbations.streams.Stream.TOKEN`.

    Returns:
        Tokens (B,) int64, and log Σ exp z̃, (B,) float32.
    """
    # Inductor's argmax (torch 2.13) takes a fourth of the whole; PyTorch's own maximum next to nothing.
    scored = _scored if drawable.shape[-1] >= _COMPILED_FROM else _scores
    scores, log_total = scored(drawable, scaled, keys)
    return scores.max(dim=-1).indices, log_total


def _scores(drawable: Tensor, scaled: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    return drawable - exponentials(keys, drawable.shape[-1]).log(), torch.logsumexp(scaled, dim=-1)


_scored = torch.compile(_scores, dynamic=True)


def sample_by_blocks(scaled: Tensor, drawable: Tensor | None, keys: Tensor) -> tuple[Tensor, Summary]:
    """The tokens that :func:`sample_tokens` draws, in one pass over the logits once it is compiled for a GPU.

    Each block of 64 tokens is by itself up to the end, so that the rows of a small batch, too, fill the device.

    Args:
        scaled: z̃, (B, V), float32 or the model's dtype.
        drawable: as in :func:`sample_tokens`; None where they are z̃.
        keys: as in :func:`sample_tokens`.

    Returns:
        Tokens (B,) int64, and what the pass leaves of z̃.
    """
    scaled = scaled.float()
    left = blocks(scaled if drawable is None else drawable)
    scores = left - exponentials(keys, left.shape[1] * BLOCK).view_as(left).log()
    best = scores.amax(dim=-1)
    # As argmax, whose 64 bits for each block would be a fiftieth of all that is moved.
    at = torch.arange(BLOCK, dtype=torch.int32, device=scores.device)
    place = torch.where(scores == best.unsqueeze(-1), at, BLOCK - 1).amin(dim=-1)
    block = best.argmax(dim=-1, keepdim=True)
    return (block * BLOCK + place.gather(1, block)).squeeze(1), summary(scaled)
