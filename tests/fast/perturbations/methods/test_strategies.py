# SPDX-License-Identifier: Apache-2.0
"""Each perturbation's formulas against numbers derived by hand from the papers (see the comments)."""

import math

import pytest
import torch

from perturbations import streams
from perturbations.edit import InputEdit, mix, realise
from perturbations.embeddings import ModelEmbeddings, matrix_embeddings
from perturbations.registry import create
from tests.support.strategy_steps import EMBEDDING, PROBABILITIES, approximately, gumbel, only_proposal, step_of

# --- none -----------------------------------------------------------------------------------------


def test_none_feeds_the_sampled_token() -> None:
    proposal = create("none").propose(step_of(PROBABILITIES, sampled=3))
    assert only_proposal(proposal) == ([3], [1.0], 3)
    assert realise(proposal.edit, matrix_embeddings(EMBEDDING).lookup, None).tolist() == [[0.0, 1.0]]


# --- neighbor: N-GRPO -----------------------------------------------------------------------------


def test_neighbor_paper() -> None:
    """Anchor 0, its set {0, 1, 2}: p = 8 : 4 : 2, renormalised 4/7, 2/7, 1/7.

    e' = 4/7 (1, 0) + 2/7 (4, 3) + 1/7 (6, 8) = ((4 + 8 + 6)/7, (6 + 8)/7) = (18/7, 2). The text: the anchor.
    """
    proposal = create("neighbor").propose(step_of(PROBABILITIES, sampled=3))
    ids, weights, token = only_proposal(proposal)
    assert (ids, token) == ([0, 1, 2], 0)
    assert weights == approximately(4 / 7, 2 / 7, 1 / 7)
    assert realise(proposal.edit, matrix_embeddings(EMBEDDING).lookup, None)[0].tolist() == approximately(18 / 7, 2.0)


@pytest.mark.parametrize(
    ("temperature", "shares"),
    [(0.5, (16, 4, 1)), (2.0, (2, math.sqrt(2), 1))],  # p^2 = 64 : 16 : 4; sqrt p = sqrt 8 : 2 : sqrt 2
)
def test_neighbor_mix_temperature(temperature: float, shares: tuple[float, ...]) -> None:
    _, weights, _ = only_proposal(create("neighbor", mix_temperature=temperature).propose(step_of(PROBABILITIES)))
    assert weights == approximately(*(s / sum(shares) for s in shares))


@pytest.mark.parametrize(
    ("metric", "ids"), [("cosine", [0, 1, 2]), ("dot", [0, 2, 1]), ("l2", [0, 3, 4]), ("l1", [0, 3, 4])]
)
def test_neighbor_metrics(metric: str, ids: list[int]) -> None:
    assert only_proposal(create("neighbor", metric=metric).propose(step_of(PROBABILITIES)))[0] == ids


OUTPUT = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.5, 0.5], [2.0, 0.1]])


def two_spaces() -> ModelEmbeddings:
    """Input embeddings E; output embeddings in which token 0 is nearest to 4, then 3."""
    return ModelEmbeddings(lambda ids: EMBEDDING[ids], lambda: EMBEDDING, lambda: OUTPUT)


def test_neighbor_released() -> None:
    """p_0 - p_4 = 1/2 - 1/4; at temperature (1/4) / ln 2 the scores p / T differ by ln 2: weights 2/3, 1/3.

    Neighbors by the output embeddings, the sampled token in the text, the input embeddings in the mixture:
    e' = 2/3 (1, 0) + 1/3 (-1, 0) = (1/3, 0).
    """
    p = [1 / 2, 1 / 16, 1 / 8, 1 / 16, 1 / 4]
    step = step_of(p, sampled=3, temperature=0.25 / math.log(2), embeddings=two_spaces())
    proposal = create("neighbor", variant="released", k=2).propose(step)
    ids, weights, token = only_proposal(proposal)
    assert (ids, token) == ([0, 4], 3)
    assert weights == approximately(2 / 3, 1 / 3)
    assert realise(proposal.edit, two_spaces().lookup, None)[0].tolist() == approximately(1 / 3, 0.0)


@pytest.mark.parametrize("weights", ["logits", "probs"])
@pytest.mark.parametrize("realization", ["anchor", "sampled"])
@pytest.mark.parametrize("space", ["input", "output"])
def test_neighbor_parts_are_independent(weights: str, realization: str, space: str) -> None:
    """k = 2, T = 1: the neighbor is 1 by input, 4 by output; both have p = 1/4 against the anchor's 1/2.

    From logits: 2/3, 1/3. From probabilities: e^(1/4) : 1.
    """
    p = [1 / 2, 1 / 4, 0.0, 0.0, 1 / 4]
    perturbation = create("neighbor", k=2, weights=weights, realization=realization, space=space)
    ids, got, token = only_proposal(perturbation.propose(step_of(p, sampled=1, embeddings=two_spaces())))
    anchor = 2 / 3 if weights == "logits" else math.exp(0.25) / (math.exp(0.25) + 1)
    assert ids == [0, 1 if space == "input" else 4]
    assert got == approximately(anchor, 1 - anchor)
    assert token == (0 if realization == "anchor" else 1)


def test_neighbor_skips_special_tokens_only_if_asked() -> None:
    step = step_of(PROBABILITIES, embeddings=matrix_embeddings(EMBEDDING, special_ids=[1]))
    assert only_proposal(create("neighbor").propose(step))[0] == [0, 1, 2]
    ids, weights, _ = only_proposal(create("neighbor", skip_special=True).propose(step))
    assert ids == [0, 2, 3] and weights == approximately(8 / 11, 2 / 11, 1 / 11)


# --- gaussian: STHT -------------------------------------------------------------------------------

# The squares sum to 4 + 4 + 8 + 16 = 32 over 8 elements: the root-mean-square element is 2.
RMS2 = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [0.0, 4.0]])
Q = [4 / 8, 2 / 8, 1 / 8, 1 / 8]


def gaussian(temperature: float = 1.0, **options: object) -> tuple[list[int], list[float], int, float]:
    perturbation = create("gaussian", **options)
    proposal = perturbation.propose(step_of(Q, 3, temperature, matrix_embeddings(RMS2)))
    return (*only_proposal(proposal), proposal.edit.sigma.item())


def test_gaussian_on_the_token_or_on_the_argmax() -> None:
    assert gaussian(base="token") == ([3], [1.0], 3, pytest.approx(0.66))
    assert gaussian(base="fuzzy", sigma=0.5) == ([0], [1.0], 0, pytest.approx(1.0))


def test_gaussian_soft() -> None:
    """softmax(z / 0.5) over the two likeliest: p^2 = 16 : 4, so 4/5 and 1/5; the text has the sampled one.

    With T = 0.5 the step has z / T, which is already z / τ for τ = 0.5: p itself, 2/3 and 1/3.
    """
    assert gaussian(base="soft", k=2) == ([0, 1], approximately(4 / 5, 1 / 5), 3, pytest.approx(0.66))
    assert gaussian(base="soft", k=2, tau=1.0)[1] == approximately(2 / 3, 1 / 3)
    assert gaussian(0.5, base="soft", k=2)[1] == approximately(2 / 3, 1 / 3)
    assert gaussian(2.0, base="soft", k=2)[1] == approximately(16 / 17, 1 / 17)  # p^(2/0.5) = 4^4 : 2^4


@pytest.mark.parametrize(
    ("options", "rms"),
    [
        (dict(base="token"), math.sqrt(8)),  # (0, 4)
        (dict(base="fuzzy"), math.sqrt(2)),  # (2, 0)
        (dict(base="soft", k=2, tau=1.0), math.sqrt(10 / 9)),  # 2/3 (2, 0) + 1/3 (0, 2) = (4/3, 2/3)
    ],
)
def test_gaussian_sigma_of_the_vector_at_hand(options: dict, rms: float) -> None:
    assert gaussian(sigma_of="vector", **options)[3] == pytest.approx(0.33 * rms, rel=1e-6)


# --- soft: Soft Thinking --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        (dict(k=3, top_p=1.0), [4 / 7, 2 / 7, 1 / 7]),
        (dict(k=3, top_p=0.6), [2 / 3, 1 / 3, 0.0]),  # 1/2 is less than 0.6, 3/4 is not
        (dict(k=2, top_p=0.95), [2 / 3, 1 / 3]),
    ],
)
def test_soft(options: dict, weights: list[float]) -> None:
    ids, got, token = only_proposal(create("soft", **options).propose(step_of(PROBABILITIES, sampled=4)))
    # In the place of a token that top-p cuts the first one stands again.
    assert ids == [i if w else 0 for i, w in enumerate(weights)]
    assert got == approximately(*weights)
    assert token == 4


# --- gumbel: SofT-GRPO ----------------------------------------------------------------------------


def test_gumbel_weights_and_token() -> None:
    """p = 4/7, 2/7, 1/7, g = 0, ln 4, ln 2, τ_g = 1: weights as p e^g = 4 : 8 : 2. Text: the largest."""
    ids, weights, token = gumbel(PROBABILITIES, [0.0, math.log(4), math.log(2)], k=3, top_p=1.0, tau=1.0)
    assert (ids, token) == ([0, 1, 2], 1)
    assert weights == pytest.approx([2 / 7, 4 / 7, 1 / 7], abs=1e-5)  # 1e-6 inside the logarithm


def test_gumbel_noise_is_clamped() -> None:
    """g = 5, -9, 0 becomes 3, -1.5, 0: weights as 4 e^3 : 2 e^-1.5 : 1; unclamped 4 e^5 : 2 e^-9 : 1."""
    for clamp, noise in ((True, [3.0, -1.5, 0.0]), (False, [5.0, -9.0, 0.0])):
        shares = [p * math.exp(g) for p, g in zip((4, 2, 1), noise)]
        got = gumbel(PROBABILITIES, [5.0, -9.0, 0.0], k=3, top_p=1.0, tau=1.0, clamp=clamp)[1]
        assert got == pytest.approx([s / sum(shares) for s in shares], rel=1e-3)


def test_gumbel_floor_inside_the_logarithm() -> None:
    """p_1 = 1e-9, g = -1.5 and 3, τ_g = 1: weight (1e-9 + 1e-6) e^4.5 = 9.01e-5 of p_0's; 9e-8 without."""
    ids, weights, _ = gumbel([1.0, 1e-9, 0.0, 0.0, 0.0], [-1.5, 3.0], k=2, top_p=1.0, tau=1.0)
    assert ids == [0, 1]
    assert weights[1] == pytest.approx(1.001e-6 * math.exp(4.5), rel=1e-3)


# --- the universal form ---------------------------------------------------------------------------


def test_mix_by_hand_with_gradient() -> None:
    """1/4 (4, 8) + 3/4 (0, 4) = (1, 5); the gradient to a candidate is its weight."""
    vectors = torch.tensor([[[4.0, 8.0], [0.0, 4.0]]], dtype=torch.bfloat16, requires_grad=True)
    mixed = mix(vectors, InputEdit(torch.tensor([[0, 1]]), torch.tensor([[0.25, 0.75]])), None)
    assert mixed.dtype == torch.bfloat16 and mixed.tolist() == [[1.0, 5.0]]
    mixed.sum().backward()
    assert vectors.grad.tolist() == [[[0.25, 0.25], [0.75, 0.75]]]


def test_mix_rounds_once_at_the_end() -> None:
    """In bfloat16: neither the weights nor the products are rounded, only the sum."""
    generator = torch.Generator().manual_seed(8)
    vectors = torch.randn(100, 3, 32, generator=generator).bfloat16()
    weights = torch.softmax(torch.randn(100, 3, generator=generator), dim=-1)
    want = (vectors.double() * weights.double().unsqueeze(-1)).sum(dim=1).bfloat16()
    edit = InputEdit(torch.zeros(100, 3, dtype=torch.int64), weights)
    assert (mix(vectors, edit, None) == want).double().mean() > 0.999  # sums near a midpoint aside


def test_mix_adds_scaled_noise() -> None:
    keys = streams.keys(torch.tensor([3]), torch.tensor([4]), streams.Stream.NOISE)
    edit = InputEdit(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), torch.tensor([0.5]))
    mixed = mix(torch.ones(1, 1, 6), edit, keys)
    assert torch.allclose(mixed, 1.0 + 0.5 * streams.normal(keys, 6))


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
