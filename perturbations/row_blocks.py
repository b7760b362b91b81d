# SPDX-License-Identifier: Apache-2.0
"""Rows of logits in blocks of 64: log Σ exp, entropy and the k largest of a row without further passes over memory."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
# From this many candidates on, blocks are cut into parts of 8 before their tokens are compared.
_MANY, _PART = 64, 8


class Summary(NamedTuple):
    """Of B rows of logits: maximum and log Σ exp of each block, (B, V / 64), and log Σ exp of each row, (B,), float32.

    A block without a possible token has -inf.
    """

    maxima: Tensor
    log_totals: Tensor
    log_total: Tensor


def blocks(logits: Tensor) -> Tensor:
    """(B, V) to (B, V / 64 rounded up, 64); the last block is filled up with -inf."""
    missing = -logits.shape[-1] % BLOCK
    if missing:  # padding by nothing would copy
        logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits.view(len(logits), logits.shape[-1] // BLOCK, BLOCK)  # there may be no rows


def block_sums(logits: Tensor, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The largest and log Σ exp of each block, (B, V) float32 to (B, V / 64) each; ``maxima`` where they are known."""
    parts = blocks(logits)
    if maxima is None:
        maxima = parts.amax(dim=-1)
    shift = torch.where(maxima > -torch.inf, maxima, 0.0)
    return maxima, (parts - shift.unsqueeze(-1)).exp().sum(dim=-1).log() + shift


def summary(
    logits: Tensor, maxima: Tensor | None = None, sums: Callable[..., tuple[Tensor, Tensor]] = block_sums
) -> Summary:
    """Of logits (B, V) float32; ``maxima`` where they are known; ``sums``: :func:`block_sums`, or it compiled."""
    maxima, log_totals = sums(logits) if maxima is None else sums(logits, maxima)
    most = log_totals.amax(dim=-1)
    safe = torch.where(most > -torch.inf, most, 0.0)
    return Summary(maxima, log_totals, (log_totals - safe.unsqueeze(-1)).exp().sum(dim=-1).log() + safe)


def log_total(logits: Tensor, maxima: Tensor | None = None) -> Tensor:
    """log Σ exp of each row, (B, V) float32 to (B,); ``maxima`` as in :func:`summary`."""
    return summary(logits, maxima).log_total


def entropy(logits: Tensor, known: Tensor | None = None) -> Tensor:
    """The entropy of each row's distribution in nats, (B, V) float32 to (B,); ``known``: its :func:`log_total`."""
    if known is None:
        return torch.special.entr(torch.softmax(logits, dim=-1)).sum(dim=-1)
    # From -104 on the exponential is 0, and -inf times 0 would be none.
    below = (blocks(logits) - known.view(-1, 1, 1)).clamp_min_(-200.0)
    return -below.exp().mul_(below).sum(dim=-1).sum(dim=-1)  # in place: to a CPU new memory is a cost of its own


def largest(logits: Tensor, k: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k largest of each row (B, V) float32, largest first: values (B, k) float32 and ids (B, k) int64.

    Of equal logits the lower id comes first; on a CPU for k = 1 only. ``maxima``: :attr:`Summary.maxima`, if known.
    """
    # They are within the k blocks of largest maxima.
    maxima = blocks(logits).amax(dim=-1) if maxima is None else maxima
    if logits.device.type != "cpu":
        return _by_blocks(logits, k, maxima)
    if logits.shape[-1] % BLOCK:
        return _most(logits, k)
    values, tokens = _tokens(logits, _most(maxima, min(k, maxima.shape[-1]))[1].sort(dim=-1).values, BLOCK)
    values, places = _most(values.flatten(1), k)
    return values, tokens.flatten(1).gather(-1, places)


def _most(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``torch.topk``; for k = 1 the first of equal values, as ``torch.argmax``."""
    return values.max(dim=-1, keepdim=True) if k == 1 else values.topk(k, dim=-1)


def _by_blocks(logits: Tensor, k: int, maxima: Tensor) -> tuple[Tensor, Tensor]:
    ids, width = torch.arange(maxima.shape[-1], device=logits.device).expand(len(logits), -1), BLOCK
    ids = _first(maxima, ids, k, ordered=False)
    if k >= _MANY:
        width = _PART
        ids = (ids.unsqueeze(-1) * (BLOCK // width) + torch.arange(BLOCK // width, device=logits.device)).flatten(1)
        ids = _first(_tokens(logits, ids, width)[0].amax(dim=-1), ids, k, ordered=False)
    values, tokens = _tokens(logits, ids, width)
    tokens = _first(values.flatten(1), tokens.flatten(1), k, ordered=True)
    return logits.gather(-1, tokens), tokens


def _tokens(logits: Tensor, parts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The logits and ids of some parts of each row: (B, n) to (B, n, width) each, -inf beyond the vocabulary."""
    tokens = parts.unsqueeze(-1) * width + torch.arange(width, device=logits.device)
    inside = tokens.clamp_max(logits.shape[-1] - 1)
    values = logits.gather(-1, inside.flatten(1)).view_as(tokens)
    return (values if logits.shape[-1] % BLOCK == 0 else torch.where(inside == tokens, values, -torch.inf)), tokens


def _first(values: Tensor, ids: Tensor, k: int, ordered: bool) -> Tensor:
    """The ids (B, at most k) of the k largest values (B, n); of equal ones, the lower ids."""
    # One integer has both: a float32's bits, as an integer that rises with it, above the complement of the id.
    bits = (values + 0.0).view(torch.int32)  # −0 and 0 are equal
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (rising << 32) | (0x7FFFFFFF - ids)
    return 0x7FFFFFFF - (keys.topk(min(k, keys.shape[-1]), dim=-1, sorted=ordered).values & 0x7FFFFFFF)
