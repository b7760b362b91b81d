# SPDX-License-Identifier: Apache-2.0
"""A step of six tokens whose numbers can be derived by hand."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from perturbations.base import Proposal, Replayed, Step
from perturbations.edit import InputEdit, realise
from perturbations.embeddings import ModelEmbeddings, matrix_embeddings
from perturbations.registry import create

# Cosine, dot, L2 and L1 neighbors of token 0 are worked out in perturbations/neighbors/test_exact.py:
# cosine 1, 2, 3, 4; dot 2, 1, 3, 4; L2 and L1 3, 4, 1, 2.
EMBEDDING = torch.tensor(
    [
        [1.0, 0.0],
        [4.0, 3.0],
        [6.0, 8.0],
        [0.0, 1.0],
        [-1.0, 0.0],
    ]
)

PROBABILITIES = [8 / 16, 4 / 16, 2 / 16, 1 / 16, 1 / 16]


class FixedNoise(Step):
    """A step whose draws are given, by token id."""

    def gumbel(self, n: Tensor) -> Tensor:
        return self.noise.gather(-1, n)

    normal = gumbel

    def log_gamma(self, ids: Tensor, shape: Tensor) -> Tensor:
        object.__setattr__(self, "shape", shape)
        return self.noise.gather(-1, ids)


class Proposed(NamedTuple):
    """A proposal for one position as Python values."""

    ids: list[int]
    weights: list[float]
    token: int


def step_of(
    probabilities: list[float],
    sampled: int = 3,
    temperature: float = 1.0,
    embeddings: ModelEmbeddings | None = None,
    noise: list[float] | None = None,
) -> Step:
    """One position whose temperature-scaled logits are log p, plus a constant, which must not matter.

    With ``noise``, the draws of the tokens from 0 on are these numbers, and 0 for the tokens after them.
    """
    fields = dict(
        logits=torch.tensor([probabilities]).log() + 2.5,
        sampled=torch.tensor([sampled]),
        temperature=torch.tensor([temperature]),
        seeds=torch.tensor([7]),
        positions=torch.tensor([11]),
        embeddings=embeddings or matrix_embeddings(EMBEDDING),
    )
    if noise is None:
        return Step(**fields)
    step = FixedNoise(**fields)
    without_noise = len(probabilities) - len(noise)
    object.__setattr__(step, "noise", torch.tensor([noise + [0.0] * without_noise]))
    return step


def only_proposal(proposal: Proposal) -> Proposed:
    """Candidates, weights and token of the only position."""
    return Proposed(
        ids=proposal.edit.ids[0].tolist(),
        weights=proposal.edit.weights[0].tolist(),
        token=proposal.tokens.item(),
    )


def weight_by_token(ids: list[int], weights: list[float]) -> dict[int, float]:
    """The weight of each token, summed over the candidates that name it; tokens of weight 0 are left out."""
    totals: dict[int, float] = {}
    for token, weight in zip(ids, weights):
        totals[token] = totals.get(token, 0.0) + weight
    return {token: weight for token, weight in totals.items() if weight}


def only_input(proposal: Proposal, embeddings: ModelEmbeddings) -> list[float]:
    """The vector that is fed at the only position, without Gaussian noise."""
    return realise(proposal.edit, embeddings.lookup, None)[0].tolist()


def replayed_position(edit: InputEdit, token: int, probabilities: list[float], temperature: float = 1.0) -> Replayed:
    """One position in the second of two rows, of a policy with these probabilities at temperature 1."""
    other_row = [1.0] * len(probabilities)
    logits = torch.tensor([other_row, probabilities]).log() / temperature + 0.7
    return Replayed(
        logits=logits,
        rows=torch.tensor([1]),
        token_log_probs=torch.log_softmax(logits, dim=-1)[1:, token],
        temperature=temperature,
        edit=edit,
        noise_keys=None,
        lookup=matrix_embeddings(EMBEDDING).lookup,
    )


def approximately(*values: float) -> object:
    """Equal to these values within the rounding of float32."""
    return pytest.approx(list(values), abs=2e-6)


def normalised(shares: list[float]) -> list[float]:
    """The weights that are in the proportion of ``shares`` and sum to 1."""
    total = sum(shares)
    return [share / total for share in shares]


def gumbel(probabilities: list[float], noise: list[float], **options: object) -> Proposed:
    """What ``gumbel`` proposes for one position with these draws."""
    return only_proposal(create("gumbel", **options).propose(step_of(probabilities, noise=noise)))


def repeated(n: int, probabilities: list[float]) -> Step:
    """``n`` positions of one trajectory with the same probabilities, at each of which token 0 was sampled."""
    return Step(
        logits=torch.tensor([probabilities]).log().expand(n, -1).contiguous(),
        sampled=torch.zeros(n, dtype=torch.int64),
        temperature=torch.ones(n),
        seeds=torch.full((n,), 9),
        positions=torch.arange(n),
        embeddings=matrix_embeddings(EMBEDDING),
    )
