# SPDX-License-Identifier: Apache-2.0
"""A perturbation with parameters, and one with dense vectors, on the real engine: exact, synced, recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ngrpo.machine.storage import parameters_file
from ngrpo.rollout import set_perturbation
from perturbations import create, parameters
from tests.stack.harness import CROWDED, Rollout, build_engine, chat_prompts, gaps, sample, sync
from tests.stack.scheduling import note_preemptions
from tests.two_ranks import run_two_ranks

pytestmark = pytest.mark.stack
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
    """The shared model with HRPO's gate beside it, for one test."""
    parameters.attach(hf_model, create("hrpo"))
    yield hf_model
    detach(hf_model)


def detach(model: Any) -> None:
    if parameters.attached(model) is not None:
        delattr(model, parameters.NAME)


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


def test_the_checkpoint_carries_the_gate_and_stays_an_ordinary_model(gated: Any, tmp_path: Path) -> None:
    """save_pretrained as OpenRLHF calls it; then both sides start from the folder."""
    from transformers import AutoModelForCausalLM

    module = shaken(parameters.attached(gated))
    detach(gated)
    perturbation = create("hrpo")
    parameters_file.attach(gated, perturbation, str(tmp_path))
    parameters.load(parameters.attached(gated), dict(module.named_parameters()))
    gated.save_pretrained(tmp_path, state_dict=gated.state_dict())
    del gated.save_pretrained
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]
    parameters_file.attach(loaded, perturbation, str(tmp_path))
    for name, value in module.named_parameters():
        assert torch.equal(dict(parameters.attached(loaded).named_parameters())[name], value)


@pytest.fixture(scope="module")
def narrow(model: str) -> Iterator[Any]:
    """A cache of eight blocks of 32 tokens: trajectories are thrown out and computed again from their records."""
    llm = build_engine(model, {"name": DENSE}, **CROWDED)
    llm.preempted = note_preemptions(llm)
    yield llm


@pytest.mark.parametrize("name", [DENSE, "hrpo"], ids=["dense", "hrpo"])
def test_preemption_with_recomputation(narrow: Any, gated: Any, name: str) -> None:
    narrow.preempted.clear()
    set_perturbation(narrow, name, rate=0.5)
    rollouts = sample(narrow, chat_prompts(narrow, copies=2), max_tokens=48)
    assert len(narrow.preempted) >= 3, "the cache is not small enough for this test to show anything"
    if name == DENSE:
        detach(gated)
    assert gaps(gated, rollouts).max() <= 1e-4


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


def test_two_ranks_under_zero_2_and_3(tmp_path: Path) -> None:
    """In processes of their own: gradient, learning rates, checkpoint; also where a rank has nothing perturbed."""
    run_two_ranks("tests.stack.zero_gate", str(tmp_path))
    assert (tmp_path / "zero-3" / parameters_file.FILE).is_file()
