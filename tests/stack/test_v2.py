# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner: exact, with the records of V1, on short answers.

Both runners work in processes of their own, with asynchronous scheduling, as on CUDA; V2's Triton kernels are
interpreted (:mod:`tests.stack.as_on_cuda`), at about a second for each step.
"""

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perturbations import available, create, parameters
from tests.stack.harness import Rollout, assert_same, feeds_its_text, gaps
from tests.stack.routed import compare, shaken
from tests.stack.schedule_truth import scheduled_gaps
from tests.stack.v2_rollout import PERTURBATIONS, SAMPLING, SCHEDULES, STOPS, TOKENS, share_of
from tests.support.own_process import run_module


class Rolled:
    """What a model runner rolled out of a share of the cases: made on first use."""

    def __init__(self, runner: str, model: str, folder: Path) -> None:
        self._runner, self._model, self._folder = runner, model, folder
        self._results: dict[str, dict[str, Any]] = {}

    def __getitem__(self, share: str) -> dict[str, Any]:
        if share not in self._results:
            target = self._folder / f"{self._runner}-{share}.pickle"
            run_module("tests.stack.v2_rollout", self._runner, self._model, str(target), share)
            self._results[share] = pickle.loads(target.read_bytes())
        return self._results[share]

    def perturbed(self, name: str) -> list[Rollout]:
        return self[share_of(name)]["of_every_perturbation"][name]

    def stopped(self, name: str) -> list[Any]:
        return self[share_of(name)]["of_stops"][name]


@pytest.fixture(scope="module")
def v1(model: str, tmp_path_factory: pytest.TempPathFactory) -> Rolled:
    return Rolled("V1", model, tmp_path_factory.mktemp("v1"))


@pytest.fixture(scope="module")
def v2(model: str, tmp_path_factory: pytest.TempPathFactory) -> Rolled:
    return Rolled("V2", model, tmp_path_factory.mktemp("v2"))


@pytest.fixture(params=["V1", "V2"])
def either(request: pytest.FixtureRequest) -> Rolled:
    return request.getfixturevalue(request.param.lower())


def cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if share_of(name) == "test" else pytest.mark.more) for name in names]


def test_every_perturbation_of_the_tree_is_here() -> None:
    in_tree = {name for name, source in available().items() if source.startswith("perturbations.methods")}
    assert in_tree - {"none", "tarpo"} == {name for name in PERTURBATIONS if "." not in name}


def test_each_process_had_its_runner(v1: Rolled, v2: Rolled) -> None:
    assert (v1["test"]["runner"], v2["test"]["runner"]) == (["V1"], ["V2"])
    assert v1["test"]["asynchronous"] and v2["test"]["asynchronous"]


@pytest.mark.more
def test_the_warm_up_leaves_nothing_behind(v2: Rolled) -> None:
    """It takes steps as with real requests, before any of the rollouts below; those are as V1's, which has none."""
    warm_up = v2["more"]["warm_up"]
    assert warm_up["records"] >= 4 and warm_up["edits"] >= 4
    assert (warm_up["left"], warm_up["running"]) == (0, 0)
    assert warm_up["compiled"] == warm_up["compiled_before"] == 2, "vLLM reports what is compiled after its warm-up"


@pytest.fixture
def reference(hf_model: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The trainer's side; a perturbation with parameters has its module beside the model."""
    perturbation = create(request.getfixturevalue("name"))
    if perturbation.module(hf_model.config.hidden_size) is not None:
        parameters.attach(hf_model, perturbation)
    yield hf_model
    if parameters.attached(hf_model) is not None:
        delattr(hf_model, parameters.NAME)


@pytest.mark.parametrize("name", cases(PERTURBATIONS))
def test_replay_equals_rollout(either: Rolled, reference: Any, name: str) -> None:
    rollouts = either.perturbed(name)
    gap = gaps(reference, rollouts)
    assert len(gap) == 3 * TOKENS
    assert gap.max() <= 1e-4
    assert sum(len(r.record) for r in rollouts) >= 4
    shows = gaps(reference, rollouts, replay=False).max() >= 1e-2
    assert shows or (name == "cuts" and feeds_its_text(rollouts)), "leaving the replay out must show"


@pytest.mark.parametrize("share", ["test", pytest.param("more", marks=pytest.mark.more)])
def test_the_gap_is_small_on_average(either: Rolled, hf_model: Any, share: str) -> None:
    """Over all perturbations: 18 tokens of one are too few, and their plain gap alone is 1.4e-5 at times."""
    rolled = either[share]["of_every_perturbation"].items()
    assert torch.cat([gaps(hf_model, rollouts) for name, rollouts in rolled if name != "hrpo"]).mean() <= 1e-5


@pytest.mark.parametrize("name", cases(PERTURBATIONS))
def test_both_runners_give_the_same_records(v1: Rolled, v2: Rolled, name: str) -> None:
    assert_same(v1.perturbed(name), v2.perturbed(name))


@pytest.mark.more
@pytest.mark.parametrize("name", [*SAMPLING, "switched off"])
def test_sampling_parameters(v1: Rolled, v2: Rolled, hf_model: Any, name: str) -> None:
    """The log-probability is that at temperature, before top-k, top-p and min-p, on both sides."""
    temperature = {"temperature": 0.7, "min-p": 0.7}.get(name, 1.0)
    for found in (v1["more"], v2["more"]):
        assert gaps(hf_model, found["of_sampling_parameters"][name], temperature=temperature).max() <= 1e-4
    assert_same(v1["more"]["of_sampling_parameters"][name], v2["more"]["of_sampling_parameters"][name])
    assert name != "switched off" or not len(v2["more"]["of_sampling_parameters"][name][0].record)


@pytest.mark.more
@pytest.mark.parametrize("name", SCHEDULES)
def test_sampling_schedules(v1: Rolled, v2: Rolled, hf_model: Any, name: str) -> None:
    for found in (v1["more"], v2["more"]):
        rollouts = found["of_schedules"][name]
        assert scheduled_gaps(hf_model, rollouts, name, SCHEDULES[name], 0.8).max() <= 1e-4
        assert scheduled_gaps(hf_model, rollouts, None, {}, 0.8).max() >= 1e-2
    assert_same(v1["more"]["of_schedules"][name], v2["more"]["of_schedules"][name])


@pytest.mark.more
@pytest.mark.parametrize("name", ["tarpo"])
def test_the_routers_decisions_are_those_of_the_density(either: Rolled, reference: Any, name: str) -> None:
    rolled = either["more"]["of_tarpo"]
    shaken(parameters.attached(reference))
    token_gap, gap, count, latent = compare(reference, rolled["rollouts"], rolled["seen"])
    assert max(token_gap, gap) <= 1e-4, (token_gap, gap)
    assert count == len(rolled["seen"]) == 3 * TOKENS and 3 <= latent <= 15


@pytest.mark.parametrize("name", cases(STOPS))
def test_a_record_ends_where_the_answer_ends(either: Rolled, hf_model: Any, name: str) -> None:
    """An asynchronous engine has computed one more token by the time that a stop is seen."""
    answers = either.stopped(name)
    assert len(answers) == 3
    assert any(reason == "stop" and len(rollout.tokens) < 12 for reason, rollout in answers)
    rollouts = [rollout for _, rollout in answers]
    for rollout in rollouts:
        assert rollout.record.num_tokens == len(rollout.sequence)
        assert rollout.record.positions.tolist() == list(range(len(rollout.prompt), len(rollout.sequence)))
        assert len(rollout.log_probs) == len(rollout.tokens)
    assert gaps(hf_model, rollouts, temperature=STOPS[name].get("temperature", 1.0)).max() <= 1e-4
    if name == "samples":
        # Each sample is a trajectory of its own, though two of them may say the same.
        assert len({r.record.seed for r in rollouts}) == 3
        assert len({r.record.weights.tobytes() for r in rollouts}) == 3


@pytest.mark.parametrize("name", cases(STOPS))
def test_stops_are_the_same_in_both_runners(v1: Rolled, v2: Rolled, name: str) -> None:
    for (reason, one), (other_reason, other) in zip(v1.stopped(name), v2.stopped(name)):
        assert (reason, one.sequence) == (other_reason, other.sequence)
        np.testing.assert_array_equal(one.record.ids, other.record.ids)


def test_preemption_with_recomputation(v1: Rolled, v2: Rolled, hf_model: Any) -> None:
    for found in (v1["test"]["of_preemption"], v2["test"]["of_preemption"]):
        assert found["preempted"] >= 3, "the cache is not small enough for this test to show anything"
        assert gaps(hf_model, found["rollouts"]).max() <= 1e-4
    assert_same(v1["test"]["of_preemption"]["rollouts"], v2["test"]["of_preemption"]["rollouts"])


@pytest.mark.more
def test_no_perturbation_is_stock_vllm(v2: Rolled) -> None:
    """V1's are in test_invariance.py."""
    stock, rate_0 = v2["more"]["of_stock"]
    assert stock == rate_0
