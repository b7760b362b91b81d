# SPDX-License-Identifier: Apache-2.0
"""The key with which a token is forced."""

from __future__ import annotations

_WORD = (1 << 32) - 1


def _inverted(x: int) -> int:
    """The number whose hash, lowbias32, is x: each of its steps undone."""
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, 1 << 32) & _WORD
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 1 << 32) & _WORD
    return x ^ x >> 16


def key_of(token: int, hashed: int, first: int = 0) -> int:
    """A key, as int64, under which ``token``'s hash is ``hashed``: mix(mix(token ^ first) + second)."""

    def mixed(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D & _WORD
        x = (x ^ x >> 15) * 0x846CA68B & _WORD
        return x ^ x >> 16

    second = (_inverted(hashed) - mixed(token ^ first)) & _WORD
    assert mixed((mixed(token ^ first) + second) & _WORD) == hashed
    key = second << 32 | first
    return key - (1 << 64) if key >> 63 else key
