# SPDX-License-Identifier: Apache-2.0
"""Environments with a dataset and a rubric: ``verifiers.Environment`` (verifiers 0.2 and 0.3).

An answer is scored by the environment's own rollout, whose model is a client that has the answer already. So all that
belongs to a rollout happens as with the package's own trainer: the state, the rubric, what is cleaned up.
"""

from __future__ import annotations

import contextvars
import itertools
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ngrpo.workbench.environments import Row, Scored, Unfit, text_messages

# A rubric's function that raises an error is logged by the package and counts as 0.
_ERRORS: contextvars.ContextVar[list[str]] = contextvars.ContextVar("errors")
HELD_OUT_ROWS = 64
"""At most so many are held out of an environment that has no problems for evaluation, and at most one in eight."""


class ClassicEnvironment:
    """A single-turn environment of ``load_environment()``."""

    def __init__(self, load: Callable[[], Any]) -> None:
        """
        Args:
            load: makes the ``verifiers.Environment``.

        Raises:
            Unfit: where it makes something else, or an environment that more than one answer goes to.
        """
        import verifiers

        self._environment = load()
        if not isinstance(self._environment, verifiers.Environment):
            raise Unfit(f"it gives {type(self._environment).__name__}, not a verifiers.Environment")
        _check(self._environment)
        self._answering = _client_class()
        logging.getLogger("verifiers").addHandler(_Collecting(logging.ERROR))

    def rows(self) -> tuple[list[Row], list[Row]]:
        """Training and held-out problems; the latter are the environment's own for evaluation, where it has some."""
        environment = self._environment
        has = [
            any(getattr(environment, name, None) is not None for name in (kind, f"{kind}_source"))
            for kind in ("dataset", "eval_dataset")
        ]
        train = list(map(_row, environment.get_dataset())) if has[0] else []
        if has[1]:
            return train, list(map(_row, environment.get_eval_dataset()))
        held_out_count = min(HELD_OUT_ROWS, len(train) // 8)
        return train[: len(train) - held_out_count], train[len(train) - held_out_count :]

    async def score(self, data: dict[str, Any], answer: str) -> Scored:
        """What the environment's rubric says.

        Args:
            data: a row's.
            answer: what the model said, without special tokens.

        Raises:
            RuntimeError: where the rollout itself ends in an error.
        """
        errors: list[str] = []
        _ERRORS.set(errors)
        output = await self._environment.run_rollout(data, self._answering(answer), "policy", {})
        if output.get("error"):
            raise RuntimeError(f"the environment's rollout ended in an error: {output['error']}")
        metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items()}
        return Scored(float(output["reward"]), metrics, errors[0] if errors else None)


def _check(environment: Any) -> None:
    for part in getattr(environment, "envs", None) or ():  # of an EnvGroup
        _check(part)
    if not getattr(environment, "envs", None) and getattr(environment, "max_turns", None) != 1:
        raise Unfit(f"{type(environment).__name__} takes more than one turn; environments of one turn are served")
    if getattr(environment, "tool_defs", None):
        raise Unfit("its model calls tools; environments without tools are served")
    if environment.rubric.has_group_rewards:
        raise Unfit("its rubric compares the answers of a group; rubrics that score each answer by itself are served")


def _row(row: Mapping[str, Any]) -> Row:
    return Row(text_messages(row["prompt"]), json.loads(json.dumps(dict(row), default=str)))


def _client_class() -> type[Any]:
    """A client of the package's whose one response is known; made here, since the package is imported late."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    numbers = itertools.count()

    class Answering(Client):  # type: ignore[misc]
        def __init__(self, answer: str) -> None:
            super().__init__(None)
            self._answer = answer

        async def get_response(self, *_: object, **__: object) -> Any:
            message = ResponseMessage(content=self._answer, finish_reason="stop", is_truncated=False)
            return Response(id=str(next(numbers)), created=0, model="policy", message=message)

        async def close(self) -> None:
            """There is nothing to close."""

        def _unused(self, *_: object) -> Any:
            raise NotImplementedError("the answer is known; nothing is asked of a server")

        setup_client = to_native_tool = to_native_prompt = _unused
        get_native_response = raise_from_native_response = from_native_response = _unused

    return Answering


class _Collecting(logging.Handler):
    """Keeps the errors that are logged while an answer is scored."""

    def emit(self, record: logging.LogRecord) -> None:
        errors = _ERRORS.get(None)
        if errors is not None:
            errors.append(record.getMessage())
