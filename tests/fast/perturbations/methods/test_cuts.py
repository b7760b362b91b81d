# SPDX-License-Identifier: Apache-2.0
"""CUTS against sets and frequencies derived by hand."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from perturbations.base import Step
from perturbations.embeddings import matrix_embeddings
from perturbations.registry import create

ROWS = 4000
# At temperature 1: four tokens have at least 0.03, one of them is not among the three likeliest.
P = torch.tensor([0.50, 0.02, 0.30, 0.05, 0.12, 0.01])


def step_of(probabilities: torch.Tensor, temperature: float = 1.0, drawable: torch.Tensor | None = None) -> Step:
    """Positions 0, 1, 2, … of one trajectory, all with the same distribution."""
    logits = (probabilities.log() / temperature).expand(ROWS, -1).contiguous()
    sampled, seeds = torch.full((ROWS,), 1), torch.full((ROWS,), 7)
    embeddings = matrix_embeddings(torch.eye(len(probabilities)))
    step = Step(logits, sampled, torch.full((ROWS,), temperature), seeds, torch.arange(ROWS), embeddings)
    return replace(step, drawable=drawable)


def shares(step: Step, **options: float) -> dict[int, float]:
    proposal = create("cuts", **options).propose(step)
    assert torch.equal(proposal.edit.ids.squeeze(-1), proposal.tokens) and bool((proposal.edit.weights == 1).all())
    return {token: count / ROWS for token, count in Counter(proposal.tokens.tolist()).items()}


@pytest.mark.parametrize("temperature", [1.0, 0.2, 3.0])
@pytest.mark.parametrize(
    ("options", "candidates"),
    [
        ({}, {0, 2, 3, 4}),
        ({"k": 3}, {0, 2, 4}),
        ({"delta": 0.2}, {0, 2}),
        ({"delta": 0.4}, {0}),
        ({"delta": 0.6, "k": 3}, {0, 2, 4}),  # none has so much: all k
        ({"delta": 0.0, "k": 6}, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_each_candidate_is_as_likely(temperature: float, options: dict[str, float], candidates: set[int]) -> None:
    """δ is of the probability at temperature 1, whatever the rollout's is. Five standard errors of a share."""
    found = shares(step_of(P, temperature), **options)
    assert found.keys() == candidates
    expected = 1.0 / len(candidates)
    bound = 5.0 * (expected * (1.0 - expected) / ROWS) ** 0.5
    assert all(abs(share - expected) <= bound for share in found.values())


def test_what_the_request_excludes_is_not_drawn() -> None:
    allowed = P.log().expand(ROWS, -1).clone()
    allowed[:, 2] = -torch.inf
    assert shares(step_of(P, drawable=allowed)).keys() == {0, 3, 4}
    allowed[:, [0, 3, 4, 5]] = -torch.inf  # none of the five likeliest but token 1 is left
    assert shares(step_of(P, drawable=allowed)).keys() == {1}, "the ordinarily sampled token"
