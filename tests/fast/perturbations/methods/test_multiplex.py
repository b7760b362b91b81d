# SPDX-License-Identifier: Apache-2.0
"""Multiplex against numbers derived by hand (see the comments), and the further draws of a step that it mixes."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from perturbations.base import Step
from perturbations.embeddings import matrix_embeddings
from perturbations.errors import UsageError
from perturbations.registry import create
from tests.support.strategy_steps import (
    EMBEDDING,
    PROBABILITIES,
    approximately,
    only_proposal,
    repeated,
    replayed_position,
    weight_by_token,
)


class FixedDraws(Step):
    """A step whose further draws are fixed: the attribute ``further``."""

    def draws(self, n: int, distinct: bool = False) -> Tensor:
        return torch.tensor([self.further[:n]])


def step_with_draws(probabilities: list[float], sampled: int, *further: int) -> Step:
    """One position at which ``sampled`` was sampled, and whose further draws are ``further``."""
    step = FixedDraws(
        logits=torch.tensor([probabilities]).log() - 1.5,
        sampled=torch.tensor([sampled]),
        temperature=torch.ones(1),
        seeds=torch.tensor([7]),
        positions=torch.tensor([11]),
        embeddings=matrix_embeddings(EMBEDDING),
    )
    object.__setattr__(step, "further", list(further))
    return step


def chi_squared(counts: Tensor, expected: Tensor) -> Tensor:
    """Pearson's statistic of observed counts."""
    return ((counts - expected).square() / expected).sum()


# --- multiplex ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "share"),
    [
        # p = .5, .3, .2; draws 0, 1, 0: weights .5, .3, .5 over 1.3.
        pytest.param("weighted", 1 / 1.3, id="weighted"),
        # A third for each draw.
        pytest.param("average", 2 / 3, id="average"),
    ],
)
def test_multiplex_mixes_the_draws(weights: str, share: float) -> None:
    """``share``: the weight of token 0."""
    step = step_with_draws([0.5, 0.3, 0.2], 0, 1, 0)
    proposed = only_proposal(create("multiplex", weights=weights).propose(step))
    assert proposed.ids == [0, 1, 0]
    assert proposed.token == 0
    assert weight_by_token(proposed.ids, proposed.weights) == {
        0: pytest.approx(share),
        1: pytest.approx(1 - share),
    }


def test_multiplex_joint_density_counts_a_repeated_draw_again() -> None:
    """Draws 0, 1, 0: 2 ln .5 + ln .3."""
    perturbation = create("multiplex", density="joint")
    edit = perturbation.propose(step_with_draws([0.5, 0.3, 0.2], 0, 1, 0)).edit
    replayed = replayed_position(edit, token=0, probabilities=[0.5, 0.3, 0.2])
    expected = 2 * math.log(0.5) + math.log(0.3)
    assert perturbation.log_density(replayed).tolist() == approximately(expected)


def test_multiplex_joint_density_is_of_the_tokens_that_sampling_left() -> None:
    """Where sampling left tokens 0 and 1, the first draw's log π is ln(.5/.8): the sum is 2 ln .625 + ln .375."""
    perturbation = create("multiplex", density="joint")
    edit = perturbation.propose(step_with_draws([0.5, 0.3, 0.2], 0, 1, 0)).edit
    unfiltered = replayed_position(edit, token=0, probabilities=[0.5, 0.3, 0.2])
    filtered = dataclasses.replace(unfiltered, token_log_probs=torch.tensor([0.625]).log())
    expected = 2 * math.log(0.625) + math.log(0.375)
    assert perturbation.log_density(filtered).tolist() == approximately(expected)


def test_distinct_draws_have_no_joint_density() -> None:
    with pytest.raises(UsageError, match="density='joint': cannot be used with draws='distinct'"):
        create("multiplex", draws="distinct", density="joint")


# --- the further draws of a step --------------------------------------------------------------------


def test_further_draws_are_independent_samples() -> None:
    """Pairs of 100,000 positions against p_i p_j: chi-squared with 24 degrees, 0.999 quantile 51.2."""
    n = 100_000
    draws = repeated(n, PROBABILITIES).draws(2)
    pair_numbers = draws[:, 0] * 5 + draws[:, 1]
    counts = torch.bincount(pair_numbers, minlength=25).double()
    p = torch.tensor(PROBABILITIES)
    expected = n * torch.outer(p, p).flatten().double()
    assert chi_squared(counts, expected) < 51.2


def test_distinct_draws_are_without_replacement() -> None:
    """Ordered pairs after token 0 against p_j / (1 − p_0) · p_k / (1 − p_0 − p_j): 11 degrees, 0.999 quantile 31.3."""
    n = 30_000
    p = PROBABILITIES
    draws = repeated(n, p).draws(2, distinct=True)
    pair_numbers = draws[:, 0] * 5 + draws[:, 1]
    counts = torch.bincount(pair_numbers, minlength=25).double().view(5, 5)

    statistic = 0.0
    for j, k in itertools.permutations(range(1, 5), 2):
        first_probability = p[j] / (1 - p[0])
        second_probability = p[k] / (1 - p[0] - p[j])
        expected = n * first_probability * second_probability
        statistic += (counts[j, k] - expected) ** 2 / expected
        counts[j, k] = 0.0
    assert statistic < 31.3
    assert not counts.any(), "no token twice"


def sure_step() -> Step:
    """4,000 positions of a policy that is sure of token 3: 1 − p rounds to 0 in float32.

    The tokens 70, 71 and 129 have 2 : 1 : 1 of the rest, and lie in several blocks of 64.
    """
    logits = torch.full((130,), -torch.inf)
    logits[3] = 0.0
    logits[70] = math.log(4e-9)
    logits[71] = math.log(2e-9)
    logits[129] = math.log(2e-9)
    places = torch.arange(4000)
    return Step(
        logits=logits.expand(4000, -1),
        sampled=torch.full((4000,), 3),
        temperature=torch.ones(4000),
        seeds=places,
        positions=places,
        embeddings=matrix_embeddings(torch.randn(130, 4)),
    )


def test_distinct_draws_of_a_sure_policy_keep_the_shares_of_the_rest() -> None:
    draws = sure_step().draws(4, distinct=True)
    share_of_70 = (draws[:, 0] == 70).float().mean().item()
    assert share_of_70 == pytest.approx(0.5, abs=0.03)
    first_three = draws[:, :3].sort(dim=1).values
    assert first_three.eq(torch.tensor([70, 71, 129])).all()
    assert (draws[:, 3] == 3).all(), "nothing is left"


def test_distinct_draws_that_run_out_of_tokens_are_averaged_over_the_tokens_that_there_are() -> None:
    """Six draws, but four tokens with any probability."""
    edit = create("multiplex", k=6, draws="distinct", weights="average").propose(sure_step()).edit
    weights = weight_by_token(edit.ids[0].tolist(), edit.weights[0].tolist())
    assert weights == {
        3: pytest.approx(0.25),
        70: pytest.approx(0.25),
        71: pytest.approx(0.25),
        129: pytest.approx(0.25),
    }


def test_further_draws_are_among_the_tokens_that_the_request_allows() -> None:
    """p_1 : p_2 = 4/16 : 2/16."""
    step = repeated(2000, PROBABILITIES)
    drawable = step.logits.clone()
    drawable[:, [0, 3, 4]] = -torch.inf
    draws = dataclasses.replace(step, drawable=drawable).draws(3)
    assert set(draws.flatten().tolist()) == {1, 2}
    assert (draws == 1).float().mean().item() == pytest.approx(2 / 3, abs=0.03)


@pytest.mark.more
def test_further_draws_over_several_blocks_of_tokens() -> None:
    """Of 150 tokens, all but two of the middle ones excluded: chi-squared with 87 degrees, 0.999 quantile 133."""
    n = 100_000
    vocabulary = 150
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3))
    logits[64:128] = -torch.inf
    logits[100:102] = 1.0
    step = dataclasses.replace(repeated(n, PROBABILITIES), logits=logits.expand(n, -1))
    expected = n * torch.softmax(logits.double(), dim=-1)
    possible = expected > 0.0
    assert possible.sum() == 88

    draws = step.draws(2)
    for draw in (0, 1):
        counts = torch.bincount(draws[:, draw], minlength=vocabulary).double()
        assert len(counts) == vocabulary
        assert (counts[~possible] == 0.0).all()
        assert chi_squared(counts[possible], expected[possible]) < 133


def test_a_long_tail_is_drawn_as_often_as_it_should_be() -> None:
    """Half of the probability on one token, half on 50,000 others of which none may be left out."""
    n = 400
    vocabulary = 50_001
    logits = torch.full((n, vocabulary), 0.5 / (vocabulary - 1)).log()
    logits[:, 0] = math.log(0.5)
    draws = dataclasses.replace(repeated(n, PROBABILITIES), logits=logits).draws(1)

    standard_deviation = 0.5 / math.sqrt(n)
    assert (draws == 0).float().mean().item() == pytest.approx(0.5, abs=4 * standard_deviation)
    from_tail = draws[draws > 0]
    assert len(from_tail.unique()) > 0.95 * len(from_tail)
