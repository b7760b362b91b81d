# SPDX-License-Identifier: Apache-2.0
"""A reward function that fails ends the run with prompt and response; a real run: tests/pipeline/test_faults.py."""

import asyncio
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.methods.scoring.reward_calls import SECONDS
from ngrpo.trainers.openrlhf.rewards import CheckedExecutor, CheckedReward, RewardFailed
from ngrpo.trainers.openrlhf.rollout_actor import RecordingExecutor
from tests.support.run import run_with

ANSWER = (["What is 1 + 1? It is 3."], ["What is 1 + 1?"], ["2"])


def raises(queries: Any, prompts: Any, labels: Any) -> Any:
    raise KeyError("answers")


def hangs(queries: Any, prompts: Any, labels: Any) -> Any:
    time.sleep(60)


def gives(value: Any) -> Any:
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


@pytest.mark.parametrize("name", GOOD)
def test_one_number_becomes_a_float(name: str) -> None:
    given, wanted = GOOD[name]
    checked = CheckedReward(gives({"rewards": given, "scores": given, "extra_logs": {"length": 3}}))
    result = checked(*ANSWER)
    assert result == {"rewards": wanted, "scores": wanted, "extra_logs": {"length": 3}}
    assert type(result["rewards"]) is type(result["scores"]) is float
    checked.raise_failure()
    assert CheckedReward(gives({"rewards": given, "scores": None}))(*ANSWER)["scores"] is None


BAD = {
    "raises": (raises, "raised KeyError: 'answers'"),
    "hangs": (hangs, "did not return within 0.05 s"),
    "nothing": (gives(None), "returned 'None' where a dictionary"),
    "a string": (gives({"rewards": "1.0"}), "returned '1.0' as 'rewards' of one response"),
    "nan": (gives({"rewards": float("nan")}), "returned 'nan' as 'rewards'"),
    "infinite": (gives({"rewards": torch.tensor([torch.inf])}), "returned 'tensor"),
    "too large": (gives({"rewards": 10**400}), "returned '1000"),
    "an exact number of another kind": (gives({"rewards": Fraction(1, 2)}), "returned '1/2' as 'rewards'"),
    "a complex number": (gives({"rewards": np.array([1j])}), "as 'rewards' of one response"),
    "no value": (gives({"rewards": []}), "returned '[]' as 'rewards'"),
    "a list of results": (gives([{"rewards": 1.0}]), "where a dictionary with 'rewards' is needed"),
    "two values": (gives({"rewards": [1.0, 0.0]}), "as 'rewards' of one response"),
    "scores": (gives({"rewards": 1.0, "scores": "good"}), "returned 'good' as 'scores'"),
}


@pytest.mark.parametrize("name", BAD)
def test_anything_else_names_the_response(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, message = BAD[name]
    if name == "hangs":
        monkeypatch.setenv(SECONDS, "0.05")
    checked = CheckedReward(function)
    with pytest.raises(RewardFailed) as failure:
        checked(*ANSWER)
    for part in (message, "prompt: 'What is 1 + 1?'", "response: ' It is 3.'", "a finite number"):
        assert part in str(failure.value)
    with pytest.raises(RewardFailed, match="the reward function"):
        checked.raise_failure()


def test_the_executor_raises_what_openrlhf_swallows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Executor:
        """As OpenRLHF's SingleTurnAgentExecutor."""

        reward_func = staticmethod(raises)

        async def execute(self, **kwargs: Any) -> dict[str, Any]:
            try:
                await asyncio.to_thread(self.reward_func, *ANSWER)
            except Exception:
                return {"reward": None}
            raise AssertionError("no error")

    run_with(monkeypatch, perturbation={"name": "gumbel"})
    with pytest.raises(RewardFailed, match="raised KeyError"):
        asyncio.run(CheckedExecutor(Executor()).execute(prompt="p", sampling_params=None))
    with pytest.raises(RewardFailed, match=r"^the reward function raised KeyError"):
        recording = RecordingExecutor(CheckedExecutor(Executor()))
        asyncio.run(recording.execute(prompt="p", sampling_params=None))


class Agent:
    """As an agent of a user: nothing of OpenRLHF looks at its numbers."""

    def __init__(self, **response: Any) -> None:
        self._response = {"prompt": "What is 1 + 1?", "observation_tokens": [1, 2], **response}

    async def execute(self, **kwargs: Any) -> dict[str, Any]:
        return self._response


def test_an_agent_has_one_number_too() -> None:
    response = asyncio.run(CheckedExecutor(Agent(reward=np.array([1]), scores=torch.tensor([[0.5]]))).execute())
    assert (response["reward"], response["scores"]) == (1.0, 0.5) and response["observation_tokens"] == [1, 2]
    assert type(response["reward"]) is type(response["scores"]) is float
    unscored = asyncio.run(CheckedExecutor(Agent(reward=None, scores=None)).execute())
    assert unscored["reward"] is unscored["scores"] is None, "a reward model scores it later"


@pytest.mark.parametrize("wrong", [{"reward": float("nan")}, {"reward": 1.0, "scores": [1.0, 2.0]}], ids=str)
def test_an_agent_without_a_number_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(RewardFailed, match=r"Agent returned '.*' as '.*' of one response.\n  prompt: 'What is 1 \+ 1"):
        asyncio.run(CheckedExecutor(Agent(**wrong)).execute())
