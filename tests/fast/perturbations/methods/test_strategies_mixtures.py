# SPDX-License-Identifier: Apache-2.0
"""Mixture of Inputs and SeLaR against numbers derived by hand (see the comments)."""

import pytest

from perturbations.registry import create
from tests.support.strategy_steps import approximately, only_proposal, step_of, weight_by_token

# --- Mixture of Inputs ------------------------------------------------------------------------------


@pytest.mark.parametrize("entropy", ["all", "top"])
@pytest.mark.parametrize(
    ("probabilities", "sampled", "beta", "expected"),
    [
        # H = .801819 / ln 3 = .729847; (H p + (2 - H) 1[y]) / 2.
        pytest.param(
            [0.7, 0.2, 0.1],
            1,
            1.0,
            [0.255446, 0.708061, 0.036492],
            id="beta of one",
        ),
        # H = 1.
        pytest.param(
            [0.25] * 4,
            1,
            1.0,
            [0.125, 0.625, 0.125, 0.125],
            id="equal tokens",
        ),
        # (H p + (1.25 - H) 1[y]) / 1.25.
        pytest.param(
            [0.7, 0.2, 0.1],
            0,
            0.25,
            [0.824837, 0.116775, 0.058388],
            id="beta of a quarter",
        ),
    ],
)
def test_moi_weights(
    probabilities: list[float], sampled: int, beta: float, expected: list[float], entropy: str
) -> None:
    """With k = all tokens, the entropy of all and of the likeliest are the same."""
    moi = create("moi", k=len(probabilities), beta=beta, entropy=entropy)
    proposed = only_proposal(moi.propose(step_of(probabilities, sampled=sampled)))
    weights = weight_by_token(proposed.ids, proposed.weights)
    assert proposed.ids[0] == sampled
    assert proposed.token == sampled
    assert weights == pytest.approx(dict(enumerate(expected)), abs=2e-6)


@pytest.mark.parametrize(
    ("entropy", "h"),
    [
        # p = .5, .3, .2: H = 1.029653 / ln 3.
        ("all", 0.937231),
        # The two likeliest: .625, .375, H = .661563 / ln 2.
        ("top", 0.954434),
    ],
)
def test_moi_entropy_of_all_or_of_the_likeliest(entropy: str, h: float) -> None:
    """k = 2, and y is not among the two: its weight is 1 - H / 2 all the same."""
    step = step_of([0.5, 0.3, 0.2], sampled=2)
    proposed = only_proposal(create("moi", k=2, entropy=entropy).propose(step))
    assert proposed.ids == [2, 0, 1]
    assert proposed.weights == approximately(1 - h / 2, 0.625 * h / 2, 0.375 * h / 2)


def test_moi_of_equal_tokens_has_no_weight_below_0() -> None:
    """At β = 0 the token's own weight is 1 − H, and H of 21 equal ones rounds to more than 1."""
    step = step_of([1 / 21] * 21)
    weights = create("moi", beta=0.0).propose(step).edit.weights
    assert weights.min() >= 0.0


# --- SeLaR ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        # H = .937231.
        ([0.5, 0.3, 0.2], [0.031385, 0.581169, 0.387446]),
        # H = .983539.
        ([0.4, 0.35, 0.25], [-0.190123, 0.694239, 0.495885]),
    ],
)
def test_selar_moves_weight_from_the_likeliest_to_the_other_tokens(
    probabilities: list[float], expected: list[float]
) -> None:
    """(1 + H) p, less H at the likeliest. The text keeps the sampled token, whose own candidate has weight 0."""
    proposal = create("selar").propose(step_of(probabilities, sampled=2))
    proposed = only_proposal(proposal)
    assert proposed.ids == [2, 0, 1, 2]
    assert proposed.weights == approximately(0.0, *expected)
    assert proposed.token == 2
    assert proposal.acts.tolist() == [True]


def test_selar_leaves_a_sure_position_alone() -> None:
    """p = .9, .07, .03: H = .351507 < .5, an ordinary position."""
    proposal = create("selar").propose(step_of([0.9, 0.07, 0.03], sampled=1))
    assert only_proposal(proposal) == ([1, 0, 1, 2], [1.0, 0.0, 0.0, 0.0], 1)
    assert proposal.acts.tolist() == [False]


@pytest.mark.parametrize(("threshold", "acts"), [(0.3515, True), (0.3516, False)])
def test_selar_acts_from_its_threshold_on(threshold: float, acts: bool) -> None:
    """H = .351507."""
    proposal = create("selar", threshold=threshold).propose(step_of([0.9, 0.07, 0.03], sampled=1))
    assert proposal.acts.tolist() == [acts]
