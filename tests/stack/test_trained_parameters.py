# SPDX-License-Identifier: Apache-2.0
"""Perturbations with parameters (HRPO, TARPO), and one with dense vectors, on the real engine: synced and exact."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ngrpo.rollout import set_perturbation
from perturbations import create, parameters
from tests.stack.harness import CROWDED, Rollout, build_engine, chat_prompts, gaps, note_preemptions, sample, sync
from tests.stack.routed import TEMPERATURE, compare, decisions, replayed
from tests.stack.routed import shaken as routed_shaken

DENSE = "tests.stack.own_perturbations:DenseShake"


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    """Moves HRPO's gate far from its start: then a is between 0.2 and 1, and σ all over its range."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in module.named_parameters():
        draws = torch.randn(parameter.shape, generator=generator)
        if name == "lambda_shift":
            parameter.data.copy_(3.0 + draws)
        else:
            parameter.data.copy_(0.3 * draws)
    return module


def edits_in(rollouts: Sequence[Rollout]) -> int:
    return sum(len(rollout.record) for rollout in rollouts)


def bytes_of(rollouts: Sequence[Rollout]) -> int:
    """The size of all records."""
    return sum(len(rollout.record.to_bytes()) for rollout in rollouts)


def further_turn(llm: Any, first: Rollout, prompt: list[int], **params: Any) -> Rollout:
    """The rollout of a prompt that goes on from an earlier one, whose inputs are replayed in it."""
    arguments = {"record": first.record.to_bytes()}
    (rollout,) = sample(llm, [prompt], [arguments], **params)
    return rollout


@pytest.fixture
def gated(hf_model: Any) -> Iterator[Any]:
    """The shared model with HRPO's module beside it, for one test."""
    parameters.attach(hf_model, create("hrpo"))
    yield hf_model
    delattr(hf_model, parameters.NAME)


@pytest.fixture
def routed(hf_model: Any) -> Iterator[Any]:
    """The shared model with TARPO's module beside it, for one test."""
    parameters.attach(hf_model, create("tarpo"))
    yield hf_model
    delattr(hf_model, parameters.NAME)


def test_trained_parameters_reach_the_rollout(engine: Any, gated: Any, tmp_path: Path) -> None:
    """At the start both sides agree by themselves; afterwards only the sync makes them agree again."""
    set_perturbation(engine, "hrpo")
    prompts = chat_prompts(engine, copies=2)
    fresh = sample(engine, prompts, max_tokens=48)
    assert gaps(gated, fresh).max() <= 1e-4

    shaken(parameters.attached(gated))
    before_sync = sample(engine, prompts, max_tokens=16)
    assert gaps(gated, before_sync).max() > 1e-2, "not synced yet: this must show"

    sync(engine, gated, tmp_path)
    rollouts = sample(engine, prompts, max_tokens=56)
    gap = gaps(gated, rollouts)
    assert gap.max() <= 1e-4
    assert gap.mean() <= 1e-5
    assert edits_in(rollouts) == len(gap), "every position is perturbed"
    assert gaps(gated, rollouts[::4], replay=False).max() > 1e-1
    candidates = 33  # the 32 likeliest tokens and the sampled one
    assert bytes_of(rollouts) <= candidates * 6.1 * len(gap) + 20 * len(rollouts)

    further = further_turn(engine, rollouts[0], rollouts[0].sequence, max_tokens=24)
    assert gaps(gated, [further]).max() <= 1e-4, "a further turn is computed through the gate as well"


@pytest.fixture(scope="module")
def narrow(model: str) -> Iterator[Any]:
    """A cache of eight blocks of 32 tokens: trajectories are thrown out and computed again from their records."""
    llm = build_engine(model, {"name": DENSE}, **CROWDED)
    llm.preempted = note_preemptions(llm)
    yield llm


@pytest.mark.parametrize("name", [DENSE, "hrpo"], ids=["dense", "hrpo"])
def test_preemption_with_recomputation(narrow: Any, name: str, request: pytest.FixtureRequest) -> None:
    fixture = "gated" if name == "hrpo" else "hf_model"
    model = request.getfixturevalue(fixture)
    narrow.preempted.clear()
    set_perturbation(narrow, name, rate=0.5)
    rollouts = sample(narrow, chat_prompts(narrow, copies=2), max_tokens=48)
    assert len(narrow.preempted) >= 3, "the cache is not small enough for this test to show anything"
    assert gaps(model, rollouts).max() <= 1e-4


def test_dense_vectors(engine: Any, hf_model: Any) -> None:
    """With chunked prefill, prefix caching and a further turn. A position is stored as D float32 and a few bytes."""
    set_perturbation(engine, DENSE)
    rollouts = sample(engine, chat_prompts(engine, copies=2), max_tokens=64)
    gap = gaps(hf_model, rollouts)
    assert gap.max() <= 1e-4
    assert gap.mean() <= 1e-5
    assert gaps(hf_model, rollouts[::4], replay=False).max() > 1e-2

    vector_bytes = 4 * hf_model.config.hidden_size
    bytes_of_position = bytes_of(rollouts) / len(gap)
    assert vector_bytes <= bytes_of_position <= vector_bytes + 9

    first = rollouts[0]
    question = engine.get_tokenizer().encode("\nAnd what is 3 plus 4?")
    second = further_turn(engine, first, first.sequence + question, max_tokens=16)
    assert gaps(hf_model, [second]).max() <= 1e-4
    with_first_record = replace(second, record=first.record)
    assert gaps(hf_model, [with_first_record]).max() > 1e-3, "leaving the second turn's edits out must show"


def test_a_trained_router_reaches_the_rollout(engine: Any, routed: Any, tmp_path: Path) -> None:
    """With chunked prefill, cached prefixes and a further turn, which asks nothing again about the turn before it."""
    set_perturbation(engine, "tarpo")
    prompts = chat_prompts(engine, copies=2)
    with decisions() as seen:
        fresh = sample(engine, prompts, max_tokens=12, temperature=TEMPERATURE)
        token_gap, decision_gap, count, latent = compare(routed, fresh, seen)
        assert token_gap <= 1e-4
        assert decision_gap <= 1e-4
        assert count == 12 * len(fresh)
        assert latent <= 0.05 * count, "a fresh router decides for the token"

        routed_shaken(parameters.attached(routed))
        _, decision_gap, _, _ = compare(routed, fresh, seen)
        assert decision_gap > 1.0, "not synced yet: this must show"

        sync(engine, routed, tmp_path)
        seen.clear()
        rollouts = sample(engine, prompts, max_tokens=32, temperature=TEMPERATURE)
        token_gap, decision_gap, count, latent = compare(routed, rollouts, seen)
        assert token_gap <= 1e-4
        assert decision_gap <= 1e-4
        assert count == len(seen)
        assert 0.2 * count < latent < 0.8 * count
        different = {round(log_prob_of_token, 3) for log_prob_of_token, _ in seen.values()}
        assert len(different) > 0.5 * count, "each position has its own hidden state"
        assert gaps(routed, rollouts, replay=False, temperature=TEMPERATURE).max() > 1e-2

        first = rollouts[0]
        further = further_turn(engine, first, first.sequence, max_tokens=8, temperature=TEMPERATURE)
        assert len(seen) == count + 8
        assert gaps(routed, [further], temperature=TEMPERATURE).max() <= 1e-4

    entries, own_log_probs = replayed(routed, rollouts[:2], weight=0.1)
    decision_terms = torch.cat(entries) - torch.cat(own_log_probs)
    routed.zero_grad()
    decision_terms.sum().backward()
    for name, parameter in parameters.attached(routed).named_parameters():
        assert parameter.grad.abs().max() > 0.0, name
    policy_weight = routed.model.layers[0].mlp.down_proj.weight
    assert policy_weight.grad.abs().max() > 0.0, "the decision trains the policy too"
    routed.zero_grad()


def test_preemption_asks_the_router_nothing_again(narrow: Any, routed: Any) -> None:
    """Decisions from before a preemption are in the record, and their inputs are fed from it."""
    narrow.preempted.clear()
    set_perturbation(narrow, "tarpo", bias=0.0)
    # The trainer's router has the default bias of (4.6, 0): its shift makes it the engine's.
    for parameter in parameters.attached(routed).parameters():
        if len(parameter.shape) == 1:
            parameter.data.copy_(torch.tensor([-4.6, 0.0]))
    with decisions() as seen:
        rollouts = sample(narrow, chat_prompts(narrow), max_tokens=48, temperature=TEMPERATURE)
    assert narrow.preempted, "the cache is not small enough for this test to show anything"
    token_gap, decision_gap, count, latent = compare(routed, rollouts, seen)
    assert token_gap <= 1e-4
    assert decision_gap <= 1e-4
    assert count == len(seen)
    assert 0.3 * count < latent < 0.7 * count
