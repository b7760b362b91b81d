# SPDX-License-Identifier: Apache-2.0
"""Densities on their way into a forward's log-probabilities: the right rows, the ratio, the record, the errors."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngrpo.trainers.common.log_probs import densities
from perturbations.base import Perturbation, Replayed
from perturbations.methods.soft_grpo import Gumbel
from perturbations.replay.scope import ReplayScope
from perturbations.testing.log_density import replayed
from tests.support.density_model import EVERY, STEPS, Model, batch, name_of, perturbed, run
from tests.support.density_steps import PERTURBATIONS, D, V, generator
from tests.support.token_log_probs import log_probs_of


class OfTheAdvantage(Gumbel):
    """Says what advantage each position has."""

    def log_density(self, replayed: Replayed) -> Tensor:
        return replayed.advantages + 0.0 * replayed.token_log_probs


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_each_position_has_the_advantage_of_its_entry(packed: bool) -> None:
    """Entry t - 1 of a row is of the token at t; the advantages are of the last tokens of each row alone."""
    model = Model()
    perturbation = OfTheAdvantage(density="gumbel")
    tokens, mask, records = batch(perturbation)
    rows, length = tokens.shape
    entries = length - 2
    advantages = torch.arange(1.0, rows * entries + 1).view(rows, entries)
    result, _ = run(model, perturbation, tokens, mask, records, packed, advantages=advantages)
    sample, entry = perturbed(records, mask)
    assert torch.equal(result[sample, entry], advantages[sample, entry - 1])


@pytest.mark.parametrize("perturbation", EVERY, ids=name_of)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_densities_stand_at_perturbed_positions_alone(perturbation: Perturbation, packed: bool) -> None:
    """Row t - 1 holds the density of position t, computed here from the rollout's own step; all others the token's."""
    model = Model()
    tokens, mask, records = batch(perturbation)

    result, seen = run(model, perturbation, tokens, mask, records, packed)

    with ReplayScope(model.embedding)(records, mask):
        logits = model(tokens)
    of_tokens = log_probs_of(logits, torch.roll(tokens, -1, 1))
    expected = of_tokens.clone()
    for sample, step in STEPS.items():
        entries = step.positions - 1
        inside = step.positions < mask[sample].sum()
        if not perturbation.score_only:
            own_rows = replayed(step, perturbation.propose(step), logits[sample, entries])
            expected[sample, entries[inside]] = perturbation.log_density(own_rows)[inside]
        elif not perturbation.draws_token:
            expected[sample, entries[inside]] = 0.0
    inside = mask.bool()
    torch.testing.assert_close(result[inside], expected[inside], rtol=1e-4, atol=1e-4)
    changed = ((result - of_tokens).abs() > 1e-6)[inside].sum()
    if perturbation.draws_token:
        assert changed == 0
    else:
        assert changed >= 6
    responses = mask[:, 5:].bool()
    torch.testing.assert_close(seen.own[responses], of_tokens[:, 4:-1].detach()[responses])


@pytest.mark.parametrize("perturbation", EVERY[:-1], ids=name_of)
def test_the_ratio_before_an_update_is_exactly_1_and_moves_with_the_policy(perturbation: Perturbation) -> None:
    model = Model()
    tokens, mask, records = batch(perturbation)
    with torch.no_grad():
        old, _ = run(model, perturbation, tokens, mask, records)
    new, _ = run(model, perturbation, tokens, mask, records)
    assert torch.equal(old, new.detach())

    at_perturbed = perturbed(records, mask)
    new[at_perturbed].sum().backward()
    assert model.head.weight.grad.abs().max() > 1e-4

    with torch.no_grad():
        model.head.weight += 0.1 * torch.randn(V, D, generator=generator())
        moved, _ = run(model, perturbation, tokens, mask, records)
    if perturbation.score_only and not perturbation.draws_token:
        assert torch.equal(moved[at_perturbed], old[at_perturbed]), "what counts by its score alone has no value"
    else:
        assert ((moved - old)[at_perturbed].abs() > 1e-3).sum() >= 5


@pytest.mark.parametrize("perturbation", EVERY, ids=name_of)
def test_a_batch_without_a_perturbed_position_is_left_alone(perturbation: Perturbation) -> None:
    model = Model()
    tokens, mask, records = batch(perturbation)
    unperturbed = [None if record is None else record.truncate(5) for record in records]
    result, seen = run(model, perturbation, tokens, mask, unperturbed)
    assert torch.equal(result, log_probs_of(model(tokens), torch.roll(tokens, -1, 1)))
    assert seen.tokens.shape == (0,)


@pytest.mark.parametrize("perturbation", EVERY, ids=name_of)
def test_a_batch_without_a_perturbed_position_has_as_many_gathers(perturbation: Perturbation) -> None:
    """The density is computed all the same, on no rows, and stays in the graph: other ranks wait for its gathers."""
    model = Model()
    tokens, mask, records = batch(perturbation)
    calls: list[str] = []

    def count(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        calls.append("forward")
        if output.requires_grad:
            output.register_hook(lambda _gradient: calls.append("backward"))

    model.embedding.register_forward_hook(count)

    def lookups(records_of_batch: list) -> list[str]:
        calls.clear()
        result, _ = run(model, perturbation, tokens, mask, records_of_batch)
        result.sum().backward()
        return sorted(calls)

    with_perturbed = lookups(records)
    assert {"forward", "backward"} == set(with_perturbed)
    assert lookups([None, None, None]) == with_perturbed


@pytest.mark.parametrize("perturbation", [option for option in EVERY if option.score_only], ids=name_of)
def test_a_density_that_counts_by_its_score_enters_as_reinforce(perturbation: Perturbation) -> None:
    """Values are the token's, or 0 where none was drawn; the gradient is the density's and the token's."""
    model = Model()
    tokens, mask, records = batch(perturbation)
    with torch.no_grad():
        old, _ = run(model, perturbation, tokens, mask, records)
    result, _ = run(model, perturbation, tokens, mask, records)
    assert torch.equal(old, result.detach())

    result.sum().backward()

    scope = ReplayScope(model.embedding, perturbation=perturbation)
    with scope(records, mask):
        logits = model(tokens)
        log_probs = log_probs_of(logits, torch.roll(tokens, -1, 1)).flatten()
        seen, inside = scope.replayed(logits.flatten(0, 1), log_probs, 1.0)
        of_plain_tokens = log_probs.index_fill(0, seen.rows[inside], 0.0).sum()
        joint = perturbation.log_density(seen)[inside].sum() + of_plain_tokens
        if perturbation.draws_token:
            joint = joint + seen.token_log_probs[inside].sum()
        of_embedding, of_head = torch.autograd.grad(joint, [model.embedding.weight, model.head.weight])
    torch.testing.assert_close(model.embedding.weight.grad, of_embedding, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.head.weight.grad, of_head, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("input_gradient", ["full", "none"])
@pytest.mark.parametrize("perturbation", EVERY, ids=name_of)
def test_the_fed_vector_has_a_gradient_where_it_is_asked_for(perturbation: Perturbation, input_gradient: str) -> None:
    """Through the input alone: a vector that is itself the action is fixed, a mixture of draws where asked to be."""
    perturbation = replace(perturbation, input_gradient=input_gradient)
    model = Model()
    tokens, mask, records = batch(perturbation)
    with ReplayScope(model.embedding, perturbation=perturbation)(records, mask):
        fed = model.embedding(tokens)
    sample, entry = perturbed(records, mask)
    fed[sample, entry + 1].sum().backward()
    wanted = input_gradient == "full" and not perturbation.density_of_vector
    assert model.embedding.weight.grad.any() == wanted


def test_a_forward_that_was_not_asked_for_log_probabilities_is_an_error() -> None:
    perturbation = PERTURBATIONS[0]
    model = Model()
    tokens, mask, records = batch(perturbation)
    scope = ReplayScope(model.embedding, perturbation=perturbation)
    message = r"was not computed.*--perturbation\.density token"
    with pytest.raises(RuntimeError, match=message), scope(records, mask), densities(scope, 1.0):
        log_probs_of(model(tokens), tokens)
