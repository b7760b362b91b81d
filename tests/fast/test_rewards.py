# SPDX-License-Identifier: Apache-2.0
"""A reward function that fails ends the run with prompt and response; a real run: tests/pipeline/test_faults.py."""

import asyncio
import time
from typing import Any

import pytest
import torch

from ngrpo.trainers.openrlhf.rewards import SECONDS, CheckedReward, RewardFailed
from ngrpo.trainers.openrlhf.rollout_actor import RecordingExecutor
from tests.fast.run import run_with

ANSWER = (["What is 1 + 1? It is 3."], ["What is 1 + 1?"], ["2"])


def raises(queries: Any, prompts: Any, labels: Any) -> Any:
    raise KeyError("answers")


def hangs(queries: Any, prompts: Any, labels: Any) -> Any:
    time.sleep(60)


def gives(value: Any) -> Any:
    return lambda queries, prompts, labels: value


GOOD = [{"rewards": value} for value in (1, 0.5, True, [0.25], torch.tensor([1.0]), torch.tensor(0.0))]


@pytest.mark.parametrize("result", [*GOOD, {"rewards": [1.0], "scores": [0.5], "extra_logs": {}}], ids=str)
def test_numbers_pass_as_they_are(result: dict[str, Any]) -> None:
    checked = CheckedReward(gives(result))
    assert checked(*ANSWER) is result
    checked.raise_failure()


BAD = {
    "raises": (raises, "raised KeyError: 'answers'"),
    "hangs": (hangs, "did not return within 0.05 s"),
    "nothing": (gives(None), "returned 'None' where a dictionary"),
    "a string": (gives({"rewards": "1.0"}), "returned '1.0' as 'rewards' of one response"),
    "nan": (gives({"rewards": float("nan")}), "returned 'nan' as 'rewards'"),
    "infinite": (gives({"rewards": torch.tensor([torch.inf])}), "returned 'tensor"),
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
        asyncio.run(RecordingExecutor(Executor()).execute(prompt="p", sampling_params=None))
