# SPDX-License-Identifier: Apache-2.0
"""Which tokens a step's sampling left, on their way from the device to the host.

A step keeps one bit a token on the device and sends only how many tokens each row has left. Once these numbers have
arrived, the tokens themselves are picked out on the device, exactly as many as there are, and sent: nothing waits, and
of 1,024 rows with 40 tokens each 0.2 MB go to the host instead of the 19 MB of a bit for each of 151,936 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perturbations.errors import require

# Eight bytes of 0 or 1 times this number have them as the bits of the highest byte, the first as the lowest.
_GATHER_BITS = 0x0102040810204080
# Tokens picked out at once, each of which takes some 60 bytes of the device's memory for a moment.
_AT_ONCE = 1 << 20


def pack(drawable: Tensor) -> tuple[Tensor, Tensor]:
    """The smaller of two sets of each row, the tokens that may be drawn and those that were cut, as bits.

    Args:
        drawable: logits after everything that cuts tokens, which are -inf there, (B, V).

    Returns:
        One bit for each token, the first in a byte's lowest, (B, ⌈V/8⌉) uint8; and how many may be drawn, (B,) int64.
        Rows where that is more than V/2 have the bits of the tokens that were cut.
    """
    size = drawable.shape[-1]
    mask = drawable > -torch.inf
    counts = mask.sum(dim=-1)
    if size % 8:
        mask = F.pad(mask, (0, -size % 8))
    bits = (mask.view(torch.int64) * _GATHER_BITS).view(torch.uint8)[:, 7::8]
    bits = bits ^ (2 * counts > size).mul(0xFF).to(torch.uint8).unsqueeze(-1)
    if size % 8:
        bits[:, -1] &= (1 << size % 8) - 1
    return bits, counts


def marked(counts: np.ndarray, size: int) -> np.ndarray:
    """How many bits :func:`pack` sets in rows with so many of ``size`` tokens left, (B,)."""
    return np.minimum(counts, size - counts)


def pick(bits: Tensor, size: int) -> Tensor:
    """The tokens whose bits are set, row by row and ascending, without asking the device how many these are.

    Args:
        bits: as :func:`pack` makes them, (B, ⌈V/8⌉).
        size: how many bits are set.

    Returns:
        (size,) int32.
    """
    flat, width = bits.flatten(), bits.shape[1]
    at = torch.nonzero_static(flat, size=size).squeeze(1)  # bytes with a bit; there may be fewer, then -1 follows
    held = torch.where(at >= 0, flat[at], 0).unsqueeze(1)
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    which = torch.nonzero_static(((held >> places) & 1).flatten(), size=size).squeeze(1)
    return (at[which >> 3] % width * 8 + (which & 7)).to(torch.int32)


class TokensLeft:
    """The tokens left at each row of one step."""

    def __init__(self, drawable: Tensor, download: Callable[[Tensor], Tensor]) -> None:
        """
        Args:
            drawable: as of :func:`pack`.
            download: a copy on the host that may arrive later.
        """
        self._size, self._download = drawable.shape[-1], download
        bits, counts = pack(drawable)
        self._bits: Tensor | None = bits
        self._counts = download(counts)
        self._ids: list[Tensor] = []

    def ask(self) -> None:
        """Has the tokens sent; the numbers that the constructor had sent have arrived."""
        bits, self._bits = require(self._bits, "the bits of a step"), None
        for rows, size in _blocks(marked(self._counts.numpy(), self._size)):
            self._ids.append(self._download(pick(bits[rows], size)))

    def read(self, rows: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """What :meth:`ask` had sent, once it has arrived.

        Args:
            rows: those that are wanted, ascending; None for all.

        Returns:
            How many tokens each row has left, (N,) int64; and the ids whose bits :func:`pack` sets, ascending within a
            row, as many for each as :func:`marked` says, int32.
        """
        counts = self._counts.numpy()
        parts = [part.numpy() for part in self._ids]
        ids = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype=np.int32), *parts])
        if rows is None:
            return counts, ids
        mask = np.zeros(len(counts), dtype=bool)
        mask[rows] = True
        return counts[rows], ids[np.repeat(mask, marked(counts, self._size))]

    def rehearse(self) -> None:
        """Takes the memory of :meth:`ask` for as many tokens as it picks out at once."""
        bits = require(self._bits, "the bits of a step")
        pick(bits, min(_AT_ONCE, bits.numel()))


def _blocks(sizes: np.ndarray) -> Iterator[tuple[slice, int]]:
    """Rows whose sizes add up to what is picked out at once, or single ones that have more; none without any."""
    ends = np.cumsum(sizes)
    first = done = 0
    while first < len(sizes) and ends[-1] > done:
        last = max(int(np.searchsorted(ends, done + _AT_ONCE, side="right")), first + 1)
        if ends[last - 1] > done:
            yield slice(first, last), int(ends[last - 1] - done)
        first, done = last, int(ends[last - 1])
