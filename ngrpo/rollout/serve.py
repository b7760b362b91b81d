# SPDX-License-Identifier: Apache-2.0
"""``vllm serve --middleware ngrpo.rollout.serve.PerturbationMiddleware``: records in an OpenAI-compatible server.

A request to ``/v1/completions`` or ``/v1/chat/completions`` may have a field ``perturbation``, an object with

- ``seed``: of the trajectory, an integer;
- ``enabled``: false for an unperturbed response;
- ``record``: the record of earlier turns, in base64; its inputs are replayed in the prompt;
- ``return_record``: true for the response's record, which each choice then has as ``perturbation_record``, in base64
  (`perturbations.ReplayRecord.from_bytes`), with ``perturbation_log_probs``, a number for each token. Refused with
  penalties, biases and lists of tokens, which change the probabilities (`ngrpo.machine.upstream.sampling`).

vLLM passes on no objects, so the field travels to the workers as JSON text. What is sent to these two paths must be a
JSON object. Requests without the field are passed on as they are; sent to another path, the field is refused, because
vLLM would ignore it there.
"""

import base64
import json
import reprlib
import uuid
from typing import Any, NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngrpo.machine.upstream.types import AsyncLLM
from ngrpo.rollout.records import check_installed, of_all_workers, trajectories_of
from ngrpo.rollout.request_arguments import RETURN_RECORD, checked_fields, with_record_read
from ngrpo.rollout.settings import KEY
from perturbations import UsageError
from perturbations.errors import nearest

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
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        knows_the_field = scope["path"].endswith(_PATHS)
        if not knows_the_field and not _is_json(scope):  # such as an audio file
            return await self._app(scope, receive, send)
        body = await Request(scope, receive).body()
        perturbed = None
        try:
            if knows_the_field:
                perturbed = _read(body)
            else:
                _refuse_elsewhere(body, scope["path"])
        except UsageError as error:
            return await _error(str(error), "BadRequestError", 400)(scope, receive, send)
        if perturbed is None:
            return await self._app(scope, _once(body, receive), send)
        request = perturbed.body
        scope = {**scope, "headers": list(scope["headers"])}
        headers = MutableHeaders(scope=scope)
        # Records are found by request id. A client may use its own id twice, so it is made unique.
        suffix = f"-{uuid.uuid4().hex}"
        if perturbed.with_record and _ID_HEADER in headers:  # vLLM prefers the header to the field
            headers[_ID_HEADER] += suffix
        elif perturbed.with_record and isinstance(request.get("request_id"), str):
            request["request_id"] += suffix
        body = json.dumps(request).encode()
        headers["content-length"] = str(len(body))
        if not perturbed.with_record:
            return await self._app(scope, _once(body, receive), send)
        held = _HeldResponse()
        await self._app(scope, _once(body, receive), held)
        response = await _with_records(held, scope["app"].state.engine_client, suffix)
        return await response(scope, receive, send)


class _PerturbedRequest(NamedTuple):
    """A request with a perturbation."""

    body: JsonObject  # as vLLM gets it
    with_record: bool  # whether the response is to have its record


def _read(body: bytes) -> _PerturbedRequest | None:
    """The request; None without a perturbation; UsageError for a wrong one."""
    needed = 'Send a JSON object, such as {"model": "NAME", "prompt": "Hello"}.'
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the request's body {reprlib.repr(body)} is not JSON: {error}. {needed}") from None
    if not isinstance(request, dict):
        raise UsageError(f"the request's body is {reprlib.repr(request)}: must be a JSON object. {needed}")
    arguments = request.pop(KEY, None)
    if arguments is None:
        _refuse_misplaced(request)
        return None
    with_record = arguments.pop(RETURN_RECORD, False) if isinstance(arguments, dict) else False
    if not isinstance(with_record, bool):
        raise UsageError(f"{KEY}.{RETURN_RECORD} is {with_record!r}: must be true or false.")
    if with_record and request.get("stream"):
        raise UsageError(f"{KEY}.{RETURN_RECORD} needs a response that is not streamed. Leave one of them out.")
    if with_record and request.get("use_beam_search"):
        raise UsageError(
            f"{KEY}.{RETURN_RECORD} needs a response that is sampled, and no beam search. Leave one of them out."
        )
    checked_fields(with_record_read(arguments, KEY), KEY, (RETURN_RECORD,))
    xargs = request.get(_XARGS)
    if xargs is None:
        xargs = {}
    if not isinstance(xargs, dict):
        raise UsageError(f"{_XARGS} is {xargs!r}: must be a JSON object. Leave it out, or send {{}}.")
    if with_record:  # vLLM's own process checks it against what the request and the server's defaults set besides
        arguments[RETURN_RECORD] = True
    request[_XARGS] = {**xargs, KEY: json.dumps(arguments)}
    return _PerturbedRequest(body=request, with_record=with_record)


def _refuse_misplaced(request: JsonObject) -> None:
    """Raises UsageError for a perturbation under a name that vLLM ignores."""
    for name, value in request.items():
        is_inside = name in ("extra_body", "extra_args") and isinstance(value, dict) and KEY in value
        if is_inside or nearest(name, [KEY]):
            place = f"{name}.{KEY}" if is_inside else name
            raise UsageError(f"the request has the field {place}, which would be ignored. Name it {KEY}, at the top.")


def _is_json(scope: Scope) -> bool:
    return "json" in Headers(scope=scope).get("content-type", "")


def _refuse_elsewhere(body: bytes, path: str) -> None:
    """Raises UsageError for a request with a perturbation, sent to a path where vLLM ignores it."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return  # vLLM says what is wrong
    if isinstance(request, dict) and request.get(KEY) is not None:
        raise UsageError(
            f"the request has the field {KEY}, and {path} would ignore it."
            f" Send it to {' or '.join(_PATHS)}, or leave the field out."
        )


class _HeldResponse:
    """Receives a response instead of the client."""

    def __init__(self) -> None:
        self.status = 500
        self.headers = Headers()
        self.body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = Headers(raw=list(message.get("headers", ())))
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")


async def _with_records(held: _HeldResponse, engine: AsyncLLM, suffix: str) -> Response:
    """The server's response with a record in each of its choices, and with the client's own id, without ``suffix``."""
    headers = {name: value for name, value in held.headers.items() if name != "content-length"}
    if _ID_HEADER in headers:
        headers[_ID_HEADER] = headers[_ID_HEADER].removesuffix(suffix)
    if held.status != 200:
        return Response(held.body, held.status, headers, media_type="application/json")
    response = json.loads(held.body)
    if response is None:  # the client went away: vLLM has cancelled the request and dropped its record
        return Response(held.body, held.status, headers, media_type="application/json")
    choices = response["choices"]
    ids_by_choice = _request_ids(response["id"], len(choices))
    all_ids = [request_id for ids in ids_by_choice for request_id in ids]
    try:
        check_installed(await engine.collective_rpc("perturbation_fingerprint"))
        results = await engine.collective_rpc("perturbation_take", args=(all_ids, None))
        trajectories = trajectories_of(engine.output_processor, of_all_workers(results))
        for choice in choices:
            ids = [request_id for request_id in ids_by_choice[choice["index"]] if request_id in trajectories]
            if not ids:
                raise RuntimeError("the record is gone: the replay buffer dropped it. Raise its max_bytes.")
            trajectory = trajectories[ids[0]]
            choice["perturbation_record"] = base64.b64encode(trajectory.record.to_bytes()).decode()
            choice["perturbation_log_probs"] = trajectory.log_probs.tolist()
    except RuntimeError as error:
        return _error(str(error), "InternalServerError", 500)
    return JSONResponse({**response, "id": response["id"].removesuffix(suffix)}, headers=headers)


def _request_ids(name: str, choices: int) -> list[list[str]]:
    """For each choice of the response with this id, the ids under which vLLM 0.29 may have run it.

    A completion numbers its prompts after its id, and the samples of a prompt are numbered in front of it. The
    response does not say how many of its choices are samples of one prompt.
    """
    if not name.startswith("cmpl-"):
        if choices == 1:
            return [[name, f"0_{name}"]]
        return [[f"{i}_{name}"] for i in range(choices)]
    ids_by_choice: list[list[str]] = []
    for i in range(choices):
        ids = [f"{name}-{i}"]  # a prompt of its own
        for samples in range(2, choices + 1):
            if choices % samples == 0:
                ids.append(f"{i % samples}_{name}-{i // samples}")
        ids_by_choice.append(ids)
    return ids_by_choice


def _once(body: bytes, receive: Receive) -> Receive:
    """Receives the body, and after it what the client does, such as going away."""
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
