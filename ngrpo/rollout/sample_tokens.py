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

# A request with a lower temperature is greedy; vLLM's own threshold (v1/sample/sampler.py, as of 0.29).
GREEDY_BELOW = 1e-5

# The 32-bit multipliers of Wellons' lowbias32, as the signed integers that hold the same bits.
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B - (1 << 32)

# Vocabularies from this size on have compiled hashes and sums on a CPU. For smaller ones compiling costs more (five
# seconds at an engine's start) than it saves (0.1 ms a step of 64 rows).
_COMPILED_FROM = 2048
# The number of best-bounded blocks of a row that are scored first; their best score rules out most other blocks.
_SCORED_FIRST = 8
# The rounding error of a score is well below this.
_ROUNDING = 1e-4


def _mix32(x: Tensor) -> Tensor:
    """A bijection of 32 bits with good avalanche, in wrapping int32 arithmetic (its own shifts keep the sign)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MIX_1
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _MIX_2
    return x ^ ((x >> 16) & 0xFFFF)


def _hashes(keys: Tensor, tokens: Tensor) -> Tensor:
    """Hashes of keys (B,) int64 and tokens (B or 1, n) int32, from 0 to 2^32: (B, n) float32."""
    low = keys.to(torch.int32).unsqueeze(-1)
    high = (keys >> 32).to(torch.int32).unsqueeze(-1)
    bits = _mix32(_mix32(tokens ^ low) + high)
    # The sum of the two halves is rounded once, as the conversion of an int64 would be.
    return ((bits >> 16) & 0xFFFF).float() * 65536.0 + (bits & 0xFFFF).float()


def _exponential(hashes: Tensor) -> Tensor:
    """Exponential(1) draws from hashes of :func:`_hashes`, finite and above 0; a larger hash is a larger draw."""
    # The 128 largest of 2^32 hashes would round to a share of 1, with an infinite draw.
    shares = ((hashes + 0.5) * 2.0**-32).clamp_max(1.0 - 2.0**-24)
    return -torch.log1p(-shares)


def exponentials(keys: Tensor, size: int) -> Tensor:
    """Exponential(1) draws, one per key and token: (B,) int64 keys to (B, size) float32, finite and above 0."""
    return _exponential(_hashes(keys, torch.arange(size, dtype=torch.int32, device=keys.device)))


def sample_tokens(scaled: Tensor, drawable: Tensor | None, keys: Tensor) -> tuple[Tensor, Summary]:
    """As :func:`sample_by_blocks`, in less time on a CPU, where the logarithm of every draw would be the cost.

    No score in a block is above that of its largest logit with its smallest draw. So only blocks that could hold the
    best token are scored, which takes logarithms; the bounds of all blocks take hashes alone.
    """
    scaled = scaled.float()
    block_hashes = _least_hashes
    sums = block_sums
    # By the vocabulary alone, so that a row's bits never depend on its batch.
    if scaled.shape[-1] >= _COMPILED_FROM:
        block_hashes = _compiled_least_hashes
        sums = _compiled_block_sums
    scaled_summary = summary(scaled, sums=sums)
    if drawable is None:
        logits = blocks(scaled)
        maxima = scaled_summary.maxima
    else:
        logits = blocks(drawable)
        maxima = logits.amax(dim=-1)
    bounds = maxima - _exponential(block_hashes(keys, maxima.shape[-1])).log()
    places = torch.arange(BLOCK, dtype=torch.int32)
    batch = len(keys)

    def scores(rows: Tensor, block: Tensor) -> Tensor:
        """The scores of N blocks' tokens, (N, BLOCK)."""
        tokens = block.int().unsqueeze(-1) * BLOCK + places
        return logits[rows, block] - _exponential(_hashes(keys[rows], tokens)).log()

    # 1. A score that each row's best token reaches at least.
    rows = torch.arange(batch)
    scored_first = bounds.topk(min(_SCORED_FIRST, bounds.shape[-1]), dim=-1, sorted=False).indices
    rows_of_blocks = rows.repeat_interleave(scored_first.shape[-1])
    reached = scores(rows_of_blocks, scored_first.flatten()).view(batch, -1).amax(dim=-1)
    # 2. The best token of each block that could reach as much.
    contending = bounds >= reached.unsqueeze(-1) - _ROUNDING
    rows_of_blocks, contenders = contending.nonzero(as_tuple=True)
    best, place = scores(rows_of_blocks, contenders).max(dim=-1)
    # 3. The best token of each row; of equal ones the first.
    row_best = best.new_zeros(batch).scatter_reduce(0, rows_of_blocks, best, "amax", include_self=False)
    won = best == row_best[rows_of_blocks]
    winners = (contenders * BLOCK + place)[won]
    tokens = torch.zeros_like(rows).scatter_reduce(0, rows_of_blocks[won], winners, "amin", include_self=False)
    return tokens, scaled_summary


def _least_hashes(keys: Tensor, count: int) -> Tensor:
    """The smallest hash in each of ``count`` blocks, (B, count) float32."""
    tokens = torch.arange(count * BLOCK, dtype=torch.int32, device=keys.device)
    return _hashes(keys, tokens).view(len(keys), count, BLOCK).amin(dim=-1)


_compiled_least_hashes = Compiled(_least_hashes, "the draw of tokens", dynamic=True)
_compiled_block_sums = Compiled(block_sums, "the draw of tokens", dynamic=True)


def sample_by_blocks(scaled: Tensor, drawable: Tensor | None, keys: Tensor) -> tuple[Tensor, Summary]:
    """Tokens (B,) int64 in one pass over the logits, once it is compiled for a GPU; the pass's summary of z̃.

    ``scaled``: z̃, (B, V), float32 or the model's dtype. ``drawable``: logits after top-k, top-p and min-p, (B, V)
    float32; None where they are z̃. ``keys``: (B,) int64 of :data:`perturbations.streams.Stream.TOKEN`.
    """
    scaled = scaled.float()
    logits = blocks(scaled if drawable is None else drawable)
    draws = exponentials(keys, logits.shape[1] * BLOCK).view_as(logits)
    scores = logits - draws.log()
    best = scores.amax(dim=-1)
    # The place of a block's best token, by 32 bits: argmax writes 64 for each block, a fiftieth of the memory traffic.
    places = torch.arange(BLOCK, dtype=torch.int32, device=scores.device)
    place = torch.where(scores == best.unsqueeze(-1), places, BLOCK - 1).amin(dim=-1)
    block = best.argmax(dim=-1, keepdim=True)
    tokens = (block * BLOCK + place.gather(1, block)).squeeze(1)
    # A row of NaN, as rows beyond the batch may be, has no best token: it must not point beyond the vocabulary.
    return tokens.clamp_max(scaled.shape[-1] - 1), summary(scaled)
