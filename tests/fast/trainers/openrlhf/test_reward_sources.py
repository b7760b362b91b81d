# SPDX-License-Identifier: Apache-2.0
"""Each response has one finite reward, whether a function, a server or a reward model gives it, through OpenRLHF."""

import asyncio
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from ngrpo import patches
from ngrpo.config.run import RunConfig, begin
from ngrpo.machine.upstream import patch
from ngrpo.trainers.openrlhf.rewards import CheckedExecutor, RewardFailed
from tests.support.own_process import RESULT, result_of
from tests.support.run import run_of

REWARDS = (1, 0, 0, 1)  # of a prompt's four responses
FORMS: dict[str, Callable[[int], Any]] = {
    "number": float,
    "whole number": int,
    "list": lambda reward: [float(reward)],
    "numpy array": lambda reward: np.array([reward], np.float32),
    "nested list": lambda reward: [[float(reward)]],
    "tensor": lambda reward: torch.tensor([[float(reward)]]),
}
ANSWERS: dict[str, Callable[[int], Any]] = {
    "number": lambda reward: {"rewards": reward},
    "list": lambda reward: {"rewards": [reward]},
    "as of openrlhf.cli.serve-rm": lambda reward: {
        "rewards": [reward],
        "scores": [reward],
        "extra_logs": {"dummy_scores": [reward]},
    },
}
WRONG: dict[str, tuple[Any, str]] = {
    "nan": ({"rewards": [float("nan")]}, "answered '[nan]' as 'rewards' of one response"),
    "two": ({"rewards": [1.0, 0.0]}, "answered '[1.0, 0.0]' as 'rewards' of one response"),
    "text": ({"rewards": ["1.0"]}, "answered \"['1.0']\" as 'rewards' of one response"),
    "score": ({"rewards": [1.0], "scores": "good"}, "answered 'good' as 'scores' of one response"),
    "other name": ({"reward": [1.0]}, "where a dictionary with 'rewards' is needed"),
    "no dictionary": ([1.0], "answered '[1.0]' where a dictionary with 'rewards' is needed"),
}
pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What OpenRLHF's own executor, server requests and experience maker made of these rewards, with our patches."""
    pytest.importorskip("openrlhf")
    pytest.importorskip("vllm")
    return result_of("tests.fast.trainers.openrlhf.test_reward_sources")


@pytest.mark.parametrize("advantage", ["none", "group_norm"])
@pytest.mark.parametrize(
    "source", [*(f"function {name}" for name in FORMS), *(f"server {name}" for name in ANSWERS), "reward model"]
)
def test_every_source_trains_alike(source: str, advantage: str, found: dict[str, Any]) -> None:
    """(1 − 1/2) / √(1/3) and its negative: a reward of shape (B, 1) made all of them 0."""
    size = 0.5 / (1 / 3) ** 0.5
    assert found[f"{source} {advantage}"] == pytest.approx([size, -size, -size, size], abs=1e-5)


@pytest.mark.parametrize("name", WRONG)
def test_what_a_server_answers_is_checked(name: str, found: dict[str, Any]) -> None:
    message = found[f"wrong {name}"]
    assert WRONG[name][1] in message and "the reward server http://127.0.0.1:" in message
    assert f"/wrong/{name.replace(' ', '_')} answered" in message
    assert "prompt: 'What is it?'" in message and "response: ' It is 1'" in message


def test_an_address_without_a_server_is_named(found: dict[str, Any]) -> None:
    assert "the reward server http://127.0.0.1:9/ gave no answer (Cannot connect to host" in found["no server"]


def test_of_two_servers_each_is_asked_in_turn(found: dict[str, Any]) -> None:
    assert found["turns"] == ["/right/number", "/right/list", "/right/number", "/right/list"]


def test_a_server_gets_what_openrlhf_sends(found: dict[str, Any]) -> None:
    own, of_openrlhf = found["requests"]
    assert own == of_openrlhf
    assert own["labels"] == ["1"] and own["Content-Type"] == "application/json"


# ---- in a process of its own -------------------------------------------------------------------------------------


class Server(BaseHTTPRequestHandler):
    """Answers a request for one response, which ends with its reward, in the form that its path names."""

    requested: ClassVar[list[str]] = []
    contents: ClassVar[list[dict[str, Any]]] = []
    """Of each request, with its headers."""

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        query = content["query"]
        self.requested.append(self.path)
        self.contents.append({**content, **self.headers})
        _, kind, name = self.path.replace("_", " ").split("/")
        answer = WRONG[name][0] if kind == "wrong" else ANSWERS[name](int(query[0][-1]))
        answered = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answered)))
        self.end_headers()
        self.wfile.write(answered)

    def log_message(self, *arguments: object) -> None:
        pass


class Tokenizer:
    """A token is a character."""

    pad_token_id = 0

    def __call__(self, text: str, **_: object) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(character) for character in text]])}

    def decode(self, tokens: list[int], **_: object) -> str:
        return "".join(map(chr, tokens))


def response_of(executor: Any, reward: int) -> dict[str, Any]:
    """OpenRLHF's response to a prompt whose text ends with its reward."""

    class Engine:
        async def generate(self, *_: object, **__: object) -> Any:
            tokens = [ord(character) for character in f" It is {reward}"]
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, finish_reason="stop", logprobs=None)])

    arguments = {"prompt": "What is it?", "label": "1", "max_length": 64, "hf_tokenizer": Tokenizer()}
    sampling = SimpleNamespace(max_tokens=16, logprobs=None)
    return asyncio.run(executor.execute(**arguments, sampling_params=sampling, llm_engine=Engine()))


def main() -> None:
    """Prints the advantages of four responses from every source, and the errors of wrong answers."""
    patches.install(["cpu", "without_flash_attn"])
    patch.place(row for row in patches.active([patches.TRAINING]) if row.module.endswith("experience_maker"))
    from openrlhf.trainer.ppo_utils import experience_maker
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    generator = object.__new__(SamplesGenerator)
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=4, max_new_tokens=16, micro_batch_size=2),
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator="group_norm", gamma=1.0, lambd=1.0)),
        reward=SimpleNamespace(clip_range=(-10, 10)),
        train=SimpleNamespace(dynamic_batch_enable=False),
    )
    result: dict[str, Any] = {}

    def advantages_of(responses: list[dict[str, Any]], of_model: torch.Tensor | None = None) -> list[float]:
        samples = [generator._process_response_into_experience(response, max_len=64) for response in responses]
        made = object.__new__(experience_maker.RemoteExperienceMaker)
        made.args, made.strategy, made.kl_ctl = args, SimpleNamespace(args=args), SimpleNamespace(value=0.0)
        made.advantage_estimator, made.tokenizer = "group_norm", Tokenizer()
        batches = made.split_rollout_samples(samples)
        for place, batch in enumerate(batches):
            batch.kl = torch.zeros_like(batch.action_mask, dtype=torch.float32)
            if of_model is not None:
                batch.rewards = of_model[2 * place : 2 * place + 2]
        batches = made.compute_advantages_and_returns(batches)
        return [
            row[mask.bool()][0].item() for batch in batches for row, mask in zip(batch.advantages, batch.action_mask)
        ]

    def compute(source: str, responses: list[dict[str, Any]], of_model: torch.Tensor | None = None) -> None:
        begin(RunConfig())
        result[f"{source} none"] = advantages_of(responses, of_model)
        begin(run_of(advantage={"name": "group_norm"}))
        result[f"{source} group_norm"] = advantages_of(responses, of_model)

    for name, form in FORMS.items():
        plain = SingleTurnAgentExecutor()
        plain.reward_endpoints = ["reward.py"]
        plain.reward_func = lambda queries, prompts, labels, form=form: {"rewards": form(int(queries[0][-1]))}
        executor = CheckedExecutor(plain)
        compute(f"function {name}", [response_of(executor, reward) for reward in REWARDS])

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for name in ANSWERS:
            executor = CheckedExecutor(SingleTurnAgentExecutor(f"{address}/right/{name.replace(' ', '_')}"))
            compute(f"server {name}", [response_of(executor, reward) for reward in REWARDS])
        for name in WRONG:
            executor = CheckedExecutor(SingleTurnAgentExecutor(f"{address}/wrong/{name.replace(' ', '_')}"))
            result[f"wrong {name}"] = failure_of(executor)
        Server.requested.clear()
        executor = CheckedExecutor(SingleTurnAgentExecutor([f"{address}/right/number", f"{address}/right/list"]))
        for reward in REWARDS:
            response_of(executor, reward)
        result["turns"] = list(Server.requested)
        Server.contents.clear()
        of_openrlhf = SingleTurnAgentExecutor(f"{address}/right/number")
        response_of(CheckedExecutor(SingleTurnAgentExecutor(f"{address}/right/number")), 1)
        response_of(of_openrlhf, 1)
        result["requests"] = list(Server.contents)
        server.shutdown()
    result["no server"] = failure_of(CheckedExecutor(SingleTurnAgentExecutor("http://127.0.0.1:9/")))

    begin(run_of(openrlhf=("--reward.model_name_or_path", "judge")))
    unscored = [response_of(CheckedExecutor(SingleTurnAgentExecutor()), reward) for reward in REWARDS]
    compute("reward model", unscored, torch.tensor([[float(reward)] for reward in REWARDS]))
    print(RESULT + json.dumps(result))


def failure_of(executor: CheckedExecutor) -> str:
    """The message of the error that a response of this executor raises."""
    with pytest.raises(RewardFailed) as failure:
        response_of(executor, 1)
    return str(failure.value)


if __name__ == "__main__":
    main()
