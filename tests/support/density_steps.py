# SPDX-License-Identifier: Apache-2.0
"""Steps of a small policy, and the perturbations whose drawn inputs have a density."""

import torch
from torch import Tensor

from perturbations.base import Step
from perturbations.embeddings import matrix_embeddings
from perturbations.registry import create

V = 12
D = 6


def generator(seed: int = 4) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def a_step(probabilities: Tensor, temperature: float = 1.0, seed: int = 9) -> Step:
    """A row for each row of probabilities, of one trajectory from position 5 on."""
    rows = len(probabilities)
    embedding = torch.randn(probabilities.shape[1], D, generator=generator(7))
    return Step(
        logits=probabilities.log() + 2.5,  # Logits are free up to a constant.
        sampled=torch.zeros(rows, dtype=torch.int64),
        temperature=torch.full((rows,), temperature),
        seeds=torch.full((rows,), seed),
        positions=torch.arange(5, 5 + rows),
        embeddings=matrix_embeddings(embedding),
    )


def likely(rows: int, seed: int = 3) -> Tensor:
    """Probabilities of a policy, (rows, V)."""
    return torch.softmax(torch.randn(rows, V, generator=generator(seed)), dim=-1)


PERTURBATIONS = [
    create("gumbel", density="gumbel"),
    create("dirichlet", density="dirichlet", alpha=4.0),
    create("normal", density="normal"),
    create("gaussian", density="gaussian", base="soft", k=5),
]
