# SPDX-License-Identifier: Apache-2.0
"""TARPO's router on real engines: what it decides in the rollout is what the trainer's density says of it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ngrpo.rollout import set_perturbation
from perturbations import create, parameters
from tests.own_process import run_module
from tests.stack.harness import CROWDED, build_engine, chat_prompts, gaps, sample, sync
from tests.stack.routed import TEMPERATURE, compare, decisions, replayed, shaken
from tests.stack.scheduling import note_preemptions
from tests.two_ranks import run_two_ranks

pytestmark = [pytest.mark.stack, pytest.mark.more]


@pytest.fixture
def routed(hf_model: Any) -> Iterator[Any]:
    """The shared model with the router beside it, for one test."""
    parameters.attach(hf_model, create("tarpo"))
    yield hf_model
    delattr(hf_model, parameters.NAME)


def test_what_is_trained_reaches_the_rollout(engine: Any, routed: Any, tmp_path: Path) -> None:
    """Prefills in chunks, cached prefixes, a batch of several; also a further turn, which asks nothing again."""
    set_perturbation(engine, "tarpo")
    prompts = chat_prompts(engine, copies=2)
    with decisions() as seen:
        fresh = sample(engine, prompts, max_tokens=12, temperature=TEMPERATURE)
        token_gap, gap, count, latent = compare(routed, fresh, seen)
        assert max(token_gap, gap) <= 1e-4 and count == 12 * len(fresh) and latent <= 0.05 * count
        shaken(parameters.attached(routed))
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


def test_preemption_asks_nothing_again(model: str, routed: Any) -> None:
    """What was decided before a preemption is in the record, and is fed from there."""
    narrow = build_engine(model, {"name": "tarpo", "bias": 0.0}, **{**CROWDED, "max_model_len": 128})
    preempted = note_preemptions(narrow)
    for parameter in parameters.attached(routed).parameters():
        if len(parameter.shape) == 1:
            parameter.data.copy_(torch.tensor([-4.6, 0.0]))
    with decisions() as seen:
        rollouts = sample(narrow, chat_prompts(narrow), max_tokens=40, temperature=TEMPERATURE)
    assert preempted, "the cache is not small enough for this test to show anything"
    token_gap, gap, count, latent = compare(routed, rollouts, seen)
    assert max(token_gap, gap) <= 1e-4 and count == len(seen) and 0.3 * count < latent < 0.7 * count


@pytest.mark.parametrize("runner", [pytest.param("V1", marks=pytest.mark.slow), "V2"])
def test_either_runner_with_asynchronous_scheduling(model: str, routed: Any, tmp_path: Path, runner: str) -> None:
    target = tmp_path / "rolled.pickle"
    run_module("tests.stack.tarpo_rollout", runner, model, str(target), timeout=400.0)
    rolled = pickle.loads(target.read_bytes())
    assert rolled["runner"] == [runner] and rolled["asynchronous"]
    shaken(parameters.attached(routed))
    token_gap, gap, count, latent = compare(routed, rolled["rollouts"], rolled["seen"])
    assert max(token_gap, gap) <= 1e-4, (token_gap, gap)
    assert count == len(rolled["seen"]) == 18 and 3 <= latent <= 15


@pytest.mark.slow
def test_two_ranks_under_zero_2_and_3() -> None:
    """In processes of their own; also where a rank was asked nothing."""
    run_two_ranks("tests.stack.zero_router")
