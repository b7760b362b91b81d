# SPDX-License-Identifier: Apache-2.0
"""Steps with chosen probabilities, and positions of a trajectory."""

import numpy as np
import torch

from perturbations.embeddings import matrix_embeddings
from perturbations.step import GateStep, Positions


def of_one(seed: int, first: int, positions: np.ndarray) -> Positions:
    """Positions of one trajectory, whose response begins at ``first``."""
    count = len(positions)
    return Positions(np.full(count, seed), np.full(count, first), positions)


def step_with(logits: torch.Tensor, sampled: list[int] | None = None, generated: list[int] | None = None) -> GateStep:
    """A row for each row of logits, each of another trajectory; without ``sampled`` and ``generated`` they are 0."""
    rows = len(logits)
    zeros = [0] * rows
    return GateStep(
        logits=logits,
        sampled=torch.tensor(sampled or zeros),
        temperature=torch.ones(rows),
        seeds=torch.arange(100, 100 + rows),
        positions=torch.arange(10, 10 + rows),
        embeddings=matrix_embeddings(torch.eye(logits.shape[1])),
        generated=torch.tensor(generated or zeros),
    )


# For tables of gates' decisions by hand.
T = True
F = False
