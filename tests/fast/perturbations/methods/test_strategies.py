# SPDX-License-Identifier: Apache-2.0
"""Each perturbation's formulas against numbers derived by hand from the papers (see the comments)."""

import math
from typing import NamedTuple

import pytest
import torch

from perturbations import streams
from perturbations.edit import InputEdit, mix
from perturbations.embeddings import ModelEmbeddings, matrix_embeddings
from perturbations.registry import create
from tests.support.strategy_steps import (
    EMBEDDING,
    PROBABILITIES,
    approximately,
    gumbel,
    normalised,
    only_input,
    only_proposal,
    step_of,
)

# --- none -----------------------------------------------------------------------------------------


def test_none_feeds_the_sampled_token() -> None:
    proposal = create("none").propose(step_of(PROBABILITIES, sampled=3))
    assert only_proposal(proposal) == ([3], [1.0], 3)
    assert only_input(proposal, matrix_embeddings(EMBEDDING)) == [0.0, 1.0]


# --- neighbor: N-GRPO -----------------------------------------------------------------------------


def test_neighbor_paper() -> None:
    """The paper's variant mixes the likeliest token, its anchor, with its nearest neighbors, and writes the anchor.

    The anchor is 0, its set {0, 1, 2}: p = 8 : 4 : 2, renormalised 4/7, 2/7, 1/7.
    e' = 4/7 (1, 0) + 2/7 (4, 3) + 1/7 (6, 8) = ((4 + 8 + 6)/7, (6 + 8)/7) = (18/7, 2).
    """
    proposal = create("neighbor").propose(step_of(PROBABILITIES, sampled=3))
    proposed = only_proposal(proposal)
    assert proposed.ids == [0, 1, 2]
    assert proposed.weights == approximately(4 / 7, 2 / 7, 1 / 7)
    assert proposed.token == 0
    assert only_input(proposal, matrix_embeddings(EMBEDDING)) == approximately(18 / 7, 2.0)


@pytest.mark.parametrize(
    ("temperature", "shares"),
    [
        # p^2 = 64 : 16 : 4.
        pytest.param(0.5, [16, 4, 1], id="below one"),
        # sqrt p = sqrt 8 : 2 : sqrt 2.
        pytest.param(2.0, [2, math.sqrt(2), 1], id="above one"),
    ],
)
def test_neighbor_mix_temperature_is_a_power_of_the_probabilities(temperature: float, shares: list[float]) -> None:
    neighbor = create("neighbor", mix_temperature=temperature)
    proposed = only_proposal(neighbor.propose(step_of(PROBABILITIES)))
    assert proposed.weights == approximately(*normalised(shares))


@pytest.mark.parametrize(
    ("metric", "neighbors"),
    [
        ("cosine", [1, 2]),
        ("dot", [2, 1]),
        ("l2", [3, 4]),
        ("l1", [3, 4]),
    ],
)
def test_neighbor_metric_chooses_the_neighbors(metric: str, neighbors: list[int]) -> None:
    proposed = only_proposal(create("neighbor", metric=metric).propose(step_of(PROBABILITIES)))
    assert proposed.ids == [0, *neighbors]


OUTPUT = torch.tensor(
    [
        [1.0, 0.0],
        [0.0, 1.0],
        [-1.0, 0.0],
        [0.5, 0.5],
        [2.0, 0.1],
    ]
)


def two_spaces() -> ModelEmbeddings:
    """Input embeddings E; output embeddings in which token 0 is nearest to 4, then 3."""
    return ModelEmbeddings(lambda ids: EMBEDDING[ids], lambda: EMBEDDING, lambda: OUTPUT)


def test_neighbor_released() -> None:
    """The released code takes neighbors by output embeddings, mixes input embeddings and writes the sampled token.

    p_0 - p_4 = 1/2 - 1/4; at temperature (1/4) / ln 2 the scores p / T differ by ln 2: weights 2/3, 1/3.
    e' = 2/3 (1, 0) + 1/3 (-1, 0) = (1/3, 0).
    """
    step = step_of(
        [1 / 2, 1 / 16, 1 / 8, 1 / 16, 1 / 4],
        sampled=3,
        temperature=0.25 / math.log(2),
        embeddings=two_spaces(),
    )
    proposal = create("neighbor", variant="released", k=2).propose(step)
    proposed = only_proposal(proposal)
    assert proposed.ids == [0, 4]
    assert proposed.weights == approximately(2 / 3, 1 / 3)
    assert proposed.token == 3
    assert only_input(proposal, two_spaces()) == approximately(1 / 3, 0.0)


@pytest.mark.parametrize(
    ("weights", "anchor_weight"),
    [
        # The neighbor has p = 1/4 against the anchor's 1/2, which gives 2/3, 1/3 from logits.
        pytest.param("logits", 2 / 3, id="logits"),
        # The same probabilities as scores: e^(1/2) : e^(1/4) = 1 : e^(-1/4).
        pytest.param("probs", 1 / (1 + math.exp(-0.25)), id="probs"),
    ],
)
@pytest.mark.parametrize(("realization", "token"), [("anchor", 0), ("sampled", 1)])
@pytest.mark.parametrize(("space", "neighbor"), [("input", 1), ("output", 4)])
def test_neighbor_parts_are_independent(
    weights: str, anchor_weight: float, realization: str, token: int, space: str, neighbor: int
) -> None:
    """Space, weights and the token in the text are chosen separately; k = 2, T = 1."""
    perturbation = create("neighbor", k=2, weights=weights, realization=realization, space=space)
    probabilities = [1 / 2, 1 / 4, 0.0, 0.0, 1 / 4]
    step = step_of(probabilities, sampled=1, embeddings=two_spaces())
    proposed = only_proposal(perturbation.propose(step))
    assert proposed.ids == [0, neighbor]
    assert proposed.weights == approximately(anchor_weight, 1 - anchor_weight)
    assert proposed.token == token


def test_neighbor_mixes_special_tokens_by_default() -> None:
    step = step_of(PROBABILITIES, embeddings=matrix_embeddings(EMBEDDING, special_ids=[1]))
    assert only_proposal(create("neighbor").propose(step)).ids == [0, 1, 2]


def test_neighbor_skips_special_tokens_with_skip_special() -> None:
    """Without token 1 the next neighbor is 3: p = 8 : 2 : 1."""
    step = step_of(PROBABILITIES, embeddings=matrix_embeddings(EMBEDDING, special_ids=[1]))
    proposed = only_proposal(create("neighbor", skip_special=True).propose(step))
    assert proposed.ids == [0, 2, 3]
    assert proposed.weights == approximately(8 / 11, 2 / 11, 1 / 11)


# --- gaussian: STHT -------------------------------------------------------------------------------

# The squares sum to 4 + 4 + 8 + 16 = 32 over 8 elements: the root-mean-square element is 2.
RMS2 = torch.tensor(
    [
        [2.0, 0.0],
        [0.0, 2.0],
        [2.0, 2.0],
        [0.0, 4.0],
    ]
)
Q = [4 / 8, 2 / 8, 1 / 8, 1 / 8]


class GaussianProposed(NamedTuple):
    ids: list[int]
    weights: list[float]
    token: int
    sigma: float


def gaussian(temperature: float = 1.0, **options: object) -> GaussianProposed:
    """What ``gaussian`` proposes with the probabilities Q and the embedding RMS2, where token 3 was sampled."""
    step = step_of(Q, sampled=3, temperature=temperature, embeddings=matrix_embeddings(RMS2))
    proposal = create("gaussian", **options).propose(step)
    return GaussianProposed(*only_proposal(proposal), sigma=proposal.edit.sigma.item())


def test_gaussian_on_the_sampled_token() -> None:
    """σ = 0.33 times the root-mean-square element, 2."""
    proposed = gaussian(base="token")
    assert proposed.ids == [3]
    assert proposed.weights == [1.0]
    assert proposed.token == 3
    assert proposed.sigma == pytest.approx(0.66)


def test_gaussian_on_the_likeliest_token() -> None:
    """σ = 0.5 · 2."""
    proposed = gaussian(base="fuzzy", sigma=0.5)
    assert proposed.ids == [0]
    assert proposed.weights == [1.0]
    assert proposed.token == 0
    assert proposed.sigma == pytest.approx(1.0)


def test_gaussian_on_the_soft_mixture() -> None:
    """softmax(z / 0.5) over the two likeliest: p^2 = 16 : 4, so 4/5 and 1/5; the text has the sampled token."""
    proposed = gaussian(base="soft", k=2)
    assert proposed.ids == [0, 1]
    assert proposed.weights == approximately(4 / 5, 1 / 5)
    assert proposed.token == 3
    assert proposed.sigma == pytest.approx(0.66)


@pytest.mark.parametrize(
    ("temperature", "tau", "shares"),
    [
        # At τ = 1 the weights are p itself.
        pytest.param(1.0, 1.0, [2, 1], id="tau of one"),
        # With T = 0.5 the step has z / T, which is already z / τ for τ = 0.5: p itself.
        pytest.param(0.5, None, [2, 1], id="temperature equals tau"),
        # p^(2/0.5) = 4^4 : 2^4.
        pytest.param(2.0, None, [16, 1], id="temperature above tau"),
    ],
)
def test_gaussian_soft_mixture_is_of_the_untempered_logits(
    temperature: float, tau: float | None, shares: list[float]
) -> None:
    """None: the default of τ, 0.5."""
    options = {} if tau is None else {"tau": tau}
    proposed = gaussian(temperature, base="soft", k=2, **options)
    assert proposed.weights == approximately(*normalised(shares))


@pytest.mark.parametrize(
    ("options", "rms"),
    [
        # The vector is (0, 4).
        pytest.param(dict(base="token"), math.sqrt(8), id="token"),
        # The vector is (2, 0).
        pytest.param(dict(base="fuzzy"), math.sqrt(2), id="fuzzy"),
        # 2/3 (2, 0) + 1/3 (0, 2) = (4/3, 2/3).
        pytest.param(
            dict(base="soft", k=2, tau=1.0),
            math.sqrt(10 / 9),
            id="soft",
        ),
    ],
)
def test_gaussian_sigma_of_the_vector_at_hand(options: dict, rms: float) -> None:
    assert gaussian(sigma_of="vector", **options).sigma == pytest.approx(0.33 * rms, rel=1e-6)


# --- soft: Soft Thinking --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "top_p", "ids", "shares"),
    [
        pytest.param(3, 1.0, [0, 1, 2], [4, 2, 1], id="no cut"),
        # 1/2 is less than 0.6, 3/4 is not: the third token is cut, and the first one stands again in its place.
        pytest.param(3, 0.6, [0, 1, 0], [2, 1, 0], id="cut by top-p"),
        pytest.param(2, 0.95, [0, 1], [2, 1], id="cut by k"),
    ],
)
def test_soft_mixes_the_likeliest_tokens(k: int, top_p: float, ids: list[int], shares: list[float]) -> None:
    soft = create("soft", k=k, top_p=top_p)
    proposed = only_proposal(soft.propose(step_of(PROBABILITIES, sampled=4)))
    assert proposed.ids == ids
    assert proposed.weights == approximately(*normalised(shares))
    assert proposed.token == 4


# --- gumbel: SofT-GRPO ----------------------------------------------------------------------------


def test_gumbel_weights_and_token() -> None:
    """p = 4/7, 2/7, 1/7, g = 0, ln 4, ln 2, τ_g = 1: weights as p e^g = 4 : 8 : 2. Text: the largest."""
    noise = [0.0, math.log(4), math.log(2)]
    proposed = gumbel(PROBABILITIES, noise, k=3, top_p=1.0, tau=1.0)
    assert proposed.ids == [0, 1, 2]
    assert proposed.weights == pytest.approx([2 / 7, 4 / 7, 1 / 7], abs=1e-5)  # 1e-6 inside the logarithm
    assert proposed.token == 1


@pytest.mark.parametrize(
    ("clamp", "used_noise"),
    [
        pytest.param(True, [3.0, -1.5, 0.0], id="clamped"),
        pytest.param(False, [5.0, -9.0, 0.0], id="unclamped"),
    ],
)
def test_gumbel_noise_is_clamped(clamp: bool, used_noise: list[float]) -> None:
    """g = 5, -9, 0 becomes 3, -1.5, 0: weights as 4 e^3 : 2 e^-1.5 : 1; unclamped 4 e^5 : 2 e^-9 : 1."""
    shares = [
        4 * math.exp(used_noise[0]),
        2 * math.exp(used_noise[1]),
        1 * math.exp(used_noise[2]),
    ]
    drawn_noise = [5.0, -9.0, 0.0]
    proposed = gumbel(PROBABILITIES, drawn_noise, k=3, top_p=1.0, tau=1.0, clamp=clamp)
    assert proposed.weights == pytest.approx(normalised(shares), rel=1e-3)


def test_gumbel_floor_inside_the_logarithm() -> None:
    """p_1 = 1e-9, g = -1.5 and 3, τ_g = 1: weight (1e-9 + 1e-6) e^4.5 = 9.01e-5 of p_0's; 9e-8 without."""
    probabilities = [1.0, 1e-9, 0.0, 0.0, 0.0]
    noise = [-1.5, 3.0]
    proposed = gumbel(probabilities, noise, k=2, top_p=1.0, tau=1.0)
    assert proposed.ids == [0, 1]
    assert proposed.weights[1] == pytest.approx(1.001e-6 * math.exp(4.5), rel=1e-3)


# --- the universal form ---------------------------------------------------------------------------


def test_mix_by_hand_with_gradient() -> None:
    """1/4 (4, 8) + 3/4 (0, 4) = (1, 5); the gradient to a candidate is its weight."""
    candidates = [[4.0, 8.0], [0.0, 4.0]]
    vectors = torch.tensor([candidates], dtype=torch.bfloat16, requires_grad=True)
    edit = InputEdit(
        ids=torch.tensor([[0, 1]]),
        weights=torch.tensor([[0.25, 0.75]]),
    )
    mixed = mix(vectors, edit, None)
    assert mixed.dtype == torch.bfloat16
    assert mixed.tolist() == [[1.0, 5.0]]
    mixed.sum().backward()
    assert vectors.grad.tolist() == [[[0.25, 0.25], [0.75, 0.75]]]


def test_mix_rounds_once_at_the_end() -> None:
    """In bfloat16: neither the weights nor the products are rounded, only the sum."""
    generator = torch.Generator().manual_seed(8)
    vectors = torch.randn(100, 3, 32, generator=generator).bfloat16()
    weights = torch.softmax(torch.randn(100, 3, generator=generator), dim=-1)
    exact = (vectors.double() * weights.double().unsqueeze(-1)).sum(dim=1)
    edit = InputEdit(ids=torch.zeros(100, 3, dtype=torch.int64), weights=weights)
    mixed = mix(vectors, edit, None)
    share_equal = (mixed == exact.bfloat16()).double().mean()
    assert share_equal > 0.999  # sums near a midpoint aside


def test_mix_adds_scaled_noise() -> None:
    """The vector is 1 everywhere, σ = 0.5."""
    keys = streams.keys(torch.tensor([3]), torch.tensor([4]), streams.Stream.NOISE)
    edit = InputEdit(
        ids=torch.zeros(1, 1, dtype=torch.int64),
        weights=torch.ones(1, 1),
        sigma=torch.tensor([0.5]),
    )
    mixed = mix(torch.ones(1, 1, 6), edit, keys)
    assert torch.allclose(mixed, 1.0 + 0.5 * streams.normal(keys, 6))


# --- dirichlet and normal: the other noises of SofT-GRPO's release ---------------------------------


def test_dirichlet_weights_are_normalised_gamma_draws() -> None:
    """γ = 1, 2, 1 drawn with shapes α p = 2 (4/7, 2/7, 1/7): weights 1/4, 1/2, 1/4; the text takes the largest."""
    step = step_of(PROBABILITIES, noise=[0.0, math.log(2), 0.0])
    proposal = create("dirichlet", k=3, top_p=1.0, alpha=2.0, density="dirichlet").propose(step)
    proposed = only_proposal(proposal)
    assert proposed.ids == [0, 1, 2]
    assert proposed.weights == approximately(1 / 4, 1 / 2, 1 / 4)
    assert proposed.token == 1
    assert step.shape[0].tolist() == approximately(8 / 7, 4 / 7, 2 / 7)
    assert proposal.edit.normalizer.tolist() == approximately(math.log(4))


def test_normal_scales_the_probabilities() -> None:
    """p = 2/3, 1/3 and ε = 1, -2: y = 43/60, 14/60, sum 57/60: weights 43/57, 14/57."""
    step = step_of(PROBABILITIES, noise=[1.0, -2.0])
    proposal = create("normal", k=2, density="normal").propose(step)
    proposed = only_proposal(proposal)
    assert proposed.ids == [0, 1]
    assert proposed.weights == approximately(43 / 57, 14 / 57)
    assert proposed.token == 0
    assert proposal.edit.normalizer is None  # the noise is drawn again from its keys


def test_normal_weights_may_be_negative_and_the_text_may_change() -> None:
    """p = 0.5, 0.46, 0.04 and ε = -1, 1, -2: y = 0.45, 0.51, -0.06, sum 0.9."""
    probabilities = [0.5, 0.46, 0.04, 0.0, 0.0]
    step = step_of(probabilities, noise=[-1.0, 1.0, -2.0])
    proposed = only_proposal(create("normal", k=3, top_p=1.0).propose(step))
    assert proposed.ids == [0, 1, 2]
    assert proposed.weights == approximately(0.45 / 0.9, 0.51 / 0.9, -0.06 / 0.9)
    assert proposed.token == 1


# --- orthogonal: a baseline of N-GRPO's release ----------------------------------------------------

ORTHOGONAL_EMBEDDING = torch.tensor(
    [
        [2.0, 0.0],
        [3.0, 4.0],
        [-2.0, 1.0],
        [7.0, 7.0],
    ]
)


@pytest.mark.parametrize(("realization", "token"), [("sampled", 3), ("anchor", 0)])
def test_orthogonal_adds_noise_orthogonal_to_the_anchor(realization: str, token: int) -> None:
    """Anchor (2, 0); o_1 = (3, 4) - 6/4 (2, 0) = (0, 4), o_2 = (-2, 1) + (2, 0) = (0, 1); w = 3/4, 1/4; ε = 1, -2.

    n_j = ε_j w_j ‖o_j‖ = 3, -1/2 along (0, 1): e' = (2, 5/2). As a mixture: 3/4 of c_1, -1/2 of c_2, and of the
    anchor 1 - (3/4 · 3/2 + 1/2) = -5/8.
    """
    embeddings = matrix_embeddings(ORTHOGONAL_EMBEDDING)
    probabilities = [4 / 8, 3 / 8, 1 / 8, 0.0]
    step = step_of(probabilities, embeddings=embeddings, noise=[9.0, 1.0, -2.0])
    proposal = create("orthogonal", k=3, realization=realization).propose(step)
    proposed = only_proposal(proposal)
    assert proposed.ids == [0, 1, 2]
    assert proposed.weights == approximately(-5 / 8, 3 / 4, -1 / 2)
    assert proposed.token == token
    assert only_input(proposal, embeddings) == approximately(2.0, 2.5)
