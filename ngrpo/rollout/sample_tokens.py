# SPDX-License-Identifier: Apache-2.0
"""Token draws from counter-based streams: the same token for a trajectory in any batch.

The token with the smallest exponential draw over probability is taken (Gumbel-max), as in vLLM's own sampler, with
noise that is a hash of the trajectory's key and the token's id. Rounding of the logits hardly ever changes it; it would
with inversion of the cumulative distribution, where a shift of 1e-6 moves every boundary among 10^5 tokens.
"""

import torch
from torch import Tensor

from perturbations.compilation import Compiled
from perturbations.row_blocks import BLOCK, Summary, block_sums, blocks, summary

# A request with a lower temperature is greedy; vLLM's own threshold (v1/sample/sampler.py, 0.26 to 0.29).
GREEDY_BELOW = 1e-5

# The 32-bit multipliers of Wellons' lowbias32, as the signed integers that hold the same bits.
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B - (1 << 32)

# Below this, compiling costs more (five seconds at an engine's start) than it saves (0.1 ms a step of 64 rows).
_COMPILED_FROM = 2048  # tokens of the vocabulary
# Blocks of a row by which it is told which others cannot hold the token that is drawn.
_TRIED = 8
_ROUNDING = 1e-4  # of a score, generously


def _mix32(x: Tensor) -> Tensor:
    """A bijection of 32 bits with good avalanche, in wrapping int32 arithmetic (its own shifts keep the sign)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MIX_1
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _MIX_2
    return x ^ ((x >> 16) & 0xFFFF)


def _shares(keys: Tensor, tokens: Tensor) -> Tensor:
    """Hashes of keys (B,) int64 and tokens (B or 1, n) int32, from 0 to 2^32: (B, n) float32."""
    first, second = keys.to(torch.int32).unsqueeze(-1), (keys >> 32).to(torch.int32).unsqueeze(-1)
    bits = _mix32(_mix32(tokens ^ first) + second)
    return ((bits >> 16) & 0xFFFF).float() * 65536.0 + (bits & 0xFFFF).float()  # rounded once, as int64's would be


def _exponential(shares: Tensor) -> Tensor:
    # The 128 largest of 2^32 hashes round to a share of 1: its exponential is infinite.
    return -torch.log1p(-((shares + 0.5) * 2.0**-32).clamp_max(1.0 - 2.0**-24))


def exponentials(keys: Tensor, size: int) -> Tensor:
    """Exponential(1) draws, one per key and token: (B,) int64 keys to (B, size) float32, finite and above 0."""
    return _exponential(_shares(keys, torch.arange(size, dtype=torch.int32, device=keys.device)))


def sample_tokens(scaled: Tensor, drawable: Tensor | None, keys: Tensor) -> tuple[Tensor, Summary]:
    """As :func:`sample_by_blocks`, in less time on a CPU: a logarithm takes it longer than a hash.

    No score in a block is above that of its largest logit with its smallest draw, so few blocks need their logarithms.
    """
    # By the vocabulary alone, so that a row's bits never depend on its batch.
    scaled = scaled.float()
    sums, least = (_fast_sums, _fast_least) if scaled.shape[-1] >= _COMPILED_FROM else (block_sums, _least)
    known = summary(scaled, sums=sums)
    left, maxima = (scaled, known.maxima) if drawable is None else (drawable, blocks(drawable).amax(dim=-1))
    bounds = maxima - _exponential(least(keys, maxima.shape[-1])).log()
    parts, places = blocks(left), torch.arange(BLOCK, dtype=torch.int32)

    def scored(rows: Tensor, at: Tensor) -> Tensor:
        shares = _shares(keys[rows], at.int().unsqueeze(-1) * BLOCK + places)
        return parts[rows, at] - _exponential(shares).log()

    rows = torch.arange(len(keys))
    tried = bounds.topk(min(_TRIED, bounds.shape[-1]), dim=-1, sorted=False).indices
    reached = scored(rows.repeat_interleave(tried.shape[-1]), tried.flatten()).view(len(keys), -1).amax(dim=-1)
    some, at = (bounds >= reached.unsqueeze(-1) - _ROUNDING).nonzero(as_tuple=True)
    best, place = scored(some, at).max(dim=-1)
    top = best.new_zeros(len(keys)).scatter_reduce(0, some, best, "amax", include_self=False)
    won = best == top[some]
    tokens = (at * BLOCK + place)[won]
    return torch.zeros_like(rows).scatter_reduce(0, some[won], tokens, "amin", include_self=False), known


def _least(keys: Tensor, count: int) -> Tensor:
    """The smallest hash in each block, (B, count) float32."""
    tokens = torch.arange(count * BLOCK, dtype=torch.int32, device=keys.device)
    return _shares(keys, tokens).view(len(keys), count, BLOCK).amin(dim=-1)


_fast_least, _fast_sums = (Compiled(each, "the draw of tokens", dynamic=True) for each in (_least, block_sums))


def sample_by_blocks(scaled: Tensor, drawable: Tensor | None, keys: Tensor) -> tuple[Tensor, Summary]:
    """Tokens (B,) int64 in one pass over the logits, once it is compiled for a GPU; the pass's summary of z̃.

    ``scaled``: z̃, (B, V), float32 or the model's dtype. ``drawable``: logits after top-k, top-p and min-p, (B, V)
    float32; None where they are z̃. ``keys``: (B,) int64 of :data:`perturbations.streams.Stream.TOKEN`.
    """
    scaled = scaled.float()
    left = blocks(scaled if drawable is None else drawable)
    scores = left - exponentials(keys, left.shape[1] * BLOCK).view_as(left).log()
    best = scores.amax(dim=-1)
    # As argmax: its 64 bits for each block would be a fiftieth of the memory traffic.
    at = torch.arange(BLOCK, dtype=torch.int32, device=scores.device)
    place = torch.where(scores == best.unsqueeze(-1), at, BLOCK - 1).amin(dim=-1)
    block = best.argmax(dim=-1, keepdim=True)
    tokens = (block * BLOCK + place.gather(1, block)).squeeze(1)
    # A row of NaN, as rows beyond the batch may be, has no best token: it must not point beyond the vocabulary.
    return tokens.clamp_max(scaled.shape[-1] - 1), summary(scaled)
