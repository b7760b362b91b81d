# SPDX-License-Identifier: Apache-2.0
"""The error of a check that fails, and the comparisons that several checks need."""

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from perturbations import user_files

_Result = TypeVar("_Result")
_Step = TypeVar("_Step")

CLOSE = 1e-5  # the largest difference of two floats, relative to 1 plus the first one's size
_ORDER = (4, 0, 6, 2, 1, 5, 3)  # another order of a step's 7 rows
EVERY_ROW = (
    "Each row must depend on that row alone, since it is an accident which trajectories share a batch: no mean, sort or"
    " random draw over the first dimension."
)


class PerturbationError(AssertionError):
    """An extension, such as a perturbation or a buffer, breaks its contract: ``what`` is wrong, and the ``fix``."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what, fix)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what} {self.fix}"


class NoAnswer(PerturbationError):
    """A method raises, or its result has a wrong type, shape or dtype, so that nothing can be said of its values."""


class NotRun(PerturbationError):
    """The outcome of a check that needs the result of an earlier one, which is wrong; it is not counted as a fault."""

    def __init__(self, needed: str) -> None:
        super().__init__(f"It needs {needed!r}, which is wrong.", "Correct that first.")


class Check(NamedTuple):
    """One check of a suite.

    Attributes:
        title: what it checks, for the screen.
        call: raises :class:`PerturbationError` where that does not hold.
        needed: whether the checks after it are not run where it ends in :class:`NoAnswer`.
    """

    title: str
    call: Callable[[], object]
    needed: bool = False


def expect(holds: object, what: str, fix: str) -> None:
    """Raises :class:`PerturbationError` unless something holds."""
    if not holds:
        raise PerturbationError(what, fix)


def refuse(values: Tensor, is_wrong: Tensor, label: str, fix: str) -> None:
    """Raises :class:`PerturbationError` for the first of the wrong values, if any."""
    wrong_values = values[is_wrong].tolist()
    if wrong_values:
        raise PerturbationError(f"{label} holds {wrong_values[0]:g}.", fix)


def check_tensor(label: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raises :class:`NoAnswer` unless it is a tensor of this shape, type and device.

    ``label``: owner and name of the tensor, for the message.
    """
    if not isinstance(tensor, Tensor):
        raise NoAnswer(f"{label} is a {type(tensor).__name__}.", f"It must be a tensor of shape {shape}.")
    if tuple(tensor.shape) != shape:
        raise NoAnswer(
            f"{label} has shape {tuple(tensor.shape)}.",
            f"It must be {shape}: one row for each position.",
        )
    if tensor.dtype != dtype:
        raise NoAnswer(f"{label} is {tensor.dtype}.", f"It must be {dtype}: convert it with .to({dtype}).")
    if tensor.device != device:
        raise NoAnswer(
            f"{label} is on {tensor.device}.",
            f"It must be on the logits' device, {device}: make tensors with device=step.logits.device.",
        )


def answered(label: str, call: Callable[[], _Result], fix: str = "It must accept any logits.") -> _Result:
    """A call's result; raises :class:`NoAnswer` where it fails. ``label`` names owner and method."""
    try:
        return call()
    except Exception as error:
        fault = user_files.fault(error)
        fix = _hint(error, fault or "", label) + fix
        if fault is not None:
            what = fault.removesuffix(user_files.FIX_THAT_LINE).rstrip()
            raise NoAnswer(f"{label}: {what}", f"Correct that line. {fix}") from error
        raise NoAnswer(f"{label} raises {type(error).__name__}: {error}", fix) from error


def _hint(error: Exception, fault: str, label: str) -> str:
    """The declaration that is likely to be missing in the class, as a sentence and a space; empty if none is.

    ``fault``: the error with its line of the user's file, which names the value. ``label`` names the method.
    """
    if isinstance(error, KeyError) and "state[" in fault:
        return 'step.state has the names of initial_state(self), such as {"spent": 0}. '
    if "'NoneType'" in str(error) and "hidden" in fault:
        if label.endswith(("open()", "advance()")):
            return "A gate gets no hidden states: decide by step.logits, step.sampled or step.generated. "
        return "step.hidden is None unless the class says reads_hidden = True. "
    return ""


def differing(one: object, two: object, exact: bool = False, name: str = "it") -> str | None:
    """The first difference of two tensors, or of two dataclasses or mappings of tensors; None where there is none.

    ``name``: of the compared value, in the result. ``exact``: whether floats must be equal bit for bit.
    """
    values = _values(one)
    if values and two is not None:
        other_values = _values(two)
        for key, value in values.items():
            label = f"{name}.{key}".removeprefix("it.")
            difference = differing(value, other_values[key], exact, label)
            if difference:
                return difference
        return None
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return None
    if one.shape != two.shape:
        return f"{name} has shape {tuple(one.shape)} and {tuple(two.shape)}"
    if one.dtype == torch.bool:
        one = one.to(torch.int8)
        two = two.to(torch.int8)
    tolerance = CLOSE if one.is_floating_point() and not exact else 0.0
    is_different = (one - two).abs() > tolerance * (1.0 + one.abs())
    if not is_different.any():
        return None
    return f"{name} is {one[is_different][0].item()} and {two[is_different][0].item()}"


def of_rows(value: Any, rows: Tensor) -> Any:
    """Rows, by their numbers, of a tensor or of a dataclass or mapping of tensors, such as a step."""
    return mapped(value, lambda tensor: tensor[rows])


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tensor, or a dataclass or mapping of tensors, with each tensor changed; anything else as it is."""
    if isinstance(value, Tensor):
        return change(value)
    changed = {name: mapped(inner_value, change) for name, inner_value in _values(value).items()}
    if dataclasses.is_dataclass(value):
        return type(value)(**changed)
    if isinstance(value, Mapping):
        return changed
    return value


def tensors_of(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a dataclass or mapping, with names such as ``edit.weights``; a tensor itself has ``name``."""
    if isinstance(value, Tensor):
        yield name, value
    for key, inner_value in _values(value).items():
        yield from tensors_of(inner_value, f"{name}.{key}".removeprefix("."))


def _values(value: object) -> dict[str, Any]:
    """The values of a dataclass's fields or of a mapping, by name; none for anything else."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    return {}


STEP_DRAWS = "Draw with step.uniform, step.gumbel, step.normal or step.draws: the same wherever a position is computed."


def check_repeatable(
    where: str,
    method: str,
    call: Callable[[_Step], _Result],
    step: _Step,
    *,
    prefix: str,
    draws: str,
    what: str = "step",
) -> _Result:
    """The result for a step, which must be repeatable, and leave the step and global generators alone.

    Args:
        where: owner and step, for messages.
        method: its name, for messages.
        call: maps a dataclass to a tensor or a dataclass of tensors.
        step: the dataclass.
        prefix: what is before the names of the step's fields in messages.
        draws: how to draw, for messages.
        what: the step in a word, for messages.
    """
    values = _values(step)
    for name, state in _values(values.get("state")).items():
        values[f"state[{name!r}]"] = state
    if "embeddings" in values:
        values["embeddings.matrix()"] = values["embeddings"].matrix()  # the model's own weights, not a copy
    copies = {name: value.clone() for name, value in values.items() if isinstance(value, Tensor)}
    result = without_global_draws(f"{where} {method}", lambda: call(step), draws)
    for name, copy in copies.items():
        expect(
            torch.equal(copy, values[name]),
            f"{where} {method} changes {prefix}{name} in place, which others read after it.",
            f"Work on a copy: {prefix}{name}.clone(), or methods without a trailing underscore.",
        )
    difference = differing(result, call(step), exact=True)
    expect(
        not difference,
        f"{where} {method} gives two results for the same {what}, {difference}.",
        f"Keep no state between calls. {draws}",
    )
    return result


def check_answers(
    where: str,
    method: str,
    call: Callable[[_Step], _Result],
    step: _Step,
    *,
    prefix: str = "step.",
    draws: str = STEP_DRAWS,
) -> _Result:
    """The result for a step of 7 rows, which must be each row's own, and as :func:`check_repeatable` asks."""
    result = check_repeatable(where, method, call, step, prefix=prefix, draws=draws)
    order = torch.tensor(_ORDER)
    selections = {"in another batch order": order}
    for index in range(len(order)):
        selections[f"row {index} alone"] = order[index : index + 1]
    for how, rows in selections.items():
        difference = differing(of_rows(result, rows), call(of_rows(step, rows)))
        expect(not difference, f"{where} {how} {method} gives another result, {difference}.", EVERY_ROW)
    return result


def without_global_draws(label: str, call: Callable[[], _Result], fix: str) -> _Result:
    """A call's result; raises :class:`PerturbationError` if it draws from a global generator.

    ``label`` names owner and method; ``fix``: how to draw.
    """
    random_state = _global_random_state()
    result = call()
    expect(
        _global_random_state() == random_state,
        f"{label} draws from a global random generator (torch's, numpy's or Python's).",
        fix,
    )
    return result


def _global_random_state() -> tuple[object, ...]:
    """The states of the global generators of torch, numpy and Python, from which no perturbation may draw."""
    _, numpy_words, *numpy_rest = np.random.get_state(legacy=True)
    return (
        torch.random.get_rng_state().numpy().tobytes(),
        np.asarray(numpy_words).tobytes(),
        numpy_rest,
        random.getstate(),
    )
