# SPDX-License-Identifier: Apache-2.0
"""Dirichlet, normal and orthogonal noise against numbers derived by hand from the formulas (see the comments)."""

from __future__ import annotations

import math

import pytest
import torch

from perturbations.edit import realise
from perturbations.embeddings import matrix_embeddings
from perturbations.registry import create
from tests.fast.strategy_steps import PROBABILITIES, approximately, only_proposal, step_of

# --- dirichlet and normal: the other noises of SofT-GRPO's release ---------------------------------


def test_dirichlet() -> None:
    """γ = 1, 2, 1 drawn with shapes α p = 2 (4/7, 2/7, 1/7): weights 1/4, 1/2, 1/4; the text takes the largest."""
    step = step_of(PROBABILITIES, noise=[0.0, math.log(2), 0.0])
    proposal = create("dirichlet", k=3, top_p=1.0, alpha=2.0, density="dirichlet").propose(step)
    assert only_proposal(proposal) == ([0, 1, 2], approximately(1 / 4, 1 / 2, 1 / 4), 1)
    assert step.shape[0].tolist() == approximately(8 / 7, 4 / 7, 2 / 7)
    assert proposal.edit.normalizer.tolist() == approximately(math.log(4))


def test_normal() -> None:
    """p = 2/3, 1/3 and ε = 1, -2: y = 43/60, 14/60, sum 57/60: weights 43/57, 14/57."""
    proposal = create("normal", k=2, density="normal").propose(step_of(PROBABILITIES, noise=[1.0, -2.0]))
    assert only_proposal(proposal) == ([0, 1], approximately(43 / 57, 14 / 57), 0)
    assert proposal.edit.normalizer is None  # the noise is drawn again from its keys


def test_normal_weights_may_be_negative_and_the_text_may_change() -> None:
    """p = 0.5, 0.46, 0.04 and ε = -1, 1, -2: y = 0.45, 0.51, -0.06, sum 0.9."""
    step = step_of([0.5, 0.46, 0.04, 0.0, 0.0], noise=[-1.0, 1.0, -2.0])
    ids, weights, token = only_proposal(create("normal", k=3, top_p=1.0).propose(step))
    assert (ids, token) == ([0, 1, 2], 1) and weights == approximately(0.45 / 0.9, 0.51 / 0.9, -0.06 / 0.9)


# --- orthogonal: a baseline of N-GRPO's release ----------------------------------------------------

O = torch.tensor([[2.0, 0.0], [3.0, 4.0], [-2.0, 1.0], [7.0, 7.0]])  # noqa: E741


@pytest.mark.parametrize(("realization", "token"), [("sampled", 3), ("anchor", 0)])
def test_orthogonal(realization: str, token: int) -> None:
    """Anchor (2, 0); o_1 = (3, 4) - 6/4 (2, 0) = (0, 4), o_2 = (-2, 1) + (2, 0) = (0, 1); w = 3/4, 1/4; ε = 1, -2.

    n_j = ε_j w_j ‖o_j‖ = 3, -1/2 along (0, 1): e' = (2, 5/2). As a mixture: 3/4 of c_1, -1/2 of c_2, and of the
    anchor 1 - (3/4 · 3/2 + 1/2) = -5/8.
    """
    step = step_of([4 / 8, 3 / 8, 1 / 8, 0.0], embeddings=matrix_embeddings(O), noise=[9.0, 1.0, -2.0])
    proposal = create("orthogonal", k=3, realization=realization).propose(step)
    assert only_proposal(proposal) == ([0, 1, 2], approximately(-5 / 8, 3 / 4, -1 / 2), token)
    assert realise(proposal.edit, matrix_embeddings(O).lookup, None)[0].tolist() == approximately(2.0, 2.5)
