# SPDX-License-Identifier: Apache-2.0
"""A step of six tokens whose numbers can be derived by hand."""

import pytest
import torch
from torch import Tensor

from perturbations.base import Proposal, Step
from perturbations.embeddings import ModelEmbeddings, matrix_embeddings
from perturbations.registry import create

# Cosine, dot, L2 and L1 neighbors of token 0 are worked out in perturbations/neighbors/test_exact.py:
# cosine 1, 2, 3, 4; dot 2, 1, 3, 4; L2 and L1 3, 4, 1, 2.
EMBEDDING = torch.tensor([[1.0, 0.0], [4.0, 3.0], [6.0, 8.0], [0.0, 1.0], [-1.0, 0.0]])

PROBABILITIES = [8 / 16, 4 / 16, 2 / 16, 1 / 16, 1 / 16]


class FixedNoise(Step):
    """A step whose draws are given, by token id."""

    def gumbel(self, n: Tensor) -> Tensor:
        return self.noise.gather(-1, n)

    normal = gumbel

    def log_gamma(self, ids: Tensor, shape: Tensor) -> Tensor:
        object.__setattr__(self, "shape", shape)
        return self.noise.gather(-1, ids)


def step_of(
    probabilities: list[float],
    sampled: int = 3,
    temperature: float = 1.0,
    embeddings: ModelEmbeddings | None = None,
    noise: list[float] | None = None,
) -> Step:
    """One position whose temperature-scaled logits are log p, plus a constant, which must not matter."""
    logits = torch.tensor([probabilities]).log() + 2.5
    rest = (torch.tensor([sampled]), torch.tensor([temperature]), torch.tensor([7]), torch.tensor([11]))
    if noise is None:
        return Step(logits, *rest, embeddings or matrix_embeddings(EMBEDDING))
    step = FixedNoise(logits, *rest, embeddings or matrix_embeddings(EMBEDDING))
    object.__setattr__(step, "noise", torch.tensor([noise + [0.0] * (len(probabilities) - len(noise))]))
    return step


def only_proposal(proposal: Proposal) -> tuple[list[int], list[float], int]:
    """Candidates, weights and token of the only position."""
    edit = proposal.edit
    return edit.ids[0].tolist(), edit.weights[0].tolist(), proposal.tokens.item()


def approximately(*values: float) -> object:
    return pytest.approx(list(values), abs=2e-6)


def gumbel(probabilities: list[float], noise: list[float], **options: object) -> tuple[list[int], list[float], int]:
    return only_proposal(create("gumbel", **options).propose(step_of(probabilities, noise=noise)))


def repeated(n: int, probabilities: list[float]) -> Step:
    logits = torch.tensor([probabilities]).log().expand(n, -1).contiguous()
    tokens = torch.zeros(n, dtype=torch.int64)
    return Step(logits, tokens, torch.ones(n), torch.full((n,), 9), torch.arange(n), matrix_embeddings(EMBEDDING))
