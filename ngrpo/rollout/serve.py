# SPDX-License-Identifier: Apache-2.0
"""``vllm serve --middleware ngrpo.rollout.serve.PerturbationMiddleware``: records in an OpenAI-compatible server.

A request to ``/v1/completions`` or ``/v1/chat/completions`` may have a field ``perturbation``, an object with

- ``seed``: of the trajectory, an integer;
- ``enabled``: false for an unperturbed response;
- ``record``: the record of earlier turns, in base64; its inputs are replayed in the prompt;
- ``return_record``: true for the response's record, which each choice then has as ``perturbation_record``, in base64
  (`perturbations.ReplayRecord.from_bytes`), with ``perturbation_log_probs``, a number for each token. Refused with
  penalties, biases and lists of tokens, which change the probabilities (`request_arguments.LOGITS_UNCHANGED`).

vLLM passes on no objects, so the field travels to the workers as JSON text. What these two paths are sent must be a
JSON object. Everything else goes by untouched.
"""

import base64
import json
import reprlib
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngrpo.machine.upstream.types import AsyncLLM
from ngrpo.rollout.records import check_installed, of_all_workers, of_answers
from ngrpo.rollout.request_arguments import RETURN_RECORD, checked_fields, with_record_read
from ngrpo.rollout.settings import KEY
from perturbations import UsageError

JsonObject = dict[str, Any]
_PATHS = ("/v1/completions", "/v1/chat/completions")
_ID_HEADER = "x-request-id"
_XARGS = "vllm_xargs"


class PerturbationMiddleware:
    """ASGI middleware for vLLM's server."""

    def __init__(self, app: ASGIApp) -> None:
        """app: the application behind this one."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(_PATHS):
            return await self._app(scope, receive, send)
        body = await Request(scope, receive).body()
        try:
            asked = _read(body)
        except UsageError as error:
            return await _error(str(error), "BadRequestError", 400)(scope, receive, send)
        if asked is None:
            return await self._app(scope, _once(body, receive), send)
        request, with_record = asked
        scope = {**scope, "headers": list(scope["headers"])}
        headers = MutableHeaders(scope=scope)
        added = f"-{uuid.uuid4().hex}"  # records are found by ids, so a client's own becomes unique
        if with_record and _ID_HEADER in headers:  # which vLLM prefers to the field
            headers[_ID_HEADER] += added
        elif with_record and isinstance(request.get("request_id"), str):
            request["request_id"] += added
        body = json.dumps(request).encode()
        headers["content-length"] = str(len(body))
        if not with_record:
            return await self._app(scope, _once(body, receive), send)
        held = _Held()
        await self._app(scope, _once(body, receive), held)
        answer = await _answer(held, scope["app"].state.engine_client, added)
        return await answer(scope, receive, send)


def _read(body: bytes) -> tuple[JsonObject, bool] | None:
    """vLLM's request, and whether a record was requested; None without a perturbation; UsageError for wrong ones."""
    needed = 'Send a JSON object, such as {"model": "NAME", "prompt": "Hello"}.'
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the request's body {reprlib.repr(body)} is not JSON: {error}. {needed}") from None
    if not isinstance(request, dict):
        raise UsageError(f"the request's body is {reprlib.repr(request)}: must be a JSON object. {needed}")
    arguments = request.pop(KEY, None)
    if arguments is None:
        return None
    with_record = arguments.pop(RETURN_RECORD, False) if isinstance(arguments, dict) else False
    where = f"{KEY}.{RETURN_RECORD}"
    if not isinstance(with_record, bool):
        raise UsageError(f"{where} is {with_record!r}: must be true or false.")
    if with_record and request.get("stream"):
        raise UsageError(f"{where} needs a response that is not streamed. Leave one of them out.")
    if with_record and request.get("use_beam_search"):
        raise UsageError(f"{where} needs a response that is sampled, and no beam search. Leave one of them out.")
    checked_fields(with_record_read(arguments, KEY), KEY, (RETURN_RECORD,))
    others = {} if request.get(_XARGS) is None else request[_XARGS]
    if not isinstance(others, dict):
        raise UsageError(f"{_XARGS} is {others!r}: must be a JSON object. Leave it out, or send {{}}.")
    if with_record:  # vLLM's own process checks what else the request and the server's defaults set
        arguments[RETURN_RECORD] = True
    request[_XARGS] = {**others, KEY: json.dumps(arguments)}
    return request, with_record


class _Held:
    """Receives a response instead of the client."""

    def __init__(self) -> None:
        self.status, self.headers, self.body = 500, Headers(), b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], Headers(raw=list(message.get("headers", ())))
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")


async def _answer(held: _Held, engine: AsyncLLM, added: str) -> Response:
    """The server's response with a record in each of its choices, and with the client's own id, without ``added``."""
    headers = {name: value for name, value in held.headers.items() if name != "content-length"}
    if _ID_HEADER in headers:
        headers[_ID_HEADER] = headers[_ID_HEADER].removesuffix(added)
    if held.status != 200:
        return Response(held.body, held.status, headers, media_type="application/json")
    answer = json.loads(held.body)
    choices = answer["choices"]
    names = _request_ids(answer, len(choices))
    try:
        check_installed(await engine.collective_rpc("perturbation_fingerprint"))
        replies = await engine.collective_rpc("perturbation_take", args=([one for two in names for one in two], None))
        trajectories = of_answers(engine.output_processor, of_all_workers(replies))
        for choice in choices:
            name = next((name for name in names[choice["index"]] if name in trajectories), None)
            if name is None:
                raise RuntimeError("the record is gone: the replay buffer dropped it. Raise its max_bytes.")
            choice["perturbation_record"] = base64.b64encode(trajectories[name].record.to_bytes()).decode()
            choice["perturbation_log_probs"] = trajectories[name].log_probs.tolist()
    except RuntimeError as error:
        return _error(str(error), "InternalServerError", 500)
    return JSONResponse({**answer, "id": answer["id"].removesuffix(added)}, headers=headers)


def _request_ids(answer: JsonObject, choices: int) -> list[tuple[str, ...]]:
    """For each choice the ids under which vLLM 0.29 may have run it.

    A completion numbers its prompts behind its id, and several samples of a prompt are numbered before it.
    """
    name = answer["id"]
    if not name.startswith("cmpl-"):
        return [(name, f"0_{name}") if choices == 1 else (f"{i}_{name}",) for i in range(choices)]
    ids: list[tuple[str, ...]] = []
    for i in range(choices):
        each = [(i // n, i % n, n) for n in range(1, choices + 1) if choices % n == 0]
        ids.append(tuple(f"{name}-{prompt}" if n == 1 else f"{sample}_{name}-{prompt}" for prompt, sample, n in each))
    return ids


def _once(body: bytes, receive: Receive) -> Receive:
    """Gives the body, and then what the client does, such as going away."""
    is_delivered = False

    async def next_message() -> Message:
        nonlocal is_delivered
        if is_delivered:
            return await receive()
        is_delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message


def _error(message: str, kind: str, code: int) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "param": KEY, "code": code}}, code)
