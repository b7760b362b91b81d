# SPDX-License-Identifier: Apache-2.0
"""Steps with chosen probabilities, and positions of a trajectory."""

import numpy as np
import torch

from perturbations.embeddings import matrix_embeddings
from perturbations.step import GateStep, Positions


def of_one(seed: int, first: int, positions: np.ndarray) -> Positions:
    """Positions of one trajectory."""
    return Positions(np.full(len(positions), seed), np.full(len(positions), first), positions)


def step_with(logits: torch.Tensor, sampled: list[int] | None = None, generated: list[int] | None = None) -> GateStep:
    rows = len(logits)
    return GateStep(
        logits,
        torch.tensor(sampled or [0] * rows),
        torch.ones(rows),
        torch.arange(100, 100 + rows),
        torch.arange(10, 10 + rows),
        matrix_embeddings(torch.eye(logits.shape[1])),
        generated=torch.tensor(generated or [0] * rows),
    )


T, F = True, False
