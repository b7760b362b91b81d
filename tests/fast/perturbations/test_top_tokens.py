# SPDX-License-Identifier: Apache-2.0
"""The set of tokens that top-p leaves among the k likeliest: in the releases' order by default, or over all tokens."""

import dataclasses
import math
from typing import NamedTuple

import pytest
import torch

from perturbations.embeddings import matrix_embeddings
from perturbations.registry import create
from perturbations.step import Step
from perturbations.top_tokens import truncated, within_top_p
from tests.support.strategy_steps import PROBABILITIES, FixedNoise, approximately, only_proposal, step_of

NAMES = ("gumbel", "dirichlet", "normal", "lepo")
# The five hold .84 of the vocabulary: .24, .2, .18, .12, .1 and forty others of .004.
FIVE = [0.24, 0.20, 0.18, 0.12, 0.10] + [0.004] * 40


def tokens_with_weight(probabilities: list[float], **options: object) -> set[int]:
    """The tokens that a perturbation gives a weight other than 0."""
    proposed = only_proposal(create(**options).propose(step_of(probabilities)))
    return {token for token, weight in zip(proposed.ids, proposed.weights) if weight}


@pytest.mark.parametrize("name", NAMES)
def test_the_releases_cut_by_the_share_of_the_k_likeliest(name: str) -> None:
    """P = 8 : 4 : 2 of 16, k = 3, top-p .8: before the third token stand 12/14 = .857 of the three, so it is cut."""
    assert tokens_with_weight(PROBABILITIES, name=name, k=3, top_p=0.8) == {0, 1}


@pytest.mark.parametrize("name", NAMES)
def test_top_p_of_the_vocabulary_cuts_by_the_share_of_all_tokens(name: str) -> None:
    """Before the third token stand 12/16 = .75 of the vocabulary, so it stays."""
    options = {"k": 3, "top_p": 0.8, "top_p_of": "vocabulary"}
    assert tokens_with_weight(PROBABILITIES, name=name, **options) == {0, 1, 2}


def test_the_weights_are_of_the_tokens_left() -> None:
    """LEPO without noise at τ = 1, from FIVE: .24, .2, .18, .12 over .74."""
    step = step_of(FIVE, noise=[0.0] * 45)
    proposed = only_proposal(create("lepo", k=5, top_p=0.85, tau=1.0).propose(step))
    assert proposed.ids == [0, 1, 2, 3, 0]
    assert proposed.weights == approximately(0.24 / 0.74, 0.20 / 0.74, 0.18 / 0.74, 0.12 / 0.74, 0.0)
    assert proposed.token == 0


def test_the_weights_are_of_all_five_tokens_with_top_p_of_the_vocabulary() -> None:
    """LEPO without noise at τ = 1, from FIVE: all five, over .84."""
    step = step_of(FIVE, noise=[0.0] * 45)
    lepo = create("lepo", k=5, top_p=0.85, tau=1.0, top_p_of="vocabulary")
    proposed = only_proposal(lepo.propose(step))
    assert proposed.ids == [0, 1, 2, 3, 4]
    assert proposed.weights == approximately(*(p / 0.84 for p in FIVE[:5]))


@pytest.mark.parametrize("top_p", [0.95, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_a_token_that_is_not_possible_is_no_candidate(name: str, top_p: float) -> None:
    """A grammar leaves two of four tokens: a density would count the others, of logit -inf, as drawn and lost."""
    step = Step(**fields_of_step([math.log(3.0), 0.0, -math.inf, -math.inf]))
    ids, probabilities = create(name, k=4, top_p=top_p).top(step)
    assert ids.tolist() == [[0, 1, 0, 0]]
    assert probabilities[0].tolist() == approximately(0.75, 0.25, 0.0, 0.0)


# --- ties at the bound -----------------------------------------------------------------------------------------------

# A token is left out once those before it hold exactly top-p: shares that are exact in binary, and ``count`` tokens.
TIES = pytest.mark.parametrize(
    ("logits", "top_p", "count"),
    [
        pytest.param([0.0, 0.0], 0.5, 1, id="half of two"),
        pytest.param([0.0] * 4, 0.75, 3, id="three of four"),
        pytest.param([0.0] * 8, 0.125, 1, id="one of eight"),
        pytest.param([0.0] * 4, 0.75 + 1e-6, 4, id="a hair above the bound"),
        pytest.param([0.0] * 4, 0.75 - 1e-6, 3, id="a hair below the bound"),
        # .5, .25, .25: the third is cut at exactly .75.
        pytest.param([math.log(2.0), 0.0, 0.0], 0.75, 2, id="two unequal"),
        pytest.param([math.log(2.0), 0.0, 0.0], 0.5, 1, id="one unequal"),
    ],
)


def fields_of_step(logits: list[float]) -> dict[str, object]:
    """One position with these logits, in a model with one embedding dimension for each token."""
    zeros = torch.zeros(1, dtype=torch.int64)
    return dict(
        logits=torch.tensor([logits]),
        sampled=zeros,
        temperature=torch.ones(1),
        seeds=zeros,
        positions=zeros,
        embeddings=matrix_embeddings(torch.eye(len(logits))),
    )


@pytest.mark.parametrize("top_p_of", ["top_k", "vocabulary"])
@TIES
def test_exact_ties_at_the_bound(logits: list[float], top_p: float, count: int, top_p_of: str) -> None:
    """As the releases: SofT-GRPO's kernel and Hugging Face's warper keep the fewest tokens that hold top-p."""
    step = Step(**fields_of_step(logits))
    ids, probabilities = truncated(step, len(logits), top_p, top_p_of)
    assert int((probabilities > 0.0).sum()) == count
    expected = torch.softmax(torch.tensor(logits[:count]), dim=-1)
    assert probabilities[0, :count].tolist() == approximately(*expected.tolist())
    # In the place of a token that is left out the first one stands again, without a weight.
    assert (ids[0, count:] == ids[0, 0]).all()
    assert (probabilities[0, count:] == 0.0).all()


@TIES
def test_latent_s_nucleus_has_the_same_bound(logits: list[float], top_p: float, count: int) -> None:
    """Of the whole vocabulary, as in its release: with k = 1 a token takes part only within it."""
    vocabulary = len(logits)
    nucleus = torch.tensor(logits).topk(vocabulary).indices[:count].tolist()
    latent = create("latent", k=1, top_p=top_p)
    for token in range(vocabulary):
        favors_token = torch.full((1, vocabulary), -1.5)
        favors_token[0, token] = 1.5
        step = FixedNoise(**fields_of_step(logits))
        object.__setattr__(step, "noise", favors_token)
        is_chosen = latent.propose(step).tokens.item() == token
        assert is_chosen == (token in nucleus)


def test_the_bound_is_exact_among_tokens_that_a_float32_sum_would_lose() -> None:
    """One token of 1/2 and 4,096 of 2^-30 each: top-p = 1/2 + 1,000 · 2^-30 keeps 1,001 of them."""
    probabilities = torch.full((1, 4097), 2.0**-30)
    probabilities[0, 0] = 0.5
    assert within_top_p(probabilities, top_p=0.5 + 1000 * 2.0**-30).sum() == 1001


# --- SeLaR: the request's filters first ------------------------------------------------------------------------------


class SelarProposed(NamedTuple):
    ids: list[int]
    weights: list[float]
    token: int
    acts: bool


def selar(allowed: list[int] | None, filtered: bool = True) -> SelarProposed:
    """What SeLaR proposes for p = .5, .3, .2, of which the request allows the tokens ``allowed``; None: all."""
    step = step_of([0.5, 0.3, 0.2], sampled=1)
    drawable = None
    if allowed is not None:
        drawable = torch.full_like(step.logits, -torch.inf)
        drawable[:, allowed] = step.logits[:, allowed]
    perturbation = create("selar", filtered=filtered)
    proposal = perturbation.propose(dataclasses.replace(step, drawable=drawable))
    return SelarProposed(*only_proposal(proposal), acts=proposal.acts.item())


def test_selar_mixes_the_tokens_that_the_request_allows() -> None:
    """Two tokens are left: p = 5/8, 3/8; H = .661563 / ln 3 = .602181 ≥ τ.

    (1 + H) p, less H at the first: .399182, .600818.
    """
    proposed = selar(allowed=[0, 1])
    assert proposed.ids == [1, 0, 1, 0]
    assert proposed.weights == approximately(0.0, 0.399182, 0.600818, 0.0)
    assert proposed.token == 1
    assert proposed.acts


def test_selar_leaves_a_position_with_one_allowed_token_alone() -> None:
    """Of one token left H is 0, and the position is an ordinary one."""
    proposed = selar(allowed=[0])
    assert proposed.ids == [1, 0, 0, 0]
    assert proposed.weights == [1.0, 0.0, 0.0, 0.0]
    assert proposed.token == 1
    assert not proposed.acts


@pytest.mark.parametrize(
    ("allowed", "filtered"),
    [
        pytest.param(None, True, id="the request has no filter"),
        pytest.param([0, 1], False, id="as in the paper, filters do not count"),
    ],
)
def test_selar_mixes_all_tokens(allowed: list[int] | None, filtered: bool) -> None:
    proposed = selar(allowed, filtered)
    assert proposed.ids == [1, 0, 1, 2]
    assert proposed.weights == approximately(0.0, 0.031385, 0.581169, 0.387446)
    assert proposed.token == 1
    assert proposed.acts
