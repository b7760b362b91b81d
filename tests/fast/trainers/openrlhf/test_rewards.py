# SPDX-License-Identifier: Apache-2.0
"""A reward function that fails ends the run with prompt and response; a real run: tests/pipeline/test_faults.py."""

import asyncio
import time
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.methods.scoring.reward_calls import SECONDS
from ngrpo.trainers.openrlhf.rewards import CheckedExecutor, CheckedReward, RewardFailed, take_partial_metrics
from ngrpo.trainers.openrlhf.rollout_actor import RecordingExecutor
from tests.support.run import run_with

SCORED = (["What is 1 + 1? It is 3."], ["What is 1 + 1?"], ["2"])
"""Queries, prompts and labels of one response, as OpenRLHF passes them."""


def raises(queries: Any, prompts: Any, labels: Any) -> Any:
    raise KeyError("answers")


def hangs(queries: Any, prompts: Any, labels: Any) -> Any:
    time.sleep(60)


def returns(value: Any) -> Any:
    """A reward function that returns ``value``."""
    return lambda queries, prompts, labels: value


GOOD = {
    "int": (1, 1.0),
    "float": (0.5, 0.5),
    "bool": (True, 1.0),
    "list": ([0.25], 0.25),
    "nested tuple": (((0.25,),), 0.25),
    "numpy array": (np.array([0.5], np.float32), 0.5),
    "numpy number": (np.float64(0.5), 0.5),
    "numpy bool": (np.bool_(True), 1.0),
    "half precision": (torch.tensor([[0.5]], dtype=torch.bfloat16), 0.5),
    "tensor of a list": (torch.tensor([1.0]), 1.0),
    "tensor": (torch.tensor(0.0), 0.0),
}


@pytest.mark.parametrize(("value", "number"), GOOD.values(), ids=GOOD)
def test_one_number_becomes_a_float(value: Any, number: float) -> None:
    checked = CheckedReward(returns({"rewards": value, "scores": value, "extra_logs": {"length": 3}}))
    result = checked(*SCORED)
    assert result == {"rewards": number, "scores": number, "extra_logs": {"length": 3}}
    assert type(result["rewards"]) is float
    assert type(result["scores"]) is float
    checked.raise_failure()  # there is none


def test_scores_may_be_none() -> None:
    checked = CheckedReward(returns({"rewards": 1.0, "scores": None}))
    assert checked(*SCORED)["scores"] is None


BAD = {
    "raises": (raises, "raised KeyError: 'answers'"),
    "hangs": (hangs, "did not return within 0.05 s"),
    "nothing": (returns(None), "returned 'None' where a dictionary"),
    "a string": (returns({"rewards": "1.0"}), "returned '1.0' as 'rewards' of one response"),
    "nan": (returns({"rewards": float("nan")}), "returned 'nan' as 'rewards'"),
    "infinite": (returns({"rewards": torch.tensor([torch.inf])}), "returned 'tensor"),
    "too large": (returns({"rewards": 10**400}), "returned '1000"),
    "an exact number of another kind": (returns({"rewards": Fraction(1, 2)}), "returned '1/2' as 'rewards'"),
    "a complex number": (returns({"rewards": np.array([1j])}), "as 'rewards' of one response"),
    "no value": (returns({"rewards": []}), "returned '[]' as 'rewards'"),
    "a list of results": (returns([{"rewards": 1.0}]), "where a dictionary with 'rewards' is needed"),
    "two values": (returns({"rewards": [1.0, 0.0]}), "as 'rewards' of one response"),
    "scores": (returns({"rewards": 1.0, "scores": "good"}), "returned 'good' as 'scores'"),
}


@pytest.mark.parametrize(("reward_func", "message"), BAD.values(), ids=BAD)
def test_anything_else_names_the_response(reward_func: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reward_func is hangs:
        monkeypatch.setenv(SECONDS, "0.05")
    checked = CheckedReward(reward_func)

    with pytest.raises(RewardFailed) as failure:
        checked(*SCORED)

    error = str(failure.value)
    assert message in error
    assert "prompt: 'What is 1 + 1?'" in error
    assert "response: ' It is 3.'" in error
    assert "a finite number" in error
    with pytest.raises(RewardFailed, match="the reward function"):
        checked.raise_failure()


class SwallowingExecutor:
    """As OpenRLHF's SingleTurnAgentExecutor, whose reward function raises."""

    reward_func = staticmethod(raises)

    async def execute(self, **kwargs: Any) -> dict[str, Any]:
        try:
            await asyncio.to_thread(self.reward_func, *SCORED)
        except Exception:
            return {"reward": None}
        raise AssertionError("no error")


def test_the_executor_raises_what_openrlhf_swallows() -> None:
    with pytest.raises(RewardFailed, match="raised KeyError"):
        asyncio.run(CheckedExecutor(SwallowingExecutor()).execute(prompt="p", sampling_params=None))


def test_the_error_is_not_wrapped_where_trajectories_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, perturbation={"name": "gumbel"})
    recording = RecordingExecutor(CheckedExecutor(SwallowingExecutor()))
    with pytest.raises(RewardFailed, match=r"^the reward function raised KeyError"):
        asyncio.run(recording.execute(prompt="p", sampling_params=None))


class Agent:
    """As an agent of a user: nothing of OpenRLHF looks at its numbers."""

    def __init__(self, **response: Any) -> None:
        self._response = {"prompt": "What is 1 + 1?", "observation_tokens": [1, 2], **response}

    async def execute(self, **kwargs: Any) -> dict[str, Any]:
        return self._response


def response_of(**response: Any) -> dict[str, Any]:
    """What the checked executor of an agent returns for a response with these fields."""
    return asyncio.run(CheckedExecutor(Agent(**response)).execute(sampling_params=None))


def test_each_response_has_sampling_parameters_of_its_own() -> None:
    """OpenRLHF's executor of agents sets the length of the responses that it requests by their observation."""

    class Shortening:
        async def execute(self, sampling_params: Any) -> dict[str, Any]:
            sampling_params.max_tokens -= 10
            return {"reward": 1.0, "scores": 1.0, "max_tokens": sampling_params.max_tokens}

    async def two_responses() -> list[dict[str, Any]]:
        shared = SimpleNamespace(max_tokens=100)
        executor = CheckedExecutor(Shortening())
        return await asyncio.gather(*(executor.execute(sampling_params=shared) for _ in range(2)))

    assert [response["max_tokens"] for response in asyncio.run(two_responses())] == [90, 90]


def test_a_metric_that_some_responses_lack_becomes_the_mean_of_the_others() -> None:
    infos = [{"reward": 1.0, "format": 1.0}, {"reward": 0.0}, {"reward": 1.0, "format": 0.0, "late": 2.0}]
    samples = [SimpleNamespace(info={name: torch.tensor([value]) for name, value in info.items()}) for info in infos]
    assert take_partial_metrics(samples) == {"format": 0.5, "late": 2.0}
    assert [list(sample.info) for sample in samples] == [["reward"]] * 3
    assert take_partial_metrics(samples) == {}


def test_an_agent_has_one_number_too() -> None:
    response = response_of(reward=np.array([1]), scores=torch.tensor([[0.5]]))
    assert response["reward"] == 1.0
    assert response["scores"] == 0.5
    assert type(response["reward"]) is float
    assert type(response["scores"]) is float
    assert response["observation_tokens"] == [1, 2]


def test_an_agent_may_leave_the_score_to_a_reward_model() -> None:
    unscored = response_of(reward=None, scores=None)
    assert unscored["reward"] is None
    assert unscored["scores"] is None


@pytest.mark.parametrize("wrong", [{"reward": float("nan")}, {"reward": 1.0, "scores": [1.0, 2.0]}], ids=str)
def test_an_agent_without_a_number_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(RewardFailed, match=r"Agent returned '.*' as '.*' of one response.\n  prompt: 'What is 1 \+ 1"):
        response_of(**wrong)
