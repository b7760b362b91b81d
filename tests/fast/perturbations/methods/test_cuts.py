# SPDX-License-Identifier: Apache-2.0
"""CUTS against sets and frequencies derived by hand."""

from collections import Counter

import pytest
import torch

from perturbations.base import Step
from perturbations.embeddings import matrix_embeddings
from perturbations.registry import create

ROWS = 4000
# At temperature 1: four tokens have at least 0.03, one of them is not among the three likeliest.
P = torch.tensor([0.50, 0.02, 0.30, 0.05, 0.12, 0.01])


def step_of(temperature: float = 1.0, drawable: torch.Tensor | None = None) -> Step:
    """Positions 0, 1, 2, … of one trajectory, all with the distribution P; token 1 was sampled."""
    return Step(
        logits=(P.log() / temperature).expand(ROWS, -1).contiguous(),
        sampled=torch.full((ROWS,), 1),
        temperature=torch.full((ROWS,), temperature),
        seeds=torch.full((ROWS,), 7),
        positions=torch.arange(ROWS),
        embeddings=matrix_embeddings(torch.eye(len(P))),
        drawable=drawable,
    )


def shares(step: Step, **options: float) -> dict[int, float]:
    """How often each token is drawn; a token in the text is fed alone."""
    proposal = create("cuts", **options).propose(step)
    assert torch.equal(proposal.edit.ids.squeeze(-1), proposal.tokens)
    assert (proposal.edit.weights == 1).all()
    counts = Counter(proposal.tokens.tolist())
    return {token: count / ROWS for token, count in counts.items()}


@pytest.mark.parametrize("temperature", [1.0, 0.2, 3.0])
@pytest.mark.parametrize(
    ("options", "candidates"),
    [
        pytest.param({}, {0, 2, 3, 4}, id="default"),
        pytest.param({"k": 3}, {0, 2, 4}, id="three likeliest"),
        pytest.param({"delta": 0.2}, {0, 2}, id="at least 0.2"),
        pytest.param({"delta": 0.4}, {0}, id="at least 0.4"),
        pytest.param({"delta": 0.6, "k": 3}, {0, 2, 4}, id="none has 0.6, so all k"),
        pytest.param({"delta": 0.0, "k": 6}, {0, 1, 2, 3, 4, 5}, id="all tokens"),
    ],
)
def test_each_candidate_is_as_likely(temperature: float, options: dict[str, float], candidates: set[int]) -> None:
    """δ is of the probability at temperature 1, whatever the rollout's is. Five standard errors of a share."""
    share_by_token = shares(step_of(temperature), **options)
    assert share_by_token.keys() == candidates
    expected = 1.0 / len(candidates)
    standard_error = (expected * (1.0 - expected) / ROWS) ** 0.5
    for share in share_by_token.values():
        assert abs(share - expected) <= 5.0 * standard_error


def without(*tokens: int) -> torch.Tensor:
    """The logits of a request that excludes these tokens."""
    drawable = P.log().expand(ROWS, -1).clone()
    drawable[:, list(tokens)] = -torch.inf
    return drawable


def test_what_the_request_excludes_is_not_drawn() -> None:
    assert shares(step_of(drawable=without(2))).keys() == {0, 3, 4}


def test_the_sampled_token_is_fed_where_no_candidate_is_left() -> None:
    """None of the five likeliest but token 1, which is below δ, is left."""
    assert shares(step_of(drawable=without(0, 2, 3, 4, 5))).keys() == {1}


def test_tokens_that_a_grammar_excludes_are_not_drawn() -> None:
    """With δ = 0, or where no token has δ, all likely tokens are drawn, but for those whose logit is -inf."""
    step = step_of()
    step.logits[:, [0, 2, 3, 5]] = -torch.inf
    step.logits[:, [1, 4]] = 0.0
    for delta in (0.0, 0.6):
        assert shares(step, delta=delta).keys() == {1, 4}, delta
