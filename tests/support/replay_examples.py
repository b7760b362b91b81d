# SPDX-License-Identifier: Apache-2.0
"""A model of an embedding alone, and records for it."""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import nn

from perturbations import ReplayRecord


def a_record(count: int = 4, k: int = 3, **changes: Any) -> ReplayRecord:
    draws = np.random.default_rng(count + 10 * k)
    positions = np.array([300, 301, 556, 8999][:count], np.int32)
    ids = draws.integers(0, 49152, (count, k), dtype=np.int32)
    weights, agreed = draws.random((count, k)).astype(np.float32), draws.random(count) < 0.5
    record = ReplayRecord((1 << 48) - 7, 300, 9000, positions, ids, weights, None, agreed)
    return dataclasses.replace(record, **changes)


class Embedder(nn.Module):
    """A model that is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(torch.arange(20.0).view(10, 2), freeze=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens)


def small(positions: list[int], sigma: float | None = None) -> ReplayRecord:
    """Mixes rows 1 and 3, (2, 3) and (6, 7), half and half: (4, 5)."""
    count = len(positions)
    at, ids = np.array(positions, np.int32), np.tile(np.array([[1, 3]], np.int32), (count, 1))
    weights, agreed = np.full((count, 2), 0.5, np.float32), np.ones(count, bool)
    sigmas = None if sigma is None else np.full(count, sigma, np.float32)
    return ReplayRecord(9, 0, 3, at, ids, weights, sigmas, agreed)
