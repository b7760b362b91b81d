# SPDX-License-Identifier: Apache-2.0
"""A reward function that fails ends the run with prompt and response; a real run: tests/pipeline/test_faults.py."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from datetime import date
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, ClassVar
from unicodedata import normalize

import numpy as np
import pytest
import torch

from ngrpo.methods.scoring.reward_calls import SECONDS
from ngrpo.trainers.openrlhf import rewards
from ngrpo.trainers.openrlhf.rewards import (
    CheckedExecutor,
    CheckedReward,
    CheckedServers,
    RewardFailed,
    query_of,
    take_partial_metrics,
)
from ngrpo.trainers.openrlhf.rollout_actor import RecordingExecutor
from tests.support.run import run_with

SCORED = ("What is 1 + 1? It is 3.", "What is 1 + 1?", "2")
"""Query, prompt and label of one response."""


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
    "list of a numpy number": ([np.float32(0.5)], 0.5),
    "list of a tensor": ([torch.tensor([0.5])], 0.5),
    "half precision": (torch.tensor([[0.5]], dtype=torch.bfloat16), 0.5),
    "tensor of a list": (torch.tensor([1.0]), 1.0),
    "tensor": (torch.tensor(0.0), 0.0),
}


@pytest.mark.parametrize(("value", "number"), GOOD.values(), ids=GOOD)
def test_one_number_becomes_a_float(value: Any, number: float) -> None:
    checked = CheckedReward(returns({"rewards": value, "scores": value, "extra_logs": {"length": 3}}))
    result = asyncio.run(checked.reward_of(*SCORED))
    assert result == {"rewards": number, "scores": number, "extra_logs": {"length": 3}}
    assert type(result["rewards"]) is float
    assert type(result["scores"]) is float


def test_scores_may_be_none() -> None:
    checked = CheckedReward(returns({"rewards": 1.0, "scores": None}))
    assert asyncio.run(checked.reward_of(*SCORED))["scores"] is None


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
        asyncio.run(checked.reward_of(*SCORED))

    error = str(failure.value)
    assert message in error
    assert "prompt: 'What is 1 + 1?'" in error
    assert "response: ' It is 3.'" in error
    assert "a finite number" in error


# ---- through OpenRLHF's executors ---------------------------------------------------------------------------------


class Tokenizer:
    """A token is a character. As Qwen's, it normalises what it reads (NFC)."""

    def __call__(self, text: str, **_: object) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(character) for character in normalize("NFC", text)]])}

    def decode(self, tokens: list[int], **_: object) -> str:
        return "".join(map(chr, tokens))


class Engine:
    """Responds with one text to everything."""

    def __init__(self, response: str) -> None:
        self._tokens = [ord(character) for character in response]

    async def generate(self, *_: object, **__: object) -> Any:
        text = "".join(map(chr, self._tokens))
        output = SimpleNamespace(token_ids=self._tokens, text=text, finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[output])


def executed(executor: Any, prompt: str = "What is 1 + 1?", response: str = " It is 3.") -> dict[str, Any]:
    """What an executor returns for a prompt of at most 48 tokens and this response."""
    return asyncio.run(
        executor.execute(
            prompt=prompt,
            label="2",
            max_length=64,
            hf_tokenizer=Tokenizer(),
            sampling_params=SimpleNamespace(max_tokens=16, logprobs=None),
            llm_engine=Engine(response),
        )
    )


def single_turn(reward_func: Any) -> Any:
    """OpenRLHF's executor with this reward function, as it loads one of a file."""
    executor = pytest.importorskip("openrlhf.utils.agent").SingleTurnAgentExecutor()
    executor.reward_endpoints = ["reward.py"]
    executor.reward_func = reward_func
    return executor


def test_a_reward_function_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RewardFailed, match="raised KeyError"):
        executed(CheckedExecutor(single_turn(raises)))
    run_with(monkeypatch, perturbation={"name": "gumbel"})
    with pytest.raises(RewardFailed, match=r"^the reward function raised KeyError"):
        executed(RecordingExecutor(CheckedExecutor(single_turn(raises))))


PROMPTS = {
    "plain": "What is 1 + 1?",
    "normalised by the tokenizer": "Combien font 1 + 1 e\u0301le\u0300ves?",
    "cut": "x" * 60,
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_a_query_is_the_prompt_and_the_response(prompt: str) -> None:
    """So that `query[len(prompt):]`, which most reward functions take, is the response."""

    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
        assert (prompts, labels) == ([prompt], ["2"])
        return {"rewards": float(queries[0][len(prompt) :] == " It is 3."), "extra_logs": {"length": len(queries[0])}}

    response = executed(CheckedExecutor(single_turn(reward_func)), prompt)
    assert response["reward"] == response["scores"] == 1.0
    assert response["extra_logs"] == {"length": len(prompt) + 9}
    assert response["truncated"] is False


def test_a_response_keeps_the_space_that_a_tokenizer_drops_at_a_text_s_beginning() -> None:
    class Stripping(Tokenizer):
        def decode(self, tokens: list[int], **_: object) -> str:
            return super().decode(tokens).removeprefix(" ")

    response = {"prompt": "1 + 1 =", "observation_tokens": [ord(c) for c in "1 + 1 = 2"], "action_ranges": [(7, 9)]}
    assert query_of(Stripping(), response) == "1 + 1 = 2"


STEPS = {"float": 0.5, "int": 1, "tensor": torch.tensor(0.5), "list": [0.25]}


def agents_of(reward: Any) -> Any:
    """OpenRLHF's executor of agents whose one step gives this reward."""
    module = pytest.importorskip("openrlhf.utils.agent")

    class Judge(module.AgentInstanceBase):
        def __init__(self) -> None:
            pass

        async def step(self, states: dict[str, Any], **_: object) -> dict[str, Any]:
            return {"rewards": reward, "environment_feedback": "", "done": True}

    return module.MultiTurnAgentExecutor(Judge)


@pytest.mark.parametrize("reward", STEPS.values(), ids=STEPS)
def test_an_agent_s_step_may_give_its_reward_in_any_form(reward: Any) -> None:
    number = torch.as_tensor(reward).item()
    assert executed(CheckedExecutor(agents_of(reward)))["reward"] == number


@pytest.mark.parametrize("reward", [None, "good", float("nan"), [1.0, 0.0]], ids=str)
def test_an_agent_s_step_without_one_number_is_named(reward: Any) -> None:
    message = r"Judge\.step returned '.*' as 'rewards' of one response.*\n  prompt: 'What is 1 \+ 1.*\nAn agent must"
    with pytest.raises(RewardFailed, match=message):
        executed(CheckedExecutor(agents_of(reward)))


def agents_with_steps(*steps: object) -> Any:
    """OpenRLHF's executor of agents whose steps return these values in turn."""
    module = pytest.importorskip("openrlhf.utils.agent")

    class Steps(module.AgentInstanceBase):
        def __init__(self) -> None:
            self._steps = iter(steps)

        async def step(self, states: dict[str, Any], **_: object) -> object:
            return next(self._steps)

    return module.MultiTurnAgentExecutor(Steps)


def test_logs_of_an_agent_s_earlier_turns_are_kept() -> None:
    """OpenRLHF keeps the last turn's alone. Of a name that two turns give, the later value counts."""
    step = {"rewards": 0.5, "environment_feedback": " more", "done": False}
    logs: tuple[Any, ...] = ({"calls": 1, "found": True}, None, {"calls": 3})
    steps = [{**step, "extra_logs": turn, "done": number == 2} for number, turn in enumerate(logs)]
    executor = CheckedExecutor(agents_with_steps(*steps))
    assert executed(executor)["extra_logs"] == {"calls": 3.0, "found": 1.0}
    done = CheckedExecutor(agents_with_steps({**step, "done": True}))
    assert executed(done)["extra_logs"] == {}


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (None, "'None' where a dictionary is needed"),
        ({"rewards": 1.0, "environment_feedback": ""}, "a dictionary without 'done'"),
        ({"rewards": 1.0, "environment_feedback": None, "done": True}, "a dictionary without 'environment_feedback'"),
        ({"rewards": 1.0, "environment_feedback": "", "done": True, "extra_logs": {"kl": 1}}, "with 'kl', which is"),
    ],
)
def test_what_an_agent_s_step_lacks_is_named(step: object, message: str) -> None:
    with pytest.raises(RewardFailed, match=rf"Steps\.step returned .*{message}.*\n  prompt: 'What is 1 \+ 1"):
        executed(CheckedExecutor(agents_with_steps(step)))


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


def test_an_agent_s_reward_is_its_score_where_it_has_none() -> None:
    """OpenRLHF's dynamic filtering keeps every group without scores."""
    for response in ({"reward": 0.5}, {"reward": 0.5, "scores": None, "extra_logs": None}):
        assert response_of(**response)["scores"] == 0.5


def test_an_agent_s_further_metrics_become_floats() -> None:
    logs = {"turns": 3, "found": torch.tensor([True])}
    assert response_of(reward=1.0, extra_logs=logs)["extra_logs"] == {"turns": 3.0, "found": 1.0}
    assert response_of(reward=1.0, extra_logs=None)["extra_logs"] == {}


def test_an_agent_may_leave_the_score_to_a_reward_model(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, openrlhf=("--reward.model_name_or_path", "judge"))
    unscored = response_of(reward=None, scores=None)
    assert unscored["reward"] is None
    assert unscored["scores"] is None


WRONG_AGENTS: list[tuple[dict[str, Any], str]] = [
    ({"reward": float("nan")}, "'nan' as 'reward' of one response"),
    ({"reward": 1.0, "scores": [1.0, 2.0]}, r"'\[1.0, 2.0\]' as 'scores' of one response"),
    ({}, "no 'reward'"),
    ({"reward": None, "scores": 1.0}, "no 'reward'"),
    ({"reward": 0.0, "extra_logs": {"reward": 5.0}}, "'extra_logs' with 'reward', which is a metric of .*"),
    ({"reward": 0.0, "extra_logs": {"acc": float("nan")}}, """'nan' as "extra_logs\\['acc'\\]" of one response"""),
    ({"reward": 0.0, "extra_logs": {"acc": [1, 2]}}, """'\\[1, 2\\]' as "extra_logs\\['acc'\\]" of one response"""),
    ({"reward": 0.0, "extra_logs": {"acc": "x"}}, """'x' as "extra_logs\\['acc'\\]" of one response"""),
    ({"reward": 0.0, "extra_logs": {"acc": None}}, """'None' as "extra_logs\\['acc'\\]" of one response"""),
    ({"reward": 0.0, "extra_logs": [1.0]}, r"'\[1.0\]' as 'extra_logs' where a dictionary of numbers is needed"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_AGENTS, ids=str)
def test_an_agent_without_a_number_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardFailed, match=rf"Agent returned {message}\.\n  prompt: 'What is 1 \+ 1.*\nAn agent must"):
        response_of(**wrong)


# ---- servers -----------------------------------------------------------------------------------------------------

GOOD_ANSWER = b'{"rewards": 0.5}'
JSON, HTML = "application/json", "text/html"


class Server(BaseHTTPRequestHandler):
    """Gives the next of a test's answers, and keeps what it was asked."""

    answers: ClassVar[list[tuple[int, str, bytes]]] = []
    requests: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status, content_type, content = self.answers.pop(0)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Not on the screen."""


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a running :class:`Server`; requests are repeated without a pause."""
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(rewards, "_SERVER_PAUSE", 0.0)
    Server.answers.clear()
    Server.requests.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/reward"
        server.shutdown()


def answer_of(address: str, *, label: Any = "2") -> dict[str, Any]:
    """A server's answer for one response."""
    query, prompt, _ = SCORED
    return asyncio.run(CheckedServers([address]).reward_of(query, prompt, label))


def failure_of(address: str, *, label: Any = "2") -> str:
    with pytest.raises(RewardFailed) as failure:
        answer_of(address, label=label)
    return str(failure.value)


def test_a_server_s_refusal_is_said_and_not_repeated(address: str) -> None:
    Server.answers += [(422, JSON, b'{"detail":"labels: str expected"}')] * 5
    message = (
        f"""the reward server {address} answered with status 422, {JSON}: '{{"detail":"labels: str expected"}}'."""
    )
    assert failure_of(address).startswith(f"{message}\n  prompt: 'What is 1 + 1?'\n  response: ' It is 3.'\nIt must")
    query, prompt, label = SCORED
    assert Server.requests == [{"query": [query], "prompts": [prompt], "labels": [label]}]


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ((500, HTML, b"x" * 300), f"answered with status 500, text/html: '{'x' * 199}…'"),
        ((200, HTML, b"<p>hello</p>"), "answered with status 200, text/html: '<p>hello</p>'"),
        ((200, JSON, b"{"), "answered with status 200, application/json: '{'"),
    ],
)
def test_a_server_s_last_answer_is_said(last: tuple[int, str, bytes], said: str, address: str) -> None:
    Server.answers += [(503, HTML, b"busy")] * 4 + [last]
    assert f"the reward server {address} {said}." in failure_of(address)
    assert len(Server.requests) == 5


def test_a_busy_server_is_asked_again(address: str) -> None:
    Server.answers += [(500, HTML, b""), (429, HTML, b"later"), (408, HTML, b"late"), (200, JSON, GOOD_ANSWER)]
    assert answer_of(address) == {"rewards": 0.5}
    assert len(Server.requests) == 4


def test_a_label_that_json_cannot_hold_is_not_sent(address: str) -> None:
    said = failure_of(address, label=[date(2024, 1, 1)])
    assert said.startswith("the label cannot be sent as JSON: Object of type date is not JSON serializable, in '[dat")
    assert "prompt: 'What is 1 + 1?'" in said and "Store labels as texts" in said
    assert Server.requests == []


def test_an_address_without_a_server_says_why(address: str) -> None:
    assert "http://127.0.0.1:9/ gave no answer (Cannot connect to host 127.0.0.1:9" in failure_of("http://127.0.0.1:9/")
