# SPDX-License-Identifier: Apache-2.0
"""The middleware of `vllm serve` and the check of what a request says, without an engine.

With a real server: tests/stack/test_serve.py.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ngrpo import patches
from ngrpo.machine.upstream.patch_check import PatchMismatch
from ngrpo.rollout import plugin, request_arguments, serve
from ngrpo.rollout.records import LENGTHS
from ngrpo.rollout.request_arguments import checked
from ngrpo.rollout.serve import PerturbationMiddleware
from perturbations import FinishedTrajectory, ReplayRecord
from perturbations.errors import UsageError
from perturbations.replay.trajectory import model_fingerprint

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


@pytest.mark.parametrize(
    "untouched",
    [
        pytest.param(Params(extra_args=None), id="no extra arguments"),
        pytest.param(Params(extra_args={"other": 1}), id="those of others"),
        pytest.param(params({"seed": 3, "record": RECORD}), id="seed and record"),
        pytest.param(params({"training_step": 7, "scheduled": False, "answer": 3, "answers": 4}), id="a training's"),
    ],
)
def test_good_arguments_pass_as_they_are(untouched: Params) -> None:
    assert checked(untouched, MODEL) is untouched


def test_arguments_in_a_text_are_read() -> None:
    text = json.dumps({"seed": 3, "enabled": True, "record": base64.b64encode(RECORD).decode()})
    request = params(text)
    read = checked(request, MODEL)
    assert read.extra_args == {"perturbation": {"seed": 3, "enabled": True, "record": RECORD}, "other": 1}
    assert request.extra_args["perturbation"] == text, "the request's own parameters stay"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("[1]", "must be a dictionary"),
        ("{", "no JSON object"),
        ('{"record": "*"}', "base64"),
        ({"sed": 3}, "'sed'] is unknown. Known: seed, sample, round, enabled, record"),
        ({"seed": "3"}, "must be an integer"),
        ({"seed": -1}, "must be an integer from 0 to"),
        ({"training_step": 1 << 63}, "must be an integer from 0 to 9223372036854775807"),
        ({"enabled": 1}, "must be True or False"),
        ({"answer": 4, "answers": 4}, "['answer']=4: must be below"),
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


RETURN_RECORD = '{"seed": 3, "return_record": true}'


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"repetition_penalty": 1.1}, r"sampled with repetition_penalty=1\.1, so .* --generation-config vllm"),
        ({"presence_penalty": 0.5, "min_tokens": 3}, r"presence_penalty=0\.5, min_tokens=3, so"),
        ({"logit_bias": {7: 5.0}}, r"logit_bias=\{7: 5\.0\}"),
        ({"bad_words": ["no"]}, r"bad_words=\['no'\]"),
        ({"thinking_token_budget": 0}, "thinking_token_budget=0, so"),
        ({"allowed_token_ids": [1, 2]}, r"allowed_token_ids=\[1, 2\]"),
        ({"structured_outputs": "a grammar"}, "structured_outputs='a grammar'"),
    ],
)
def test_a_server_returns_log_probabilities_of_the_model_alone(changed: dict[str, Any], message: str) -> None:
    """``checked`` sees the parameters that vLLM has made, with what the model's generation_config.json sets."""
    with_record = Params(extra_args={"perturbation": RETURN_RECORD}, **changed)
    with pytest.raises(UsageError, match=message):
        checked(with_record, MODEL)
    without_record = Params(extra_args={"perturbation": '{"seed": 3}'}, **changed)
    assert checked(without_record, MODEL).extra_args == {"perturbation": {"seed": 3}}


def test_a_temperature_and_a_filter_leave_log_probabilities_of_the_model() -> None:
    changed = {"temperature": 0.3, "top_p": 0.5, "bad_words": [], "repetition_penalty": 1.0}
    for text in (RETURN_RECORD, '{"seed": 3}'):
        request = Params(extra_args={"perturbation": text}, **changed)
        assert checked(request, MODEL).extra_args == {"perturbation": {"seed": 3}}


def test_a_record_is_for_one_response() -> None:
    request = Params(extra_args={"perturbation": {"record": RECORD}}, n=2)
    with pytest.raises(UsageError, match=r"'record'.*with n=2: .* would all be the same"):
        checked(request, MODEL)
    request.n = 1
    assert checked(request, MODEL) is request


def test_a_prompt_in_parts_is_refused() -> None:
    """vLLM's streaming input goes on with a request by another prompt, and drops a token that was drawn."""
    processor = SimpleNamespace(vllm_config=SimpleNamespace(additional_config={}), model_config=MODEL)
    process = request_arguments.checked_request(lambda self, *args, **kwargs: kwargs)
    assert process(processor, "a", [1], Params(extra_args=None), resumable=True) == {"resumable": True}
    processor.vllm_config.additional_config = {"perturbation": {"name": "neighbor"}}
    with pytest.raises(UsageError, match="Give the whole prompt"):
        process(processor, "a", [1], Params(extra_args=None), resumable=True)


def test_a_server_without_a_perturbation_refuses_requests_that_have_one() -> None:
    processor = SimpleNamespace(vllm_config=SimpleNamespace(additional_config={}), model_config=MODEL)
    process = request_arguments.checked_request(lambda self, *args, **kwargs: kwargs)
    of_server = Params(extra_args={"perturbation": '{"seed": 3}'})
    with pytest.raises(UsageError, match="this server has none, so that it would ignore the request's"):
        process(processor, "a", [1], of_server)
    processor.vllm_config.additional_config = {"perturbation": {"name": "neighbor"}}
    process(processor, "a", [1], of_server)


def test_an_unsupported_vllm_takes_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.34.0"))
    built = SimpleNamespace(parallel_config=SimpleNamespace())
    create = plugin.checked_config(lambda self: built)
    with pytest.raises(RuntimeError, match="install one of these"):
        create(SimpleNamespace(additional_config={"sampling_masks": True}))
    assert create(SimpleNamespace(additional_config={"of": "others"})) is built


def test_an_engine_whose_patches_do_not_match_loads_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks a plugin nothing back, so that the engine's configuration is where a run can be refused."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.29.0"))
    row = next(row for row in patches.VLLM if row.attribute.endswith("get_top_k_top_p"))
    monkeypatch.setattr(patches, "VLLM", (dataclasses.replace(row, module="no_such_package.states"),))
    create = plugin.checked_config(lambda self: pytest.fail("was built"))
    with pytest.raises(PatchMismatch, match=r"1 of 1 upstream patches .*\n.*get_top_k_top_p"):
        create(SimpleNamespace(additional_config={"perturbation": {"name": "neighbor"}}))


class Server:
    """What stands behind the middleware; each of its two ranks holds half of the records.

    Attributes:
        answer: the body of its response.
        held: by the internal name of a request, its packed trajectory.
        received: the body of the last request.
        headers: of the response.
    """

    def __init__(self, answer: dict[str, Any], held: dict[str, Any], lengths: dict[str, int] | None = None) -> None:
        self.answer = answer
        self.held = held
        self.received = None
        self.state = SimpleNamespace(engine_client=self)
        self.output_processor = SimpleNamespace(**{LENGTHS: lengths or {}})
        self.headers: list[tuple[bytes, bytes]] = []

    def begin(self, headers: dict[bytes, bytes]) -> None:
        """What is done before the answer."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        self.received = json.loads((await receive())["body"])
        self.begin(headers)
        assert headers[b"content-length"] == str(len(json.dumps(self.received))).encode()
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        body = json.dumps(self.answer).encode()
        await send({"type": "http.response.body", "body": body[:5], "more_body": True})
        await send({"type": "http.response.body", "body": body[5:]})

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "perturbation_fingerprint":
            return ["abc"]
        request_names = args[0]
        held_names = [name for name in self.held if name.rpartition("-")[0] in request_names]
        first_rank = {name: self.held[name] for name in held_names[0::2]}
        second_rank = {name: self.held[name] for name in held_names[1::2]}
        return [first_rank, second_rank]


ONE_CHOICE = {"id": "cmpl-1", "choices": [{"index": 0}]}


def ask(
    server: Server, request: Any, path: str = "/v1/completions", headers: dict[bytes, bytes] | None = None
) -> tuple[int, Any]:
    """Status and content of the response to one request through the middleware."""
    start, *bodies = messages_of(server, json.dumps(request).encode(), path, headers or {})
    content = b"".join(message.get("body", b"") for message in bodies)
    return start["status"], json.loads(content)


def messages_of(server: Server, body: bytes, path: str, headers: dict[bytes, bytes]) -> list[Any]:
    """The messages that the middleware sends in response to a body."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    all_headers = [(b"content-length", str(len(body)).encode()), *headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": all_headers, "app": server}
    asyncio.run(PerturbationMiddleware(server)(scope, receive, send))
    return sent


LOG_PROBS = np.array([-0.5, -1.0], dtype=np.float32)


@pytest.mark.parametrize(
    ("path", "choices", "names"),
    [
        ("/v1/chat/completions", [0], ["chatcmpl-1"]),
        ("/v1/chat/completions", [1, 0], ["0_chatcmpl-1", "1_chatcmpl-1"]),
        ("/v1/completions", [0, 1], ["cmpl-1-0", "cmpl-1-1"]),
        ("/v1/completions", [0, 1, 2, 3], ["0_cmpl-1-0", "1_cmpl-1-0", "0_cmpl-1-1", "1_cmpl-1-1"]),
    ],
)
def test_each_choice_has_its_record(path: str, choices: list[int], names: list[str]) -> None:
    """``names`` are vLLM's internal ones of the choices 0, 1, ..., before their random suffix."""
    request_id = "chatcmpl-1" if "chat" in path else "cmpl-1"
    answer = {"id": request_id, "choices": [{"index": index} for index in choices]}
    records = [dataclasses.replace(KEPT, seed=index) for index in range(len(names))]
    held = {f"{name}-12345678": FinishedTrajectory(own, LOG_PROBS).pack() for name, own in zip(names, records)}
    server = Server(answer, held)

    status, content = ask(server, {"prompt": "a", "perturbation": {"seed": 3, "return_record": True}}, path)

    assert status == 200
    assert [choice["index"] for choice in content["choices"]] == choices
    for choice in content["choices"]:
        assert base64.b64decode(choice["perturbation_record"]) == records[choice["index"]].to_bytes()
        assert choice["perturbation_log_probs"] == [-0.5, -1.0]
    assert server.received == {"prompt": "a", "vllm_xargs": {"perturbation": '{"seed": 3, "return_record": true}'}}


class NamingServer(Server):
    """Calls a request what its client does, as vLLM: by the header, or else by the field; says so in both places."""

    def begin(self, headers: dict[bytes, bytes]) -> None:
        name = headers.get(b"x-request-id", b"").decode() or self.received.get("request_id", "made-up")
        number = len(self.held)
        self.answer = {"id": f"cmpl-{name}", "choices": [{"index": 0}]}
        own_record = dataclasses.replace(KEPT, seed=number)
        self.held[f"cmpl-{name}-0-{number:08}"] = FinishedTrajectory(own_record, LOG_PROBS).pack()
        self.headers = [(b"x-request-id", name.encode())]


@pytest.mark.parametrize(
    ("fields", "headers", "name", "requests"),
    [
        pytest.param({}, {b"x-request-id": b"mine"}, "mine", 3, id="named by the header"),
        pytest.param({"request_id": "mine"}, {}, "mine", 3, id="named by the field"),
        pytest.param({}, {}, "made-up", 1, id="named by vLLM"),
    ],
)
def test_requests_of_one_id_get_their_own_records(
    fields: Any, headers: dict[bytes, bytes], name: str, requests: int
) -> None:
    server = NamingServer({}, {})
    body = json.dumps({"prompt": "a", "perturbation": {"return_record": True}, **fields}).encode()
    for number in range(requests):
        start, content = messages_of(server, body, "/v1/completions", headers)
        answer = json.loads(content["body"])
        record = ReplayRecord.from_bytes(base64.b64decode(answer["choices"][0]["perturbation_record"]))
        assert record.seed == number
        assert answer["id"] == f"cmpl-{name}"
        assert dict(start["headers"])[b"x-request-id"] == name.encode()
    internal_names = {key.rpartition("-")[0] for key in server.held}
    assert len(internal_names) == requests


def test_a_record_ends_where_its_response_does() -> None:
    """At a stop string the worker is already further: here by one of two tokens, which the edit at 3 was fed for."""
    further = FinishedTrajectory(dataclasses.replace(KEPT, positions=np.array([3])), LOG_PROBS).pack()
    server = Server(ONE_CHOICE, {"cmpl-1-0-12345678": further}, {"cmpl-1-0-12345678": 1})

    _, content = ask(server, {"prompt": "a", "stop": ["b"], "perturbation": {"return_record": True}})

    (choice,) = content["choices"]
    record = ReplayRecord.from_bytes(base64.b64decode(choice["perturbation_record"]))
    assert record.num_tokens == 3
    assert len(record) == 0
    assert choice["perturbation_log_probs"] == [-0.5]
    assert not vars(server.output_processor)[LENGTHS]


def test_a_request_without_a_perturbation_goes_by() -> None:
    server = Server(ONE_CHOICE, {})
    assert ask(server, {"prompt": "a"}) == (200, server.answer)
    assert server.received == {"prompt": "a"}


def test_a_request_for_an_embedding_goes_by() -> None:
    server = Server(ONE_CHOICE, {})
    assert ask(server, {"perturbation": {"seed": 3}}, "/v1/embeddings") == (200, server.answer)
    assert server.received == {"perturbation": {"seed": 3}}


def test_arguments_join_the_others_of_a_request() -> None:
    server = Server(ONE_CHOICE, {})
    assert ask(server, {"perturbation": {"enabled": False}, "vllm_xargs": {"a": 1}}) == (200, server.answer)
    assert server.received == {"vllm_xargs": {"a": 1, "perturbation": '{"enabled": false}'}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"perturbation": 3}, "perturbation is 3: must be a dictionary with seed"),
        ({"perturbation": {"seed": "three"}}, r"perturbation\['seed'\]='three': must be an integer from 0"),
        ({"perturbation": {"return_recrod": True}}, "Known: .*return_record.* Did you mean 'return_record'"),
        ({"perturbation": {}, "vllm_xargs": [1]}, r"vllm_xargs is \[1\]: must be a JSON object"),
        ({"perturbation": {"return_record": True}, "use_beam_search": True}, "beam search"),
        ({"perturbation": {"return_record": True}, "stream": True}, "not streamed"),
        ({"perturbation": {"return_record": "yes"}}, "must be true or false"),
        ({"perturbations": {"seed": 3}}, "the field perturbations, which would be ignored. Name it perturbation"),
        ({"extra_body": {"perturbation": {"seed": 3}}}, r"the field extra_body\.perturbation, which would be ignored"),
    ],
)
def test_wrong_fields_are_refused_before_anything_runs(fields: dict[str, Any], message: str) -> None:
    server = Server(ONE_CHOICE, {})
    status, content = ask(server, {"prompt": "a", **fields})
    assert status == 400
    assert re.search(message, content["error"]["message"])
    assert server.received is None


def test_a_record_that_is_gone_is_an_error() -> None:
    status, content = ask(Server(ONE_CHOICE, {}), {"perturbation": {"return_record": True}})
    assert status == 500
    assert "the replay buffer dropped it" in content["error"]["message"]


def test_a_client_that_went_away_gets_no_record() -> None:
    """vLLM has cancelled the request; its handler returns None, which FastAPI sends as null."""
    held = serve._HeldResponse()
    held.status = 200
    held.body = b"null"
    response = asyncio.run(serve._with_records(held, engine=None, suffix="-1"))
    assert response.status_code == 200
    assert response.body == b"null"


def test_a_block_with_perturbed_inputs_belongs_to_its_request() -> None:
    """Blocks up to the prompt's end, or to a record's first position, are shared by all requests with their tokens."""
    keys_of = request_arguments.with_trajectory_keys(lambda request, start, end, mm: (("lora",), mm))
    record = dataclasses.replace(KEPT, prompt_tokens=40, num_tokens=64, positions=np.array([40])).to_bytes()

    def request(arguments: dict[str, Any]) -> Any:
        params = SimpleNamespace(extra_args={"perturbation": arguments})
        return SimpleNamespace(request_id="a", num_prompt_tokens=64, sampling_params=params)

    shared = (("lora",), 0)
    own = (("lora", "perturbation:a"), 0)
    plain = request({})
    continued = request({"record": record})
    assert keys_of(plain, 32, 64, 0) == shared
    assert keys_of(plain, 64, 96, 0) == own
    assert keys_of(continued, 8, 40, 0) == shared
    assert keys_of(continued, 32, 64, 0) == own
