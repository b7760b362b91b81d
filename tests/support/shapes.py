# SPDX-License-Identifier: Apache-2.0
"""Checks the shapes and dtypes of annotations as tests run: those of jaxtyping, in the classes and modules named here.

In the tests alone: outside of them an annotation costs nothing, since nobody looks at it. Functions that the compiler
is tracing are left alone, so that what is compiled in a test is what is compiled without one.
"""

import contextlib
import contextvars
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from jaxtyping import AbstractArray, jaxtyped

DATACLASSES = (
    "perturbations.step:Step",
    "perturbations.step:GateStep",
    "perturbations.edit:InputEdit",
    "perturbations.base:Proposal",
    "perturbations.base:Replayed",
    "ngrpo.methods.credits.base:LossTokens",
)
METHODS = (
    "ngrpo.trainers.common.log_probs:Densities.override",
    "ngrpo.trainers.common.log_probs:Densities.for_policy_loss",
    "ngrpo.trainers.common.policy_loss:CreditInLoss.__call__",
    "ngrpo.trainers.common.policy_loss:TwoRoundsLoss.__call__",
)
MODULES = ("perturbations.density",)


_ANNOTATED: dict[Callable[..., Any], tuple[inspect.Signature, dict[str, Any]]] = {}
_OFF: contextvars.ContextVar[bool] = contextvars.ContextVar("shapes_unchecked", default=False)


class WrongShape(TypeError):
    """A tensor that is not what its annotation says."""


def check() -> None:
    """Puts the checks in place, in this process; a second call changes nothing."""
    for name in (*DATACLASSES, *METHODS):
        module, _, path = name.partition(":")
        owner, _, method = path.partition(".")
        _replace(getattr(import_module(module), owner), method or "__init__")
    for name in MODULES:
        module = import_module(name)
        for function, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and value.__module__ == name:
                _replace(module, function)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Where a wrong tensor is what a test is about."""
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)


def _replace(owner: Any, name: str) -> None:
    original = vars(owner)[name]
    if not hasattr(original, "__wrapped__"):
        setattr(owner, name, _checked(original, owner if name == "__init__" else original))


def _checked(original: Callable[..., Any], annotated: Any) -> Callable[..., Any]:
    """``original``, whose arguments and result must be what ``annotated``, the function or its class, says."""
    # By the names of the fields, inherited ones among them: each class's in its own module.
    _ANNOTATED[original] = inspect.signature(original), typing.get_type_hints(annotated)

    # Nothing in its closure but functions: the compiler has to wrap what stands there, even where it is not used.
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _OFF.get():
            return original(*args, **kwargs)
        return _called(original, *args, **kwargs)

    return function


def _called(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    signature, hints = _ANNOTATED[original]
    # One context, so that an axis has one size in all arguments and in the result.
    with jaxtyped("context"):
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            _require(original, name, value, hints.get(name))
        result = original(*args, **kwargs)
        _require(original, "its result", result, hints.get("return"))
    return result


def _require(owner: Callable[..., Any], name: str, value: Any, hint: Any) -> None:
    """Raises ``WrongShape`` for a value that is none of the arrays that a hint names; other hints are not looked at."""
    if isinstance(value, Mapping):
        arguments = typing.get_args(hint)
        value_hint = arguments[-1] if arguments else None
        for key, item in value.items():
            _require(owner, f"{name}[{key!r}]", item, value_hint)
        return
    kinds = _alternatives(hint)
    arrays = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, AbstractArray)]
    is_allowed_none = value is None and type(None) in kinds
    if not arrays or is_allowed_none:
        return
    if not any(isinstance(value, kind) for kind in arrays):
        kind = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise WrongShape(f"{owner.__qualname__}: {name} is {kind}; annotated as {hint}")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union; a hint that is none is its only member."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.get_args(hint)
    return (hint,)
