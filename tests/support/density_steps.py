# SPDX-License-Identifier: Apache-2.0
"""Steps of a small policy, and the perturbations whose drawn inputs have a density."""

import torch
from torch import Tensor

from perturbations.base import Step
from perturbations.embeddings import matrix_embeddings
from perturbations.registry import create

V, D = 12, 6


def generator(seed: int = 4) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def a_step(probabilities: Tensor, temperature: float = 1.0, seed: int = 9) -> Step:
    rows = len(probabilities)
    embedding = torch.randn(probabilities.shape[1], D, generator=generator(7))
    logits = probabilities.log() + 2.5
    tokens = torch.zeros(rows, dtype=torch.int64)
    seeds, positions = torch.full((rows,), seed), torch.arange(5, 5 + rows)
    return Step(logits, tokens, torch.full((rows,), temperature), seeds, positions, matrix_embeddings(embedding))


def likely(rows: int, seed: int = 3) -> Tensor:
    return torch.softmax(torch.randn(rows, V, generator=generator(seed)), dim=-1)


PERTURBATIONS = [
    create("gumbel", density="gumbel"),
    create("dirichlet", density="dirichlet", alpha=4.0),
    create("normal", density="normal"),
    create("gaussian", density="gaussian", base="soft", k=5),
]
