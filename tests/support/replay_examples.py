# SPDX-License-Identifier: Apache-2.0
"""A model of an embedding alone, and records for it."""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import nn

from perturbations import ReplayRecord


def a_record(count: int = 4, k: int = 3, **changes: Any) -> ReplayRecord:
    """A record of up to four positions with ``k`` random candidates each, with these fields changed."""
    draws = np.random.default_rng(count + 10 * k)
    record = ReplayRecord(
        seed=(1 << 48) - 7,
        prompt_tokens=300,
        num_tokens=9000,
        positions=np.array([300, 301, 556, 8999][:count], np.int32),
        ids=draws.integers(0, 49152, (count, k), dtype=np.int32),
        weights=draws.random((count, k)).astype(np.float32),
        sigma=None,
        agreed=draws.random(count) < 0.5,
    )
    return dataclasses.replace(record, **changes)


class Embedder(nn.Module):
    """A model that is its embedding: token t has the vector (2 t, 2 t + 1)."""

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
    return ReplayRecord(
        seed=9,
        prompt_tokens=0,
        num_tokens=3,
        positions=np.array(positions, np.int32),
        ids=np.tile(np.array([[1, 3]], np.int32), (count, 1)),
        weights=np.full((count, 2), 0.5, np.float32),
        sigma=None if sigma is None else np.full(count, sigma, np.float32),
        agreed=np.ones(count, bool),
    )
