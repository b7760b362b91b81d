# SPDX-License-Identifier: Apache-2.0
"""The set of tokens that top-p leaves among the k likeliest: in the releases' order by default, or over all tokens."""

import math

import pytest
import torch
from torch import Tensor

from perturbations.embeddings import matrix_embeddings
from perturbations.registry import create
from perturbations.step import Step
from perturbations.top_tokens import truncated
from tests.support.strategy_steps import PROBABILITIES, FixedNoise, approximately, only_proposal, step_of

NAMES = ("gumbel", "dirichlet", "normal", "lepo")
# The five hold .84 of the vocabulary: .24, .2, .18, .12, .1 and forty others of .004.
FIVE = [0.24, 0.20, 0.18, 0.12, 0.10] + [0.004] * 40


def kept(probabilities: list[float], **options: object) -> set[int]:
    """The tokens with a weight."""
    ids, weights, _ = only_proposal(create(**options).propose(step_of(probabilities)))
    return {token for token, weight in zip(ids, weights) if weight}


@pytest.mark.parametrize("name", NAMES)
def test_the_releases_cut_by_the_share_of_the_k_likeliest(name: str) -> None:
    """P = 8 : 4 : 2 of 16, k = 3, top-p .8: before the third token stand 12/14 = .857 of the three, so it is cut; of
    the vocabulary 12/16 = .75, so it stays."""
    assert kept(PROBABILITIES, name=name, k=3, top_p=0.8) == {0, 1}
    assert kept(PROBABILITIES, name=name, k=3, top_p=0.8, top_p_of="vocabulary") == {0, 1, 2}


def test_the_weights_are_of_the_tokens_left() -> None:
    """LEPO without noise at τ = 1, from FIVE: .24, .2, .18, .12 over .74."""
    step = step_of(FIVE, noise=[0.0] * 45)
    ids, weights, token = only_proposal(create("lepo", k=5, top_p=0.85, tau=1.0).propose(step))
    assert (ids, token) == ([0, 1, 2, 3, 0], 0)
    assert weights == approximately(0.24 / 0.74, 0.20 / 0.74, 0.18 / 0.74, 0.12 / 0.74, 0.0)
    # Of the vocabulary: all five, over .84.
    ids, weights, _ = only_proposal(create("lepo", k=5, top_p=0.85, tau=1.0, top_p_of="vocabulary").propose(step))
    assert ids == [0, 1, 2, 3, 4] and weights == approximately(*(p / 0.84 for p in FIVE[:5]))


# --- ties at the bound -----------------------------------------------------------------------------------------------

TIES = [
    # Equal shares, exact in binary: a token is left out once those before it hold exactly top-p.
    ([0.0, 0.0], 0.5, 1),
    ([0.0] * 4, 0.75, 3),
    ([0.0] * 8, 0.125, 1),
    # A hair to either side of the bound.
    ([0.0] * 4, 0.75 + 1e-6, 4),
    ([0.0] * 4, 0.75 - 1e-6, 3),
    # .5, .25, .25: the third is cut at exactly .75.
    ([math.log(2.0), 0.0, 0.0], 0.75, 2),
    ([math.log(2.0), 0.0, 0.0], 0.5, 1),
]


@pytest.mark.parametrize("top_p_of", ["top_k", "vocabulary"])
@pytest.mark.parametrize(("logits", "top_p", "count"), TIES)
def test_exact_ties_at_the_bound(logits: list[float], top_p: float, count: int, top_p_of: str) -> None:
    """As the releases: SofT-GRPO's kernel and Hugging Face's warper keep the fewest tokens that hold top-p."""
    z, zeros = torch.tensor([logits]), torch.zeros(1, dtype=torch.int64)
    step = Step(z, zeros, torch.ones(1), zeros, zeros, matrix_embeddings(torch.eye(len(logits))))
    ids, p = truncated(step, len(logits), top_p, top_p_of)
    assert int((p > 0.0).sum()) == count
    assert p[0, :count].tolist() == approximately(*(torch.softmax(z[0, :count], dim=-1).tolist()))
    assert (ids[0, count:] == ids[0, 0]).all() and (p[0, count:] == 0.0).all()


@pytest.mark.parametrize(("logits", "top_p", "count"), TIES)
def test_latent_s_nucleus_has_the_same_bound(logits: list[float], top_p: float, count: int) -> None:
    """Of the whole vocabulary, as in its release: with k = 1 a token takes part only within it."""
    z, zeros, one = torch.tensor([logits]), torch.zeros(1, dtype=torch.int64), torch.eye(len(logits))
    nucleus = z.topk(len(logits)).indices[0, :count].tolist()
    for token in range(len(logits)):
        step = FixedNoise(z, zeros, torch.ones(1), zeros, zeros, matrix_embeddings(one))
        object.__setattr__(step, "noise", 3.0 * one[token : token + 1] - 1.5)
        chosen = create("latent", k=1, top_p=top_p).propose(step).tokens.item()
        assert (chosen == token) == (token in nucleus)


# --- SeLaR: the request's filters first ------------------------------------------------------------------------------


def test_selar_after_the_request_s_filters() -> None:
    """p = .5, .3, .2 of which the request left the first two: p = 5/8, 3/8; H = .661563 / ln 3 = .602181 ≥ τ.

    (1 + H) p, less H at the first: .399182, .600818. Of one token left H is 0, and the position is an ordinary one.
    """
    step = step_of([0.5, 0.3, 0.2], sampled=1)
    two, one = step.logits.clone(), step.logits.clone()
    two[:, 2], one[:, 1:] = -torch.inf, -torch.inf

    def proposed(drawable: Tensor | None, filtered: bool = True) -> tuple:
        whole = Step(**{**vars(step), "drawable": drawable})
        proposal = create("selar", filtered=filtered).propose(whole)
        return (*only_proposal(proposal), proposal.acts.item())

    assert proposed(two) == ([1, 0, 1, 0], approximately(0.0, 0.399182, 0.600818, 0.0), 1, True)
    assert proposed(one) == ([1, 0, 0, 0], [1.0, 0.0, 0.0, 0.0], 1, False)
    plain = ([1, 0, 1, 2], approximately(0.0, 0.031385, 0.581169, 0.387446), 1, True)
    assert proposed(None) == plain and proposed(two, filtered=False) == plain, "the paper's own"
