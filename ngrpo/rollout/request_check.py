# SPDX-License-Identifier: Apache-2.0
"""What a request says about its perturbation, checked where it comes in: a worker that fails takes its engine along."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ngrpo.rollout.settings import KEY
from perturbations.errors import UsageError, nearest
from perturbations.replay import ReplayRecord

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import ModelConfig

_WHERE = f"SamplingParams.extra_args[{KEY!r}]"
# What travels to a worker, whose arrays are int64.
_INTEGER = (int, "an integer from 0 to 9223372036854775807")
_ALLOWED = {
    "seed": _INTEGER,
    "sample": _INTEGER,
    "enabled": (bool, "True or False"),
    "record": (bytes, "the bytes of a record: ReplayRecord.to_bytes(), in a request to a server in base64"),
    "training_step": _INTEGER,
    "scheduled": (bool, "True or False"),
    "answer": _INTEGER,
    "answers": _INTEGER,
}


def checked(params: SamplingParams, model_config: ModelConfig) -> SamplingParams:
    """Sampling parameters whose arguments for the perturbation are a valid dictionary.

    Args:
        params: vLLM's ``SamplingParams``, left as they are. The arguments may be JSON text with the record in base64,
            as a server passes them on, whose requests hold no objects.
        model_config: vLLM's, of the engine's model.

    Returns:
        These parameters, or a copy with the arguments read.

    Raises:
        UsageError: for arguments that are unknown or no such values.
    """
    raw = (getattr(params, "extra_args", None) or {}).get(KEY)
    if raw is None:
        return params
    arguments = checked_fields(with_record_read(_read(raw)) if isinstance(raw, str) else raw)
    if arguments.get("record"):
        if (getattr(params, "n", None) or 1) > 1:
            raise UsageError(
                f"{_WHERE}['record'] with n={params.n}: answers that go on with one record have its seed, and would all"
                " be the same. Ask for one answer."
            )
        try:
            ReplayRecord.from_bytes(arguments["record"]).check_model(*_embedding_shape(model_config))
        except ValueError as error:
            raise UsageError(f"{_WHERE}['record']: {error}") from None
    if arguments is raw:
        return params
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), KEY: arguments}
    return params


def checked_fields(arguments: object, where: str = _WHERE, further: Sequence[str] = ()) -> dict[str, Any]:
    """Arguments whose names and types are right, as far as that can be told without the model.

    Args:
        arguments: what a request says of its perturbation.
        where: how an error calls them.
        further: names that an error lists as known, which the caller has taken out.

    Raises:
        UsageError: for anything that is no such dictionary.
    """
    known = [*_ALLOWED, *further]
    if not isinstance(arguments, dict):
        raise UsageError(f"{where} is {arguments!r}: must be a dictionary with {', '.join(known)}.")
    for name, value in arguments.items():
        if name not in _ALLOWED:
            hint = nearest(str(name), known)
            raise UsageError(f"{where}[{name!r}] is unknown. Known: {', '.join(known)}.{hint}")
        kind, allowed = _ALLOWED[name]
        if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or not 0 <= int(value) < 1 << 63)):
            raise UsageError(f"{where}[{name!r}]={value!r}: must be {allowed}.")
    if arguments.get("answer", 0) >= arguments.get("answers", 1):
        raise UsageError(
            f"{where}['answer']={arguments.get('answer', 0)}: must be from 0 to 1 below 'answers', which is"
            f" {arguments.get('answers', 1)}: how many answers the prompt gets."
        )
    return arguments


def with_record_read(arguments: object, where: str = _WHERE) -> object:
    """Arguments as a server gets them, with the record read from base64, where they have one.

    Raises:
        UsageError: for a text that is not base64.
    """
    if not isinstance(arguments, dict) or not isinstance(arguments.get("record"), str):
        return arguments
    try:
        return {**arguments, "record": base64.b64decode(arguments["record"], validate=True)}
    except ValueError as error:
        raise UsageError(
            f"{where}['record'] is not base64: {error}. Send base64.b64encode(record.to_bytes()), as text."
        ) from None


def _embedding_shape(model_config: ModelConfig) -> tuple[int, int]:
    """(V, D) of the input embedding, whose D is the hidden size in all models but some of OPT's."""
    own = getattr(model_config.hf_text_config, "word_embed_proj_dim", None)
    return model_config.get_vocab_size(), own or model_config.get_hidden_size()


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{_WHERE} is no JSON object: {error}. Send one, such as {{}}.") from None
