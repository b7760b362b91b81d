# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner: exact, with the records of V1, on short answers.

Both runners work in processes of their own, with asynchronous scheduling, as on CUDA; V2's Triton kernels are
interpreted (:mod:`tests.stack.as_on_cuda`), at about a second for each step.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perturbations import create, parameters
from tests.own_process import run_module
from tests.stack.harness import Rollout, feeds_its_text, gaps
from tests.stack.schedule_truth import scheduled_gaps
from tests.stack.test_invariance import assert_same
from tests.stack.v2_cases import PERTURBATIONS, SAMPLING, SCHEDULES, TOKENS

pytestmark = pytest.mark.stack


def rolled_out(runner: str, model: str, folder: Path) -> dict[str, Any]:
    target = folder / f"{runner}.pickle"
    run_module("tests.stack.v2_rollout", runner, model, str(target), timeout=400.0)
    return pickle.loads(target.read_bytes())


@pytest.fixture(scope="module")
def v1(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return rolled_out("V1", tiny, tmp_path_factory.mktemp("v1"))


@pytest.fixture(scope="module")
def v2(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return rolled_out("V2", tiny, tmp_path_factory.mktemp("v2"))


@pytest.fixture(params=["V1", "V2"])
def either(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.getfixturevalue(request.param.lower())


def test_each_process_had_its_runner(v1: dict[str, Any], v2: dict[str, Any]) -> None:
    assert (v1["runner"], v2["runner"]) == (["V1"], ["V2"])
    assert v1["asynchronous"] and v2["asynchronous"]


def test_the_warm_up_leaves_nothing_behind(v2: dict[str, Any]) -> None:
    """It takes steps as with real requests, before any of the rollouts below; those are as V1's, which has none."""
    warm_up = v2["warm_up"]
    assert warm_up["records"] >= 4 and warm_up["edits"] >= 4
    assert (warm_up["left"], warm_up["running"]) == (0, 0)


@pytest.fixture
def reference(hf_model: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The trainer's side; a perturbation with parameters has its module beside the model."""
    perturbation = create(request.getfixturevalue("name"))
    if perturbation.module(hf_model.config.hidden_size) is not None:
        parameters.attach(hf_model, perturbation)
    yield hf_model
    if parameters.attached(hf_model) is not None:
        delattr(hf_model, parameters.NAME)


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_replay_equals_rollout(either: dict[str, Any], reference: Any, name: str) -> None:
    rollouts = either["of_every_perturbation"][name]
    gap = gaps(reference, rollouts)
    assert len(gap) == 3 * TOKENS
    assert gap.max() <= 1e-4
    assert sum(len(r.record) for r in rollouts) >= 4
    shows = gaps(reference, rollouts, replay=False).max() >= 1e-2
    assert shows or (name == "cuts" and feeds_its_text(rollouts)), "leaving the replay out must show"


def test_the_gap_is_small_on_average(either: dict[str, Any], hf_model: Any) -> None:
    """Over all perturbations: 18 tokens of one are too few, and their plain gap alone is 1.4e-5 at times."""
    found = [gaps(hf_model, rollouts) for name, rollouts in either["of_every_perturbation"].items() if name != "hrpo"]
    assert torch.cat(found).mean() <= 1e-5


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_both_runners_give_the_same_records(v1: dict[str, Any], v2: dict[str, Any], name: str) -> None:
    assert_same(v1["of_every_perturbation"][name], v2["of_every_perturbation"][name])


@pytest.mark.parametrize("name", [*SAMPLING, "switched off"])
def test_sampling_parameters(v1: dict[str, Any], v2: dict[str, Any], hf_model: Any, name: str) -> None:
    """The log-probability is that at temperature, before top-k, top-p and min-p, on both sides."""
    temperature = {"temperature": 0.7, "min-p": 0.7}.get(name, 1.0)
    for found in (v1, v2):
        assert gaps(hf_model, found["of_sampling_parameters"][name], temperature=temperature).max() <= 1e-4
    assert_same(v1["of_sampling_parameters"][name], v2["of_sampling_parameters"][name])


@pytest.mark.parametrize("name", SCHEDULES)
def test_sampling_schedules(v1: dict[str, Any], v2: dict[str, Any], hf_model: Any, name: str) -> None:
    for found in (v1, v2):
        rollouts = found["of_schedules"][name]
        assert scheduled_gaps(hf_model, rollouts, name, SCHEDULES[name], 0.8).max() <= 1e-4
        assert scheduled_gaps(hf_model, rollouts, None, {}, 0.8).max() >= 1e-2
    assert_same(v1["of_schedules"][name], v2["of_schedules"][name])


def test_the_engines_own_log_probabilities_are_untouched(either: dict[str, Any]) -> None:
    for rollout in [r for name in ("greedy", "switched off") for r in either["of_sampling_parameters"][name]]:
        assert torch.allclose(torch.tensor(rollout.engine_log_probs), torch.from_numpy(rollout.log_probs), atol=1e-4)
    off = either["of_sampling_parameters"]["switched off"][0]
    assert len(off.record) == 0


@pytest.mark.parametrize("name", ["token", "string", "samples"])
def test_a_record_ends_where_the_answer_ends(either: dict[str, Any], hf_model: Any, name: str) -> None:
    """An asynchronous engine has computed one more token by the time that a stop is seen."""
    answers = either["of_stops"][name]
    assert len(answers) == 3
    assert any(reason == "stop" and len(tokens) < 12 for reason, _, tokens, *_ in answers)
    for _, prompt, tokens, record, log_probs in answers:
        assert record.num_tokens == len(prompt) + len(tokens)
        assert record.positions.tolist() == list(range(len(prompt), record.num_tokens))
        assert len(log_probs) == len(tokens)
    rollouts = [Rollout(prompt, tokens, record, log_probs, []) for _, prompt, tokens, record, log_probs in answers]
    assert gaps(hf_model, rollouts).max() <= 1e-4
    if name == "samples":
        assert len({tuple(r.tokens) for r in rollouts}) == 3


def test_stops_are_the_same_in_both_runners(v1: dict[str, Any], v2: dict[str, Any]) -> None:
    for name, answers in v1["of_stops"].items():
        for one, other in zip(answers, v2["of_stops"][name]):
            assert one[:3] == other[:3]
            np.testing.assert_array_equal(one[3].ids, other[3].ids)


def test_preemption_with_recomputation(v1: dict[str, Any], v2: dict[str, Any], hf_model: Any) -> None:
    for found in (v1["of_preemption"], v2["of_preemption"]):
        assert found["preempted"] >= 3, "the cache is not small enough for this test to show anything"
        assert gaps(hf_model, found["rollouts"]).max() <= 1e-4
    assert_same(v1["of_preemption"]["rollouts"], v2["of_preemption"]["rollouts"])


def test_no_perturbation_is_stock_vllm(either: dict[str, Any]) -> None:
    stock, none, rate_0 = either["of_stock"]
    assert stock == none == rate_0
