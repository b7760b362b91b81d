# SPDX-License-Identifier: Apache-2.0
"""Rows of logits in blocks of 64: log Σ exp, entropy and the k largest of a row without further passes over memory."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
# For this many candidates or more, the chosen blocks are narrowed to sub-blocks of 8 before their tokens are compared.
_MANY_CANDIDATES = 64
_SUB_BLOCK = 8
_INT32_MAX = 0x7FFFFFFF


class Summary(NamedTuple):
    """Maxima and sums of B rows of logits, float32. A block without a possible token has -inf."""

    maxima: Tensor  # the largest logit of each block, (B, V / 64)
    log_totals: Tensor  # log Σ exp of each block, (B, V / 64)
    log_total: Tensor  # log Σ exp of each row, (B,)


def blocks(logits: Tensor) -> Tensor:
    """(B, V) to (B, V / 64 rounded up, 64); the last block is filled up with -inf."""
    missing = -logits.shape[-1] % BLOCK
    if missing:  # torch copies the tensor even where the padding is 0
        logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    block_count = logits.shape[-1] // BLOCK  # not -1, which torch cannot infer where B is 0
    return logits.view(len(logits), block_count, BLOCK)


def block_sums(logits: Tensor, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The largest logit and log Σ exp of each block, (B, V) float32 to (B, V / 64) each.

    ``maxima``: the largest logits, where the caller has them.
    """
    logits_by_block = blocks(logits)  # (B, V / 64, 64)
    if maxima is None:
        maxima = logits_by_block.amax(dim=-1)
    shift = torch.where(maxima > -torch.inf, maxima, 0.0)  # -inf - -inf would be NaN
    log_totals = (logits_by_block - shift.unsqueeze(-1)).exp().sum(dim=-1).log() + shift
    return maxima, log_totals


def summary(
    logits: Tensor, maxima: Tensor | None = None, sums: Callable[..., tuple[Tensor, Tensor]] = block_sums
) -> Summary:
    """The summary of logits (B, V) float32.

    ``maxima``: the blocks' largest logits, where the caller has them. ``sums``: :func:`block_sums`, perhaps compiled.
    """
    if maxima is None:
        maxima, log_totals = sums(logits)
    else:
        maxima, log_totals = sums(logits, maxima)
    largest_total = log_totals.amax(dim=-1)
    shift = torch.where(largest_total > -torch.inf, largest_total, 0.0)  # -inf - -inf would be NaN
    log_total = (log_totals - shift.unsqueeze(-1)).exp().sum(dim=-1).log() + shift
    return Summary(maxima, log_totals, log_total)


def log_total(logits: Tensor, maxima: Tensor | None = None) -> Tensor:
    """log Σ exp of each row, (B, V) float32 to (B,); ``maxima`` as in :func:`summary`."""
    return summary(logits, maxima).log_total


def entropy(logits: Tensor, row_log_total: Tensor | None = None) -> Tensor:
    """The entropy of each row's distribution in nats, (B, V) float32 to (B,).

    ``row_log_total``: the rows' :func:`log_total`, (B,), where the caller has it.
    """
    if row_log_total is None:
        return torch.special.entr(torch.softmax(logits, dim=-1)).sum(dim=-1)
    # H = −Σ p log p. Below log p = −104 float32's p is 0, so the clamp changes no term but 0 · −inf, which is NaN.
    # The operations are in place, since on a CPU new memory of this size costs as much as the arithmetic.
    log_p = (blocks(logits) - row_log_total.view(-1, 1, 1)).clamp_min_(-200.0)
    return -log_p.exp().mul_(log_p).sum(dim=-1).sum(dim=-1)


def largest(logits: Tensor, k: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k largest of each row (B, V) float32, largest first: values (B, k) float32 and ids (B, k) int64.

    Of equal logits the lower id comes first; on a CPU for k = 1 only. ``maxima``: :attr:`Summary.maxima`, where the
    caller has them.
    """
    on_cpu = logits.device.type == "cpu"
    if on_cpu and logits.shape[-1] % BLOCK:
        return _top_k(logits, k)  # among equal -inf, torch.topk may choose a place of the padding of the last block
    # The k largest logits lie within the k blocks with the largest maxima.
    if maxima is None:
        maxima = blocks(logits).amax(dim=-1)
    if not on_cpu:
        return _largest_by_blocks(logits, k, maxima)
    _, best_blocks = _top_k(maxima, min(k, maxima.shape[-1]))  # (B, k)
    best_blocks = best_blocks.sort(dim=-1).values  # in the order of their ids, as the tokens are in the row
    values, tokens = _tokens_of_blocks(logits, best_blocks, BLOCK)  # (B, k, 64) each
    values, places = _top_k(values.flatten(1), k)  # (B, k) each
    return values, tokens.flatten(1).gather(-1, places)


def _top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row (B, n) and their places, by ``torch.topk``; for k = 1 the first of equal values."""
    if k == 1:
        return values.max(dim=-1, keepdim=True)
    return values.topk(k, dim=-1)


def _largest_by_blocks(logits: Tensor, k: int, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`largest`, on a GPU: narrows each row to k blocks, for a large k to k sub-blocks, then to k tokens."""
    every_block = torch.arange(maxima.shape[-1], device=logits.device).expand(len(logits), -1)  # (B, V / 64)
    candidates = _ids_of_largest(maxima, every_block, k, ordered=False)  # (B, k)
    width = BLOCK
    if k >= _MANY_CANDIDATES:
        width = _SUB_BLOCK
        per_block = BLOCK // _SUB_BLOCK
        sub_blocks = candidates.unsqueeze(-1) * per_block + torch.arange(per_block, device=logits.device)
        sub_blocks = sub_blocks.flatten(1)  # (B, 8 k)
        values, _ = _tokens_of_blocks(logits, sub_blocks, width)  # (B, 8 k, 8)
        candidates = _ids_of_largest(values.amax(dim=-1), sub_blocks, k, ordered=False)  # (B, k)
    values, tokens = _tokens_of_blocks(logits, candidates, width)  # (B, k, width) each
    tokens = _ids_of_largest(values.flatten(1), tokens.flatten(1), k, ordered=True)  # (B, k)
    return logits.gather(-1, tokens), tokens


def _tokens_of_blocks(logits: Tensor, block_ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The logits and ids of the tokens in blocks of ``width``, (B, n) to (B, n, width) each; -inf beyond V tokens."""
    tokens = block_ids.unsqueeze(-1) * width + torch.arange(width, device=logits.device)
    existing = tokens.clamp_max(logits.shape[-1] - 1)
    values = logits.gather(-1, existing.flatten(1)).view_as(tokens)
    if logits.shape[-1] % BLOCK:
        values = torch.where(existing == tokens, values, -torch.inf)
    return values, tokens


def _ids_of_largest(values: Tensor, ids: Tensor, k: int, ordered: bool) -> Tensor:
    """The ids (B, at most k) of the k largest float32 values (B, n); of equal values, the lower ids.

    ``ordered``: with the largest value first; otherwise in any order.
    """
    # One int64 key holds value and id. Its upper half is the float's bits as an integer that rises with the float: a
    # negative float's integer falls with it, so all of its bits but the sign are flipped. The lower half is the id's
    # complement, so that of equal values the lower id has the larger key.
    bits = (values + 0.0).view(torch.int32)  # adding 0 makes −0 equal to 0
    rising = torch.where(bits < 0, bits ^ _INT32_MAX, bits).long()
    keys = (rising << 32) | (_INT32_MAX - ids)
    largest_keys = keys.topk(min(k, keys.shape[-1]), dim=-1, sorted=ordered).values
    return _INT32_MAX - (largest_keys & _INT32_MAX)
