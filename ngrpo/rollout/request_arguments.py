# SPDX-License-Identifier: Apache-2.0
"""A request's arguments for its perturbation: how they are checked, and what they change in vLLM's front end.

They are checked in the caller's process, because a worker that fails takes its engine along. The samples of one request
are numbered, and its cached blocks get keys of their own. The functions that take an ``original`` are rows of
`ngrpo.patches`.
"""

import base64
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ngrpo.machine.upstream.patch import around
from ngrpo.machine.upstream.sampling import logit_changes
from ngrpo.machine.upstream.types import InputProcessor, ModelConfig, Request, SamplingParams
from ngrpo.rollout.settings import KEY, read, request_arguments
from perturbations import ReplayRecord, UsageError
from perturbations.errors import nearest

_WHERE = f"SamplingParams.extra_args[{KEY!r}]"


class _Kind(NamedTuple):
    """What a value of an argument must be."""

    type: type
    description: str


_INTEGER = _Kind(int, "an integer from 0 to 9223372036854775807")  # it travels in int64 arrays
_SWITCH = _Kind(bool, "True or False")
_RECORD = _Kind(bytes, "the bytes of a record: ReplayRecord.to_bytes(), in a request to a server in base64")
_ALLOWED = {
    "seed": _INTEGER,
    "sample": _INTEGER,
    "round": _INTEGER,
    "enabled": _SWITCH,
    "record": _RECORD,
    "training_step": _INTEGER,
    "scheduled": _SWITCH,
    "answer": _INTEGER,
    "answers": _INTEGER,
}
# Where vLLM's request keeps the first position of its record.
_FIRST_POSITION = "perturbation_first_position"
RETURN_RECORD = "return_record"
"""An argument of the server's requests alone: the response is to have its record and its log-probabilities."""


def checked(params: SamplingParams, model_config: ModelConfig) -> SamplingParams:
    """The parameters, or a copy, with valid arguments for the perturbation; UsageError for others.

    The arguments may be JSON text with the record in base64, as a server passes them on; with ``return_record`` if the
    server is to return log-probabilities, which must be the model's.
    """
    raw = (getattr(params, "extra_args", None) or {}).get(KEY)
    if raw is None:
        return params
    arguments = _from_text(raw, params) if isinstance(raw, str) else raw
    arguments = checked_fields(arguments)
    if arguments.get("record"):
        _check_record(arguments["record"], params, model_config)
    if arguments is raw:
        return params
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), KEY: arguments}
    return params


def _from_text(text: str, params: SamplingParams) -> object:
    """The arguments that a server passes on as JSON text, without ``return_record``; UsageError for other text."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{_WHERE} is no JSON object: {error}. Send one, such as {{}}.") from None
    arguments = with_record_read(arguments)
    if not isinstance(arguments, dict):
        return arguments
    returns_log_probs = arguments.pop(RETURN_RECORD, False)
    changes = logit_changes(params) if returns_log_probs else {}
    if changes:
        raise UsageError(
            f"{KEY}.{RETURN_RECORD}: the request is sampled with {in_words(changes)}, so that its recorded"
            " log-probabilities would not be the model's. Leave these parameters or return_record out. Send"
            " repetition_penalty 1.0 where the model's generation_config.json sets another one, or start the server"
            " with --generation-config vllm."
        )
    return arguments


def _check_record(record: bytes, params: SamplingParams, model_config: ModelConfig) -> None:
    """Raises UsageError for a record that is damaged, or of another model, or that several samples would continue."""
    if (getattr(params, "n", None) or 1) > 1:
        raise UsageError(
            f"{_WHERE}['record'] with n={params.n}: responses that continue one record would all be the same. Request"
            " one response."
        )
    # D of the input embedding is the hidden size in all models but some of OPT's.
    hidden = getattr(model_config.hf_text_config, "word_embed_proj_dim", None) or model_config.get_hidden_size()
    try:
        ReplayRecord.from_bytes(record).check_model(model_config.get_vocab_size(), hidden)
    except ValueError as error:
        raise UsageError(f"{_WHERE}['record']: {error}") from None


def in_words(values: Mapping[str, Any]) -> str:
    """Parameters and their values, for a message."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def checked_fields(arguments: object, where: str = _WHERE, further: Sequence[str] = ()) -> dict[str, Any]:
    """Arguments with names and types that are right without regard to the model; UsageError for others.

    ``where``: their name in an error; ``further``: names that an error lists as known, which the caller has taken out.
    """
    names = ", ".join([*_ALLOWED, *further])
    if not isinstance(arguments, dict):
        raise UsageError(f"{where} is {arguments!r}: must be a dictionary with {names}.")
    for name, value in arguments.items():
        if name not in _ALLOWED:
            hint = nearest(str(name), [*_ALLOWED, *further])
            raise UsageError(f"{where}[{name!r}] is unknown. Known: {names}.{hint}")
        kind = _ALLOWED[name]
        valid = isinstance(value, kind.type)
        if valid and kind is _INTEGER:
            valid = not isinstance(value, bool) and 0 <= value < 1 << 63
        if not valid:
            raise UsageError(f"{where}[{name!r}]={value!r}: must be {kind.description}.")
    answer = arguments.get("answer", 0)
    answers = arguments.get("answers", 1)
    if answer >= answers:
        raise UsageError(f"{where}['answer']={answer}: must be below {where}['answers'], which is {answers}.")
    return arguments


def with_record_read(arguments: object, where: str = _WHERE) -> object:
    """A server's arguments with the record, if any, read from base64; UsageError for other text."""
    if not isinstance(arguments, dict) or not isinstance(arguments.get("record"), str):
        return arguments
    try:
        record = base64.b64decode(arguments["record"], validate=True)
    except ValueError as error:
        raise UsageError(
            f"{where}['record'] is not base64: {error}. Send base64.b64encode(record.to_bytes()), as text."
        ) from None
    return {**arguments, "record": record}


@around
def checked_request(
    original: Callable[..., Any],
    self: InputProcessor,
    request_id: str,
    prompt: object,
    params: SamplingParams,
    *args: object,
    **named: object,
) -> Any:
    """vLLM's ``process_inputs``: a wrong argument is an error in the caller's process, and of the caller."""
    try:
        is_of_server = isinstance(request_arguments(params), str)  # which passes arguments on as text
        if is_of_server and read(self.vllm_config.additional_config) is None:
            raise UsageError(
                "the request has a perturbation, and this server has none, so that it would ignore the request's. Leave"
                """ it out, or start the server with --additional-config '{"perturbation": {"name": "neighbor"}}'."""
            )
        params = checked(params, self.model_config)
        if named.get("resumable") and read(self.vllm_config.additional_config) is not None:
            raise UsageError("a perturbed engine takes no prompts that arrive in parts. Give the whole prompt.")
    except UsageError as error:
        # vLLM's server returns status 400 for errors of its own class only, which not all releases have.
        error_class: type[Exception] = UsageError
        vllm_class = getattr(importlib.import_module("vllm.exceptions"), "VLLMValidationError", None)
        if vllm_class is not None:
            error_class = type("RequestError", (vllm_class, UsageError), {})
        raise error_class(str(error)) from None
    return original(self, request_id, prompt, params, *args, **named)


@around
def numbered_children(original: Callable[..., Any], self: object, index: int) -> SamplingParams:
    """vLLM's request for sample ``index`` of ``SamplingParams(n=…)``: with a seed, each must be another trajectory."""
    params = original(self, index)
    arguments = request_arguments(params)
    if arguments.get("seed") is not None:
        params = params.clone()
        params.extra_args = {**params.extra_args, KEY: {**arguments, "sample": index}}
    return params


def with_trajectory_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's ``generate_block_hash_extra_keys``: a block of generated tokens belongs to its trajectory alone.

    A block's hash is of its tokens, and not of the embeddings that were fed. So a block that reaches beyond the prompt,
    or beyond a replayed record's first position, gets the request's id as an extra key: only the same request finds it
    again, after a preemption.
    """

    def generate_block_hash_extra_keys(request: Request, start: int, end: int, start_mm_idx: int) -> Any:
        keys, next_mm_idx = original(request, start, end, start_mm_idx)
        if end > _shared_tokens(request):
            keys = (*(keys or ()), f"{KEY}:{request.request_id}")
        return keys, next_mm_idx

    return generate_block_hash_extra_keys


def _shared_tokens(request: Request) -> int:
    """How many of a request's first tokens are fed as any other request's would be."""
    record = request_arguments(request.sampling_params).get("record")
    if not record:
        return request.num_prompt_tokens
    # vLLM calls this for every block. The record is read at the first call, and its first position is kept.
    if not hasattr(request, _FIRST_POSITION):
        positions = ReplayRecord.from_bytes(record).positions
        first = int(positions[0]) if len(positions) else request.num_prompt_tokens
        setattr(request, _FIRST_POSITION, first)
    return min(getattr(request, _FIRST_POSITION), request.num_prompt_tokens)
