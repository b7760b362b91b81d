# SPDX-License-Identifier: Apache-2.0
"""Perturbations with parameters (HRPO, TARPO), and one with dense vectors, on the real engine: synced and exact."""

from collections.abc import Iterator
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
    """Far from where the gate starts: a between 0.2 and 1, σ all over its range."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in module.named_parameters():
        draws = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(3.0 + draws if name == "lambda_shift" else 0.3 * draws)
    return module


@pytest.fixture
def gated(hf_model: Any) -> Iterator[Any]:
    """The shared model with a perturbation's module beside it, for one test."""
    parameters.attach(hf_model, create("hrpo"))
    yield hf_model
    delattr(hf_model, parameters.NAME)


@pytest.fixture
def routed(hf_model: Any) -> Iterator[Any]:
    parameters.attach(hf_model, create("tarpo"))
    yield hf_model
    delattr(hf_model, parameters.NAME)


def test_trained_parameters_reach_the_rollout(engine: Any, gated: Any, tmp_path: Path) -> None:
    """At the start both sides agree by themselves; afterwards only the sync makes them agree again."""
    set_perturbation(engine, "hrpo")
    prompts = chat_prompts(engine, copies=2)
    assert gaps(gated, sample(engine, prompts, max_tokens=48)).max() <= 1e-4
    shaken(parameters.attached(gated))
    assert gaps(gated, sample(engine, prompts, max_tokens=16)).max() > 1e-2, "not synced yet: this must show"
    sync(engine, gated, tmp_path)
    rollouts = sample(engine, prompts, max_tokens=56)
    gap = gaps(gated, rollouts)
    assert gap.max() <= 1e-4 and gap.mean() <= 1e-5
    assert sum(len(r.record) for r in rollouts) == len(gap)
    assert gaps(gated, rollouts[::4], replay=False).max() > 1e-1
    assert sum(len(r.record.to_bytes()) for r in rollouts) <= 33 * 6.1 * len(gap) + 20 * len(rollouts)
    (further,) = sample(engine, [rollouts[0].sequence], [{"record": rollouts[0].record.to_bytes()}], max_tokens=24)
    assert gaps(gated, [further]).max() <= 1e-4, "a further turn is computed through the gate as well"


@pytest.fixture(scope="module")
def narrow(model: str) -> Iterator[Any]:
    """A cache of eight blocks of 32 tokens: trajectories are thrown out and computed again from their records."""
    llm = build_engine(model, {"name": DENSE}, **CROWDED)
    llm.preempted = note_preemptions(llm)
    yield llm


@pytest.mark.parametrize("name", [DENSE, "hrpo"], ids=["dense", "hrpo"])
def test_preemption_with_recomputation(narrow: Any, name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue("gated" if name == "hrpo" else "hf_model")
    narrow.preempted.clear()
    set_perturbation(narrow, name, rate=0.5)
    rollouts = sample(narrow, chat_prompts(narrow, copies=2), max_tokens=48)
    assert len(narrow.preempted) >= 3, "the cache is not small enough for this test to show anything"
    assert gaps(model, rollouts).max() <= 1e-4


def test_dense_vectors(engine: Any, hf_model: Any) -> None:
    """Chunked prefill, prefix caching, a further turn; 4·D bytes a position and a few more."""
    set_perturbation(engine, DENSE)
    rollouts = sample(engine, chat_prompts(engine, copies=2), max_tokens=64)
    gap = gaps(hf_model, rollouts)
    assert gap.max() <= 1e-4 and gap.mean() <= 1e-5
    assert gaps(hf_model, rollouts[::4], replay=False).max() > 1e-2
    size, width = sum(len(r.record.to_bytes()) for r in rollouts) / len(gap), hf_model.config.hidden_size
    assert 4 * width <= size <= 4 * width + 9
    first = rollouts[0]
    more = first.sequence + engine.get_tokenizer().encode("\nAnd what is 3 plus 4?")
    (second,) = sample(engine, [more], [{"record": first.record.to_bytes()}], max_tokens=16)
    assert gaps(hf_model, [second]).max() <= 1e-4
    assert gaps(hf_model, [Rollout(more, second.tokens, first.record, second.log_probs, [])]).max() > 1e-3


def test_a_trained_router_reaches_the_rollout(engine: Any, routed: Any, tmp_path: Path) -> None:
    """Prefills in chunks, cached prefixes, a batch of several; also a further turn, which asks nothing again."""
    set_perturbation(engine, "tarpo")
    prompts = chat_prompts(engine, copies=2)
    with decisions() as seen:
        fresh = sample(engine, prompts, max_tokens=12, temperature=TEMPERATURE)
        token_gap, gap, count, latent = compare(routed, fresh, seen)
        assert max(token_gap, gap) <= 1e-4 and count == 12 * len(fresh) and latent <= 0.05 * count
        routed_shaken(parameters.attached(routed))
        assert compare(routed, fresh, seen)[1] > 1.0, "not synced yet: this must show"
        sync(engine, routed, tmp_path)
        seen.clear()
        rollouts = sample(engine, prompts, max_tokens=32, temperature=TEMPERATURE)
        token_gap, gap, count, latent = compare(routed, rollouts, seen)
        assert max(token_gap, gap) <= 1e-4, (token_gap, gap)
        assert count == len(seen) and 0.2 * count < latent < 0.8 * count
        assert len({round(pair[0], 3) for pair in seen.values()}) > 0.5 * count, (
            "each position has its own hidden state"
        )
        assert gaps(routed, rollouts, replay=False, temperature=TEMPERATURE).max() > 1e-2
        asked = len(seen)
        first = {"record": rollouts[0].record.to_bytes()}
        further = sample(engine, [rollouts[0].sequence], [first], max_tokens=8, temperature=TEMPERATURE)
        assert len(seen) == asked + 8 and gaps(routed, further, temperature=TEMPERATURE).max() <= 1e-4
    entries, own = replayed(routed, rollouts[:2], weight=0.1)
    routed.zero_grad()
    (torch.cat(entries) - torch.cat(own)).sum().backward()
    assert all(p.grad.abs().max() > 0.0 for p in parameters.attached(routed).parameters())
    assert routed.model.layers[0].mlp.down_proj.weight.grad.abs().max() > 0.0, "the decision trains the policy too"
    routed.zero_grad()


def test_preemption_asks_the_router_nothing_again(narrow: Any, routed: Any) -> None:
    """What was decided before a preemption is in the record, and is fed from there."""
    narrow.preempted.clear()
    set_perturbation(narrow, "tarpo", bias=0.0)
    for parameter in parameters.attached(routed).parameters():
        if len(parameter.shape) == 1:
            parameter.data.copy_(torch.tensor([-4.6, 0.0]))
    with decisions() as seen:
        rollouts = sample(narrow, chat_prompts(narrow), max_tokens=48, temperature=TEMPERATURE)
    assert narrow.preempted, "the cache is not small enough for this test to show anything"
    token_gap, gap, count, latent = compare(routed, rollouts, seen)
    assert max(token_gap, gap) <= 1e-4 and count == len(seen) and 0.3 * count < latent < 0.7 * count
