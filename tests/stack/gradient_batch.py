# SPDX-License-Identifier: Apache-2.0
"""A batch with records whose gradient is taken in several ways."""

from __future__ import annotations

import numpy as np
import torch

from perturbations import ReplayRecord

NEIGHBORS = [[11, 12, 13], [14, 15, 16], [17, 18, 19]]


def a_record(positions: list[int], length: int, sigma: float | None = None) -> ReplayRecord:
    count = len(positions)
    return ReplayRecord(
        5,
        2,
        length,
        np.array(positions, np.int32),
        np.array(NEIGHBORS[:count], np.int32),
        np.tile(np.array([[0.5, 0.3, 0.2]], np.float32), (count, 1)),
        None if sigma is None else np.full(count, sigma, np.float32),
        np.ones(count, dtype=bool),
    )


def batch() -> tuple[torch.Tensor, torch.Tensor, list[ReplayRecord | None]]:
    """Three right-padded samples of 12, 9 and 7 tokens; the second is not perturbed."""
    tokens = torch.arange(100, 136).view(3, 12) % 97 + 100
    mask = torch.ones_like(tokens)
    mask[1, 9:], mask[2, 7:] = 0, 0
    return tokens, mask, [a_record([3, 4, 9], 12), None, a_record([2, 5], 7, sigma=0.1)]
