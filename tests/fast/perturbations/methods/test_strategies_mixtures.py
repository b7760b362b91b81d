# SPDX-License-Identifier: Apache-2.0
"""Multiplex, Mixture of Inputs, SeLaR, LEPO and Latent-GRPO against numbers derived by hand (see the comments)."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from perturbations.base import Replayed, Step
from perturbations.edit import InputEdit
from perturbations.embeddings import matrix_embeddings
from perturbations.errors import UsageError
from perturbations.registry import create, create_gate
from perturbations.step import Positions
from tests.support.strategy_steps import EMBEDDING, PROBABILITIES, approximately, only_proposal, repeated, step_of


class GivenDraws(Step):
    """A step whose further draws are given."""

    def draws(self, n: int, distinct: bool = False) -> Tensor:
        return torch.tensor([self.given[:n]])


def drawn(probabilities: list[float], first: int, *others: int) -> Step:
    logits = torch.tensor([probabilities]).log() - 1.5
    rest = (torch.tensor([first]), torch.ones(1), torch.tensor([7]), torch.tensor([11]), matrix_embeddings(EMBEDDING))
    step = GivenDraws(logits, *rest)
    object.__setattr__(step, "given", list(others))
    return step


def by_token(ids: list[int], weights: list[float]) -> dict[int, float]:
    """The weight of each token, summed over the places where it stands."""
    total: dict[int, float] = {}
    for token, weight in zip(ids, weights):
        total[token] = total.get(token, 0.0) + weight
    return {token: weight for token, weight in total.items() if weight}


def replayed(edit: InputEdit, token: int, probabilities: list[float], temperature: float = 1.0) -> Replayed:
    """One position in the second of two rows, of a policy with these probabilities at temperature 1."""
    z = torch.tensor([[1.0] * len(probabilities), probabilities]).log() / temperature + 0.7
    log_probs = torch.log_softmax(z, dim=-1)[1:, token]
    lookup = matrix_embeddings(EMBEDDING).lookup
    return Replayed(z, torch.tensor([1]), log_probs, temperature, edit, None, lookup)


# --- multiplex ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "share"), [("weighted", 1 / 1.3), ("average", 2 / 3)])
def test_multiplex(weights: str, share: float) -> None:
    """p = .5, .3, .2; draws 0, 1, 0: weights .5, .3, .5 over 1.3, or a third each."""
    proposal = create("multiplex", weights=weights).propose(drawn([0.5, 0.3, 0.2], 0, 1, 0))
    ids, found, token = only_proposal(proposal)
    assert (ids, token) == ([0, 1, 0], 0)
    assert by_token(ids, found) == {0: pytest.approx(share), 1: pytest.approx(1 - share)}


def test_multiplex_joint_density() -> None:
    """2 ln .5 + ln .3: a draw that repeats another counts again.

    Where sampling left tokens 0 and 1, the first draw's log π is ln(.5/.8): the sum is 2 ln .625 + ln .375.
    """
    perturbation = create("multiplex", density="joint")
    edit = perturbation.propose(drawn([0.5, 0.3, 0.2], 0, 1, 0)).edit
    whole = replayed(edit, 0, [0.5, 0.3, 0.2])
    assert perturbation.log_density(whole).tolist() == approximately(2 * math.log(0.5) + math.log(0.3))
    left = Replayed(whole.logits, whole.rows, torch.tensor([0.625]).log(), 1.0, edit, None, whole.lookup)
    assert perturbation.log_density(left).tolist() == approximately(2 * math.log(0.625) + math.log(0.375))


def test_further_draws_are_independent_samples() -> None:
    """Pairs of 100,000 positions against p_i p_j: chi-squared with 24 degrees, 0.999 quantile 51.2."""
    n = 100_000
    draws = repeated(n, PROBABILITIES).draws(2)
    counts = torch.bincount(draws[:, 0] * 5 + draws[:, 1], minlength=25).double()
    expected = n * torch.outer(torch.tensor(PROBABILITIES), torch.tensor(PROBABILITIES)).flatten().double()
    assert ((counts - expected).square() / expected).sum() < 51.2


def test_distinct_draws_are_without_replacement() -> None:
    """Ordered pairs after token 0 against p_j / (1 − p_0) · p_k / (1 − p_0 − p_j): 11 degrees, 0.999 quantile 31.3."""
    n = 30_000
    draws = repeated(n, PROBABILITIES).draws(2, distinct=True)
    counts = torch.bincount(draws[:, 0] * 5 + draws[:, 1], minlength=25).double().view(5, 5)
    statistic, (first, *p) = 0.0, PROBABILITIES
    for j, k in itertools.permutations(range(1, 5), 2):
        expected = n * p[j - 1] / (1 - first) * p[k - 1] / (1 - first - p[j - 1])
        statistic += (counts[j, k] - expected) ** 2 / expected
        counts[j, k] = 0.0
    assert statistic < 31.3 and not counts.any(), "no token twice"


def test_distinct_draws_of_a_sure_policy_and_over_blocks() -> None:
    """1 − p rounds to 0 in float32 here, and the rest keeps its shares; the tokens taken lie in several blocks."""
    z = torch.full((130,), -torch.inf)
    z[3], z[70], z[71], z[129] = 0.0, math.log(4e-9), math.log(2e-9), math.log(2e-9)
    sampled, places = torch.full((4000,), 3), torch.arange(4000)
    embeddings = matrix_embeddings(torch.randn(130, 4))
    step = Step(z.expand(4000, -1), sampled, torch.ones(4000), places, places, embeddings)
    draws = step.draws(4, distinct=True)
    assert (draws[:, 0] == 70).float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert draws[:, :3].sort(dim=1).values.eq(torch.tensor([70, 71, 129])).all()
    assert (draws[:, 3] == 3).all(), "nothing is left"
    edit = create("multiplex", k=6, draws="distinct", weights="average").propose(step).edit
    found = by_token(edit.ids[0].tolist(), edit.weights[0].tolist())
    assert found == {i: pytest.approx(0.25) for i in (3, 70, 71, 129)}
    with pytest.raises(UsageError, match="density='joint': cannot be used with draws='distinct'"):
        create("multiplex", draws="distinct", density="joint")


def test_further_draws_are_among_those_that_the_request_allows() -> None:
    step = repeated(2000, PROBABILITIES)
    allowed = step.logits.clone()
    allowed[:, [0, 3, 4]] = -torch.inf
    step = Step(**{**vars(step), "drawable": allowed})
    draws = step.draws(3)
    assert set(draws.flatten().tolist()) == {1, 2}
    assert (draws == 1).float().mean().item() == pytest.approx(2 / 3, abs=0.03)  # 4/16 : 2/16


@pytest.mark.more
def test_further_draws_over_several_blocks_of_tokens() -> None:
    """Of 150 tokens, all but two of the middle ones excluded: chi-squared with 87 degrees, 0.999 quantile 133."""
    n, size = 100_000, 150
    z = torch.randn(size, generator=torch.Generator().manual_seed(3))
    z[64:128] = -torch.inf
    z[100:102] = 1.0
    draws = Step(**{**vars(repeated(n, PROBABILITIES)), "logits": z.expand(n, -1)}).draws(2)
    expected = n * torch.softmax(z.double(), dim=-1)
    for counts in (torch.bincount(draws[:, j], minlength=size).double() for j in (0, 1)):
        assert len(counts) == size and (counts[expected == 0.0] == 0.0).all()
        found = ((counts - expected).square() / expected)[expected > 0.0]
        assert found.sum() < 133 and len(found) == 88


def test_a_long_tail_is_drawn_as_often_as_it_should_be() -> None:
    """Half of the probability on one token, half on 50,000 others of which none may be left out."""
    n, size = 400, 50_001
    logits = torch.full((n, size), 0.5 / (size - 1)).log()
    logits[:, 0] = math.log(0.5)
    step = repeated(n, PROBABILITIES)
    draws = Step(**{**vars(step), "logits": logits}).draws(1)
    assert (draws == 0).float().mean().item() == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(n))
    assert len(draws[draws > 0].unique()) > 0.95 * (draws > 0).sum()


# --- Mixture of Inputs ------------------------------------------------------------------------------


@pytest.mark.parametrize("entropy", ["all", "top"])
@pytest.mark.parametrize(
    ("probabilities", "sampled", "beta", "expected"),
    [
        # H = .801819 / ln 3 = .729847; (H p + (2 - H) 1[y]) / 2.
        ([0.7, 0.2, 0.1], 1, 1.0, [0.255446, 0.708061, 0.036492]),
        ([0.25] * 4, 1, 1.0, [0.125, 0.625, 0.125, 0.125]),
        ([0.7, 0.2, 0.1], 0, 0.25, [0.824837, 0.116775, 0.058388]),
    ],
)
def test_moi(probabilities: list[float], sampled: int, beta: float, expected: list[float], entropy: str) -> None:
    perturbation = create("moi", k=len(probabilities), beta=beta, entropy=entropy)
    ids, weights, token = only_proposal(perturbation.propose(step_of(probabilities, sampled=sampled)))
    found = by_token(ids, weights)
    assert (ids[0], token) == (sampled, sampled)
    assert [found[i] for i in range(len(expected))] == pytest.approx(expected, abs=2e-6)


def test_moi_entropy_of_all_or_of_the_likeliest() -> None:
    """p = .5, .3, .2 with k = 2: all: H = 1.029653 / ln 3 = .937231; the two: .625, .375, H = .661563 / ln 2 = .954434.

    y is not among the two: its weight is 1 - H / 2 all the same.
    """
    for entropy, h in (("all", 0.937231), ("top", 0.954434)):
        proposal = create("moi", k=2, entropy=entropy).propose(step_of([0.5, 0.3, 0.2], sampled=2))
        ids, weights, _ = only_proposal(proposal)
        assert ids == [2, 0, 1] and weights == approximately(1 - h / 2, 0.625 * h / 2, 0.375 * h / 2)


def test_moi_of_equal_tokens_has_no_weight_below_0() -> None:
    """At β = 0 the token's own weight is 1 − H, and H of 21 equal ones rounds to more than 1."""
    assert create("moi", beta=0.0).propose(step_of([1 / 21] * 21)).edit.weights.min() >= 0.0


# --- SeLaR ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [([0.5, 0.3, 0.2], [0.031385, 0.581169, 0.387446]), ([0.4, 0.35, 0.25], [-0.190123, 0.694239, 0.495885])],
)
def test_selar(probabilities: list[float], expected: list[float]) -> None:
    """H = .937231 and .983539: (1 + H) p, less H at the likeliest. The text keeps the sampled token."""
    proposal = create("selar").propose(step_of(probabilities, sampled=2))
    assert only_proposal(proposal) == ([2, 0, 1, 2], approximately(0.0, *expected), 2)
    assert proposal.acts.tolist() == [True]


def test_selar_is_selective() -> None:
    """p = .9, .07, .03: H = .351507 < .5, an ordinary position; with the threshold below, it is mixed."""
    step = step_of([0.9, 0.07, 0.03], sampled=1)
    proposal = create("selar").propose(step)
    assert only_proposal(proposal) == ([1, 0, 1, 2], [1.0, 0.0, 0.0, 0.0], 1) and proposal.acts.tolist() == [False]
    assert create("selar", threshold=0.3515).propose(step).acts.tolist() == [True]
    assert create("selar", threshold=0.3516).propose(step).acts.tolist() == [False]


# --- LEPO -------------------------------------------------------------------------------------------


def test_lepo() -> None:
    """p = .6, .3, .1, g = 0, 1, -.5, τ = .5: w as below; Σ w ln p = -.965329; the text is the likeliest."""
    perturbation = create("lepo", k=3, top_p=1.0, density="lepo")
    proposal = perturbation.propose(step_of([0.6, 0.3, 0.1], sampled=2, noise=[0.0, 1.0, -0.5]))
    assert only_proposal(proposal) == ([0, 1, 2], approximately(0.349958, 0.646465, 0.003576), 0)
    assert perturbation.log_density(replayed(proposal.edit, 0, [0.6, 0.3, 0.1])).tolist() == approximately(-0.965329)


def test_lepo_noise_is_not_clamped_and_cut_tokens_take_no_part() -> None:
    """g = 0, 5 at p = .6, .3 after top-p .85, τ = 1: weights .6 : .3 e^5; log π is of the whole vocabulary."""
    perturbation = create("lepo", k=3, top_p=0.85, tau=1.0, density="lepo")
    proposal = perturbation.propose(step_of([0.6, 0.3, 0.1], noise=[0.0, 5.0, 9.0]))
    share = 0.3 * math.exp(5) / (0.6 + 0.3 * math.exp(5))
    assert only_proposal(proposal) == ([0, 1, 0], approximately(1 - share, share, 0.0), 0)
    expected = (1 - share) * math.log(0.6) + share * math.log(0.3)
    assert perturbation.log_density(replayed(proposal.edit, 0, [0.6, 0.3, 0.1])).tolist() == approximately(expected)


def test_the_gate_of_the_first_tokens() -> None:
    positions = Positions(np.zeros(4, np.int64), np.full(4, 100), np.array([100, 101, 102, 163]))
    assert create_gate("first", length=2).plan(positions).tolist() == [True, True, False, False]
    assert create("lepo").gate.length == 64
    assert create("lepo", **{"gate.length": 2}).selects(positions).tolist() == [True, True, False, False]
    assert create("lepo", gate="none").selects(positions).tolist() == [True] * 4


# --- Latent-GRPO ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_latent(temperature: float) -> None:
    """p = .6, .3, .1, raw g = -2, .4, 3.7: noise 0, 1.9, 4.5; y = -.510826, .696027, 2.197415. p is at temperature 1.

    The density: Δ = 0, 1.9, 4.5, mean of -Δ - exp(-Δ) = -2.520226.
    """
    tempered = torch.softmax(torch.tensor([0.6, 0.3, 0.1]).log() / temperature, dim=-1).tolist()
    perturbation = create("latent", k=3, density="latent")
    proposal = perturbation.propose(step_of(tempered, temperature=temperature, noise=[-2.0, 0.4, 3.7]))
    ids, weights, token = only_proposal(proposal)
    assert (ids, token) == ([2, 1, 0], 2) and weights == approximately(0.775510, 0.172800, 0.051691)
    density = perturbation.log_density(replayed(proposal.edit, 2, [0.6, 0.3, 0.1], temperature))
    assert density.tolist() == pytest.approx([-2.520226], abs=1e-5)


def test_latent_density_is_not_clamped() -> None:
    """A policy that moved from p = .1 to .9 at token 2, whose noise was 4.5: Δ = 4.5 - ln 9; and below 0 as well."""
    perturbation = create("latent", k=1, density="latent", top_p=1.0)
    edit = perturbation.propose(step_of([0.6, 0.3, 0.1], noise=[-2.0, -2.0, 4.0])).edit
    assert edit.ids.tolist() == [[2]]
    for now, delta in ((0.9, 4.5 - math.log(9)), (1.0 - 1e-7, 4.5 - math.log(10))):
        density = perturbation.log_density(replayed(edit, 2, [(1 - now) / 2, (1 - now) / 2, now]))
        assert density.tolist() == pytest.approx([-delta - math.exp(-delta)], abs=1e-5)
    edit = InputEdit(edit.ids, edit.weights, normalizer=torch.tensor([math.log(0.1) - 0.5]))
    assert perturbation.log_density(replayed(edit, 2, [0.6, 0.3, 0.1])).tolist() == approximately(0.5 - math.exp(0.5))


PLAIN, TURNED = -0.648721, -0.393469


@pytest.mark.parametrize(
    ("advantage", "one_sided", "expected"),
    [(None, True, PLAIN), (1.0, True, PLAIN), (-1.0, True, TURNED), (0.0, True, TURNED), (-1.0, False, PLAIN)],
)
def test_latent_gradient_of_a_negative_answer(advantage: float | None, one_sided: bool, expected: float) -> None:
    """Δ = -.5: 1 - e^.5 = -.648721; turned, e^-.5 - 1 = -.393469. The value is the same. At Δ > 0 nothing is turned."""
    for delta, gradient in ((-0.5, expected), (0.5, 1 - math.exp(-0.5))):
        perturbation = create("latent", k=1, pool=1, density="latent", one_sided=one_sided)
        z = torch.tensor([[0.0, 0.0, 0.0], [0.3, -0.2, 0.9]], requires_grad=True)
        log_p = torch.log_softmax(z.detach()[1], dim=-1)[2]
        edit = InputEdit(torch.tensor([[2]]), torch.ones(1, 1), normalizer=(log_p + delta).view(1))
        lookup = matrix_embeddings(EMBEDDING).lookup
        advantages = None if advantage is None else torch.tensor([advantage])
        given = Replayed(z, torch.tensor([1]), log_p.view(1), 1.0, edit, None, lookup, advantages)
        density = perturbation.log_density(given)
        assert density.tolist() == approximately(-delta - math.exp(-delta))
        density.sum().backward()
        # d log p_2 / d z_2 = 1 - p_2.
        assert z.grad[1, 2].item() == pytest.approx(gradient * (1 - math.exp(log_p)), abs=1e-5)


def test_latent_takes_the_nucleus_and_at_least_k() -> None:
    """P = 8 : 4 : 2 : 1 : 1, of 16: a nucleus of .7 holds tokens 0 and 1; large noise elsewhere does not count."""
    step = step_of(PROBABILITIES, noise=[0.0, 0.0, 3.0, 3.0, 2.9])
    for options, ids in (
        ({"k": 2, "top_p": 0.7}, [0, 1]),
        ({"k": 3, "top_p": 0.7}, [2, 0, 1]),
        ({"k": 2, "top_p": 1.0}, [2, 3]),
        ({"k": 2, "top_p": 1.0, "pool": 3}, [2, 0]),
    ):
        assert only_proposal(create("latent", **options).propose(step))[0] == ids, options


def test_latent_density_is_a_mean_over_the_tokens_that_kept_a_weight() -> None:
    """Weights .7, .3 and one that float32 lost, normalizer 0: Δ = ln(.7/.6), 0; (−.154151 − 6/7 − 1) / 2, not / 3."""
    edit = InputEdit(torch.tensor([[0, 1, 0]]), torch.tensor([[0.7, 0.3, 0.0]]), normalizer=torch.zeros(1))
    density = create("latent", k=3, density="latent").log_density(replayed(edit, 0, [0.6, 0.3, 0.1]))
    assert density.tolist() == approximately(-1.005647)


def test_latent_refuses_what_it_could_not_replay() -> None:
    with pytest.raises(UsageError, match=r"tau=0\.1: must be at least 0\.5"):
        create("latent", density="latent", tau=0.1)
    with pytest.raises(UsageError, match="pool=5: must be at least k=10"):
        create("latent", pool=5)


def test_latent_records_no_weight_that_float32_holds_coarsely() -> None:
    """w_2 = exp(−48 / 0.5) = 2.0e-42 is below float32's smallest normal number: the first token stands in its place."""
    perturbation = create("latent", k=2, pool=2, tau=0.5, top_p=1.0)
    step = step_of([1.0, math.exp(-48.0), 0.0, 0.0], noise=[-2.0] * 4)
    assert only_proposal(perturbation.propose(step))[:2] == ([0, 0], [1.0, 0.0])
