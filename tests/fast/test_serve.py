# SPDX-License-Identifier: Apache-2.0
"""The middleware of `vllm serve` and the check of what a request says, without an engine.

With a real server: tests/stack/test_serve.py.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ngrpo.rollout.request_check import checked
from ngrpo.rollout.serve import PerturbationMiddleware
from perturbations import ReplayRecord
from perturbations.errors import UsageError
from perturbations.replay.record import model_fingerprint

KEPT = ReplayRecord(
    seed=7,
    prompt_tokens=2,
    num_tokens=4,
    positions=np.array([2]),
    ids=np.array([[5]]),
    weights=np.array([[1.0]], dtype=np.float32),
    sigma=None,
    agreed=np.array([True]),
    model=model_fingerprint(49152, 576),
)
RECORD = KEPT.to_bytes()
OF_ANOTHER_MODEL = dataclasses.replace(KEPT, model=model_fingerprint(49152, 960)).to_bytes()
WITH_A_TOKEN_TOO_MANY = dataclasses.replace(KEPT, ids=np.array([[49152]])).to_bytes()
# vLLM's configuration of a model, as far as the check reads it.
MODEL = SimpleNamespace(hf_text_config=SimpleNamespace(), get_vocab_size=lambda: 49152, get_hidden_size=lambda: 576)


class Params(SimpleNamespace):
    """vLLM's sampling parameters, as far as the check reads them."""

    def clone(self) -> Params:
        return Params(**vars(self))


def params(arguments: Any) -> Params:
    return Params(extra_args={"perturbation": arguments, "other": 1})


def test_arguments_pass_and_text_is_read() -> None:
    for untouched in (Params(extra_args=None), Params(extra_args={"other": 1}), params({"seed": 3, "record": RECORD})):
        assert checked(untouched, MODEL) is untouched
    text = json.dumps({"seed": 3, "enabled": True, "record": base64.b64encode(RECORD).decode()})
    given = params(text)
    found = checked(given, MODEL)
    assert found.extra_args == {"perturbation": {"seed": 3, "enabled": True, "record": RECORD}, "other": 1}
    assert given.extra_args["perturbation"] == text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("[1]", "must be a dictionary"),
        ("{", "no JSON object"),
        ('{"record": "*"}', "base64"),
        ({"sed": 3}, "'sed'] is unknown. Known: seed, sample, enabled, record"),
        ({"seed": "3"}, "must be an integer"),
        ({"seed": True}, "must be an integer"),
        ({"enabled": 1}, "must be True or False"),
        ({"record": "text"}, "must be the bytes of a record"),
        ({"record": RECORD[:-1]}, "is damaged"),
        ({"record": OF_ANOTHER_MODEL}, "it is of another model"),
        ({"record": WITH_A_TOKEN_TOO_MANY}, "token id 49152 is none of the model's"),
        (3, "must be a dictionary"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, said: str) -> None:
    with pytest.raises(UsageError) as error:
        checked(params(arguments), MODEL)
    assert said in str(error.value)


class Server:
    """What stands behind the middleware: keeps what arrives, and answers."""

    def __init__(self, answer: dict[str, Any], held: dict[str, Any]) -> None:
        self.answer, self.held, self.got = answer, held, None
        self.state = SimpleNamespace(engine_client=self)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.got = json.loads((await receive())["body"])
        assert dict(scope["headers"])[b"content-length"] == str(len(json.dumps(self.got))).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = json.dumps(self.answer).encode()
        await send({"type": "http.response.body", "body": body[:5], "more_body": True})
        await send({"type": "http.response.body", "body": body[5:]})

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "perturbation_fingerprint":
            return ["abc"]
        return [{name: self.held[name] for name in self.held if name.rpartition("-")[0] in args[0]}]


def ask(server: Server, request: Any, path: str = "/v1/completions") -> tuple[int, Any]:
    """Status and answer of one request through the middleware."""
    sent: list[Any] = []
    body = json.dumps(request).encode()

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "app": server}
    asyncio.run(PerturbationMiddleware(server)(scope, receive, send))
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


LOG_PROBS = np.array([-0.5, -1.0], dtype=np.float32).tobytes()


@pytest.mark.parametrize(
    ("path", "answer", "names"),
    [
        ("/v1/chat/completions", {"id": "chatcmpl-1", "choices": [{"index": 0}]}, ["chatcmpl-1"]),
        (
            "/v1/chat/completions",
            {"id": "chatcmpl-1", "choices": [{"index": 1}, {"index": 0}]},
            ["0_chatcmpl-1", "1_chatcmpl-1"],
        ),
        ("/v1/completions", {"id": "cmpl-1", "choices": [{"index": 0}, {"index": 1}]}, ["cmpl-1-0", "cmpl-1-1"]),
        (
            "/v1/completions",
            {"id": "cmpl-1", "choices": [{"index": i} for i in range(4)]},
            ["0_cmpl-1-0", "1_cmpl-1-0", "0_cmpl-1-1", "1_cmpl-1-1"],
        ),
    ],
)
def test_each_choice_has_its_record(path: str, answer: dict[str, Any], names: list[str]) -> None:
    held = {f"{name}-12345678": (str(i).encode(), LOG_PROBS, b"") for i, name in enumerate(names)}
    server = Server(answer, held)
    status, found = ask(server, {"prompt": "a", "perturbation": {"seed": 3, "return_record": True}}, path)
    assert status == 200
    for choice in found["choices"]:
        assert base64.b64decode(choice["perturbation_record"]) == str(choice["index"]).encode()
        assert choice["perturbation_log_probs"] == [-0.5, -1.0]
    assert server.got == {"prompt": "a", "vllm_xargs": {"perturbation": '{"seed": 3}'}}


def test_other_requests_go_by() -> None:
    server = Server({"id": "cmpl-1", "choices": [{"index": 0}]}, {})
    assert ask(server, {"prompt": "a"}) == (200, server.answer) and server.got == {"prompt": "a"}
    assert ask(server, {"perturbation": {"seed": 3}}, "/v1/embeddings") == (200, server.answer)
    assert server.got == {"perturbation": {"seed": 3}}
    assert ask(server, {"perturbation": {"enabled": False}, "vllm_xargs": {"a": 1}}) == (200, server.answer)
    assert server.got == {"vllm_xargs": {"a": 1, "perturbation": '{"enabled": false}'}}


@pytest.mark.parametrize(
    ("request_", "status", "said"),
    [
        ({"perturbation": {"return_record": True}, "stream": True}, 400, "not streamed"),
        ({"perturbation": {"return_record": "yes"}}, 400, "must be true or false"),
        ({"perturbation": {"return_record": True}}, 500, "the replay buffer dropped it"),
    ],
)
def test_what_cannot_be_had_is_an_error(request_: Any, status: int, said: str) -> None:
    found = ask(Server({"id": "cmpl-1", "choices": [{"index": 0}]}, {}), request_)
    assert found[0] == status and said in found[1]["error"]["message"]
