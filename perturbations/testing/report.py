# SPDX-License-Identifier: Apache-2.0
"""What a check that fails says, and the comparisons that several checks need."""

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from perturbations import user_files

_Answer = TypeVar("_Answer")
_Asked = TypeVar("_Asked")

CLOSE = 1e-5
_ORDER = (4, 0, 6, 2, 1, 5, 3)
EVERY_ROW = (
    "Each row must depend on that row alone, since it is an accident which trajectories share a batch: no mean, sort or"
    " random draw over the first dimension."
)


class PerturbationError(AssertionError):
    """A perturbation or a gate breaks its contract: ``what`` is wrong, and the ``fix``."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what, fix)
        self.what, self.fix = what, fix

    def __str__(self) -> str:
        return f"{self.what} {self.fix}"


def require(holds: object, what: str, fix: str) -> None:
    """Raises :class:`PerturbationError` unless something holds."""
    if not holds:
        raise PerturbationError(what, fix)


def check_tensor(label: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raises unless it is a tensor of this shape, type and device; ``label`` names owner and tensor."""
    is_tensor = isinstance(tensor, Tensor)
    require(is_tensor, f"{label} is a {type(tensor).__name__}.", f"It must be a tensor of shape {shape}.")
    seen = tuple(tensor.shape)
    require(seen == shape, f"{label} has shape {seen}.", f"It must be {shape}: one row for each position.")
    require(tensor.dtype == dtype, f"{label} is {tensor.dtype}.", f"It must be {dtype}: convert it with .to({dtype}).")
    fix = f"It must be on the logits' device, {device}: make tensors with device=step.logits.device."
    require(tensor.device == device, f"{label} is on {tensor.device}.", fix)


def answered(label: str, ask: Callable[[], _Answer], fix: str = "It must accept any logits.") -> _Answer:
    """A call's result; raises :class:`PerturbationError` where it fails. ``label`` names owner and method."""
    try:
        return ask()
    except Exception as error:
        where = user_files.fault(error)  # with its line and a fix
        what = f"{label}: {where}" if where else f"{label} raises {type(error).__name__}: {error}"
        raise PerturbationError(what, "" if where else fix) from error


def differing(one: object, two: object, exact: bool = False, name: str = "it") -> str | None:
    """The first difference of two tensors, or of two dataclasses or mappings of tensors; None where there is none."""
    if _parts(one) and two is not None:
        labels = {part: f"{name}.{part}".removeprefix("it.") for part in _parts(one)}
        differences = (differing(_parts(one)[part], _parts(two)[part], exact, labels[part]) for part in labels)
        return next(filter(None, differences), None)
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return None
    if one.shape != two.shape:
        return f"{name} has shape {tuple(one.shape)} and {tuple(two.shape)}"
    if one.dtype == torch.bool:
        one, two = one.to(torch.int8), two.to(torch.int8)
    tolerance = CLOSE if one.is_floating_point() and not exact else 0.0
    different = (one - two).abs() > tolerance * (1.0 + one.abs())
    return f"{name} is {one[different][0].item()} and {two[different][0].item()}" if different.any() else None


def of_rows(whole: Any, rows: Tensor) -> Any:
    """Some of the rows, in a given order, of a tensor or of a dataclass or mapping of tensors, such as a step."""
    return mapped(whole, lambda part: part[rows])


def mapped(whole: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tensor, or a dataclass or mapping of tensors, with each changed."""
    if isinstance(whole, Tensor):
        return change(whole)
    parts = {name: mapped(part, change) for name, part in _parts(whole).items()}
    return type(whole)(**parts) if dataclasses.is_dataclass(whole) else parts if isinstance(whole, Mapping) else whole


def _parts(whole: object) -> dict[str, Any]:
    """What a dataclass or mapping holds, by name; nothing for anything else."""
    if dataclasses.is_dataclass(whole):
        return {field.name: getattr(whole, field.name) for field in dataclasses.fields(whole)}
    return dict(whole) if isinstance(whole, Mapping) else {}


STEP_DRAWS = "Draw with step.uniform, step.gumbel, step.normal or step.draws: the same wherever a position is computed."


def check_answers(
    where: str,
    method: str,
    ask: Callable[[_Asked], _Answer],
    step: _Asked,
    *,
    prefix: str = "step.",
    draws: str = STEP_DRAWS,
) -> _Answer:
    """The result for a step, which must be repeatable, each row's own, and leave step and global generators alone.

    ``ask`` maps a dataclass of 7 rows to a tensor or a dataclass of tensors. The others are for messages:
    owner with step, method, what is before the names of the step's parts, how to draw.
    """
    parts = _parts(step)
    parts |= {f"state[{name!r}]": part for name, part in _parts(parts.get("state")).items()}
    before = {name: part.clone() for name, part in parts.items() if isinstance(part, Tensor)}
    state = global_random_state()
    answer = ask(step)
    what = f"{where} {method} draws from a global random generator (torch's, numpy's or Python's)."
    require(global_random_state() == state, what, draws)
    for name, tensor in before.items():
        what = f"{where} {method} changes {prefix}{name} in place, which others read after it."
        fix = f"Work on a copy: {prefix}{name}.clone(), or methods without a trailing underscore."
        require(torch.equal(tensor, parts[name]), what, fix)
    difference = differing(answer, ask(step), exact=True)
    fix = f"Keep no state between calls. {draws}"
    require(not difference, f"{where} {method} gives two results for the same step, {difference}.", fix)
    order = torch.tensor(_ORDER)
    for what, rows in [("in another batch order", order), *((f"row {i} alone", order[i : i + 1]) for i in range(7))]:
        difference = differing(of_rows(answer, rows), ask(of_rows(step, rows)))
        require(not difference, f"{where} {what} {method} gives another result, {difference}.", EVERY_ROW)
    return answer


def global_random_state() -> tuple[object, ...]:
    """Of torch, numpy and Python, from which no perturbation may draw."""
    _, words, *rest = np.random.get_state(legacy=True)
    return torch.random.get_rng_state().numpy().tobytes(), np.asarray(words).tobytes(), rest, random.getstate()
