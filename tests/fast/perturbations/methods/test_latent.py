# SPDX-License-Identifier: Apache-2.0
"""LEPO and Latent-GRPO against numbers derived by hand (see the comments)."""

import math

import numpy as np
import pytest
import torch

from perturbations.base import Replayed
from perturbations.edit import InputEdit
from perturbations.embeddings import matrix_embeddings
from perturbations.errors import UsageError
from perturbations.registry import create, create_gate
from perturbations.step import Positions
from tests.support.strategy_steps import (
    EMBEDDING,
    PROBABILITIES,
    approximately,
    only_proposal,
    replayed_position,
    step_of,
)

# --- LEPO -------------------------------------------------------------------------------------------


def test_lepo_by_hand() -> None:
    """p = .6, .3, .1, g = 0, 1, -.5, τ = .5: w as below; Σ w ln p = -.965329; the text is the likeliest."""
    probabilities = [0.6, 0.3, 0.1]
    lepo = create("lepo", k=3, top_p=1.0, density="lepo")
    proposal = lepo.propose(step_of(probabilities, sampled=2, noise=[0.0, 1.0, -0.5]))
    proposed = only_proposal(proposal)
    assert proposed.ids == [0, 1, 2]
    assert proposed.weights == approximately(0.349958, 0.646465, 0.003576)
    assert proposed.token == 0
    log_density = lepo.log_density(replayed_position(proposal.edit, 0, probabilities))
    assert log_density.tolist() == approximately(-0.965329)


def test_lepo_noise_is_not_clamped_and_cut_tokens_take_no_part() -> None:
    """g = 0, 5 at p = .6, .3 after top-p .85, τ = 1: weights .6 : .3 e^5; log π is of the whole vocabulary."""
    probabilities = [0.6, 0.3, 0.1]
    lepo = create("lepo", k=3, top_p=0.85, tau=1.0, density="lepo")
    proposal = lepo.propose(step_of(probabilities, noise=[0.0, 5.0, 9.0]))
    proposed = only_proposal(proposal)
    second_weight = 0.3 * math.exp(5) / (0.6 + 0.3 * math.exp(5))
    assert proposed.ids == [0, 1, 0]
    assert proposed.weights == approximately(1 - second_weight, second_weight, 0.0)
    assert proposed.token == 0
    log_density = lepo.log_density(replayed_position(proposal.edit, 0, probabilities))
    expected = (1 - second_weight) * math.log(0.6) + second_weight * math.log(0.3)
    assert log_density.tolist() == approximately(expected)


def first_positions() -> Positions:
    """Generated positions 0, 1, 2 and 63 of a trajectory whose prompt has 100 tokens."""
    return Positions(
        np.zeros(4, np.int64),
        np.full(4, 100),
        np.array([100, 101, 102, 163]),
    )


def test_the_gate_of_the_first_tokens() -> None:
    gate = create_gate("first", length=2)
    assert gate.plan(first_positions()).tolist() == [True, True, False, False]


def test_lepo_perturbs_the_first_64_tokens_by_default() -> None:
    positions = first_positions()
    assert create("lepo").gate.length == 64
    assert create("lepo", **{"gate.length": 2}).selects(positions).tolist() == [True, True, False, False]
    assert create("lepo", gate="none").selects(positions).tolist() == [True] * 4


# --- Latent-GRPO ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_latent_by_hand(temperature: float) -> None:
    """p = .6, .3, .1, raw g = -2, .4, 3.7: noise 0, 1.9, 4.5; y = -.510826, .696027, 2.197415. p is at temperature 1.

    The density: Δ = 0, 1.9, 4.5, mean of -Δ - exp(-Δ) = -2.520226.
    """
    probabilities = [0.6, 0.3, 0.1]
    logits = torch.tensor(probabilities).log()
    tempered = torch.softmax(logits / temperature, dim=-1).tolist()
    latent = create("latent", k=3, density="latent")
    proposal = latent.propose(step_of(tempered, temperature=temperature, noise=[-2.0, 0.4, 3.7]))
    proposed = only_proposal(proposal)
    assert proposed.ids == [2, 1, 0]
    assert proposed.weights == approximately(0.775510, 0.172800, 0.051691)
    assert proposed.token == 2
    log_density = latent.log_density(replayed_position(proposal.edit, 2, probabilities, temperature))
    assert log_density.tolist() == pytest.approx([-2.520226], abs=1e-5)


@pytest.mark.parametrize(
    ("new_probability", "delta"),
    [
        pytest.param(0.9, 4.5 - math.log(9), id="nine times as likely"),
        pytest.param(1.0 - 1e-7, 4.5 - math.log(10), id="certain"),
    ],
)
def test_latent_density_is_not_clamped(new_probability: float, delta: float) -> None:
    """A policy that moved from p = .1 at token 2, whose noise was 4.5: Δ = 4.5 - ln (p' / p)."""
    latent = create("latent", k=1, density="latent", top_p=1.0)
    edit = latent.propose(step_of([0.6, 0.3, 0.1], noise=[-2.0, -2.0, 4.0])).edit
    assert edit.ids.tolist() == [[2]]
    other_probability = (1 - new_probability) / 2
    moved = replayed_position(edit, 2, [other_probability, other_probability, new_probability])
    expected = -delta - math.exp(-delta)
    assert latent.log_density(moved).tolist() == pytest.approx([expected], abs=1e-5)


def test_latent_density_of_noise_below_its_range_is_not_clamped() -> None:
    """The normalizer ln .1 - .5 makes Δ = -.5 at p = .1: -Δ - exp(-Δ) = .5 - e^.5."""
    latent = create("latent", k=1, density="latent", top_p=1.0)
    edit = InputEdit(
        ids=torch.tensor([[2]]),
        weights=torch.ones(1, 1),
        normalizer=torch.tensor([math.log(0.1) - 0.5]),
    )
    log_density = latent.log_density(replayed_position(edit, 2, [0.6, 0.3, 0.1]))
    assert log_density.tolist() == approximately(0.5 - math.exp(0.5))


PLAIN = -0.648721  # 1 - e^.5, the gradient at Δ = -.5
TURNED = -0.393469  # e^-.5 - 1, the gradient that is turned for a response that was not good


@pytest.mark.parametrize(
    ("advantage", "one_sided", "gradient_below_0"),
    [
        (None, True, PLAIN),
        (1.0, True, PLAIN),
        (-1.0, True, TURNED),
        (0.0, True, TURNED),
        (-1.0, False, PLAIN),
    ],
)
@pytest.mark.parametrize("delta", [-0.5, 0.5])
def test_latent_gradient_of_a_negative_answer(
    delta: float, advantage: float | None, one_sided: bool, gradient_below_0: float
) -> None:
    """The value is the same with the gradient turned. At Δ > 0 nothing is turned: 1 - e^-.5."""
    latent = create("latent", k=1, pool=1, density="latent", one_sided=one_sided)
    logits = torch.tensor([[0.0, 0.0, 0.0], [0.3, -0.2, 0.9]], requires_grad=True)
    log_p = torch.log_softmax(logits.detach()[1], dim=-1)[2]
    edit = InputEdit(
        ids=torch.tensor([[2]]),
        weights=torch.ones(1, 1),
        normalizer=(log_p + delta).view(1),
    )
    replayed = Replayed(
        logits=logits,
        rows=torch.tensor([1]),
        token_log_probs=log_p.view(1),
        temperature=1.0,
        edit=edit,
        noise_keys=None,
        lookup=matrix_embeddings(EMBEDDING).lookup,
        advantages=None if advantage is None else torch.tensor([advantage]),
    )

    log_density = latent.log_density(replayed)
    assert log_density.tolist() == approximately(-delta - math.exp(-delta))

    log_density.sum().backward()
    gradient_of_log_p = gradient_below_0 if delta < 0 else 1 - math.exp(-0.5)
    # d log p_2 / d z_2 = 1 - p_2.
    expected = gradient_of_log_p * (1 - math.exp(log_p))
    assert logits.grad[1, 2].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        pytest.param({"k": 2, "top_p": 0.7}, [0, 1], id="nucleus of k"),
        pytest.param({"k": 3, "top_p": 0.7}, [2, 0, 1], id="nucleus smaller than k"),
        pytest.param({"k": 2, "top_p": 1.0}, [2, 3], id="all tokens"),
        pytest.param({"k": 2, "top_p": 1.0, "pool": 3}, [2, 0], id="pool"),
    ],
)
def test_latent_takes_the_nucleus_and_at_least_k(options: dict[str, float], ids: list[int]) -> None:
    """P = 8 : 4 : 2 : 1 : 1, of 16: a nucleus of .7 holds tokens 0 and 1; large noise elsewhere does not count."""
    step = step_of(PROBABILITIES, noise=[0.0, 0.0, 3.0, 3.0, 2.9])
    assert only_proposal(create("latent", **options).propose(step)).ids == ids


def test_latent_density_is_a_mean_over_the_tokens_that_kept_a_weight() -> None:
    """Weights .7, .3 and one that float32 lost, normalizer 0: Δ = ln(.7/.6), 0; (−.154151 − 6/7 − 1) / 2, not / 3."""
    edit = InputEdit(
        ids=torch.tensor([[0, 1, 0]]),
        weights=torch.tensor([[0.7, 0.3, 0.0]]),
        normalizer=torch.zeros(1),
    )
    latent = create("latent", k=3, density="latent")
    log_density = latent.log_density(replayed_position(edit, 0, [0.6, 0.3, 0.1]))
    assert log_density.tolist() == approximately(-1.005647)


def test_latent_refuses_what_it_could_not_replay() -> None:
    with pytest.raises(UsageError, match=r"tau=0\.1: must be at least 0\.5"):
        create("latent", density="latent", tau=0.1)


def test_latent_refuses_a_pool_smaller_than_k() -> None:
    with pytest.raises(UsageError, match="pool=5: must be at least k=10"):
        create("latent", pool=5)


def test_latent_records_no_weight_that_float32_holds_coarsely() -> None:
    """w_2 = exp(−48 / 0.5) = 2.0e-42 is below float32's smallest normal number: the first token stands in its place."""
    latent = create("latent", k=2, pool=2, tau=0.5, top_p=1.0)
    step = step_of([1.0, math.exp(-48.0), 0.0, 0.0], noise=[-2.0] * 4)
    proposed = only_proposal(latent.propose(step))
    assert proposed.ids == [0, 0]
    assert proposed.weights == [1.0, 0.0]
