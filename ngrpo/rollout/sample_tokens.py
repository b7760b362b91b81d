"""Token draws from counter-based streams: the same token for a trajectory in any batch.

The token with the smallest exponential draw over probability is taken (equivalently, Gumbel-max), as in vLLM's own
sampler, with noise that is a hash of the trajectory's key and the token's id. It stays the same token under float
rounding of the logits, where inversion of
the cumulative distribution would not: there a shift of 1e-6 moves every boundary among the tail's 10^5 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A request with a lower temperature is greedy; vLLM's own threshold (v1/sample/sampler.py, 0.26 to 0.29).
GREEDY_BELOW = 1e-5

_LOW = 0xFFFFFFFF


def _mix32(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers held in int64, with good avalanche (constants of Wellons' lowbias32)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def exponentials(keys: Tensor, size: int) -> Tensor:
    """Exponential(1) draws, one per key and token: (B,) int64 keys to (B, size) float32.

    Small values, which decide who is drawn, are resolved to 2^-32.
    """
    first, second = keys & _LOW, (keys >> 32) & _LOW
    token = torch.arange(size, dtype=torch.int64, device=keys.device)
    bits = _mix32((_mix32(token ^ first.unsqueeze(-1)) + second.unsqueeze(-1)) & _LOW)
    return -torch.log1p(-(bits.float() + 0.5) * 2.0**-32)


@torch.compile(dynamic=True)
def sample_tokens(drawable: Tensor, scaled: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Draws tokens, fused into one pass over the logits (vLLM compiles its own sampler likewise, also when eager).

    Args:
        drawable: logits after top-k, top-p and min-p, (B, V) float32; -inf is never drawn.
        scaled: z̃, the logits before these, (B, V) float32.
        keys: (B,) int64 of :data:`perturbations.streams.Stream.TOKEN`.

    Returns:
        Tokens (B,) int64, and log Σ exp z̃, (B,) float32.
    """
    tokens = (drawable - exponentials(keys, drawable.shape[-1]).log()).argmax(dim=-1)
    return tokens, torch.logsumexp(scaled, dim=-1)
