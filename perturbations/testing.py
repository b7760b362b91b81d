"""The conformance suite of operators, for ours and for a third party's."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perturbations import registry, streams
from perturbations.base import Perturbation, Proposal, Step
from perturbations.edit import InputEdit, realise
from perturbations.geometry import matrix_geometry
from perturbations.options import coerce
from perturbations.replay import ReplayRecord

RESERVED = ("name", "config")
_ROWS, _DIMENSION = 7, 8
_CLOSE = 1e-5
_log = logging.getLogger(__name__)


class PerturbationError(AssertionError):
    """An operator breaks the contract; says what is wrong, what was seen and what to do."""


def check_perturbation(operator: Perturbation | type[Perturbation] | str, **options: Any) -> None:
    """Checks that an operator keeps the contract of :class:`perturbations.Perturbation`.

    Runs on a small synthetic model, in well under a second, on CPU.

    Args:
        operator: an operator, its class, its registry name, or ``package.module:Name``.
        options: options to create it with; none where ``operator`` is already made.

    Raises:
        PerturbationError: for the first broken promise.
        ValueError: where the options are not the operator's.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        made = _make(operator, options)
        _check_options(made)
        _check_spec(made)
        for label, step in _steps(made):
            _check_step(made, label, step)


def _make(operator: Perturbation | type[Perturbation] | str, options: dict[str, Any]) -> Perturbation:
    if isinstance(operator, Perturbation):
        if options:
            raise ValueError(
                f"options {', '.join(options)} come too late for an operator that is already made: pass its class."
            )
        _check_class(type(operator))
        return operator
    cls = registry.get(operator) if isinstance(operator, str) else operator
    _check_class(cls)
    cls.check_option_names(list(options))
    return cls(**options)


def _check_class(cls: type[Perturbation]) -> None:
    """The class itself, and the declaration of each option."""
    if not (isinstance(cls, type) and issubclass(cls, Perturbation)):
        raise PerturbationError(f"{cls!r} is not an operator: derive it from perturbations.Perturbation.")
    if "__dataclass_fields__" not in vars(cls):
        raise PerturbationError(
            f"{cls.__qualname__} is not a dataclass: decorate it with @dataclass(frozen=True, kw_only=True)."
        )
    if "name" not in vars(cls):
        raise PerturbationError(f'{cls.__qualname__} has no name of its own: decorate it with @register("its-name").')
    if cls.__abstractmethods__:
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise PerturbationError(f"{cls.name}: {missing} must be implemented.")
    for field in dataclasses.fields(cls):
        _check_declaration(cls, field)


# --- options -----------------------------------------------------------------------------------------------


def _check_declaration(cls: type[Perturbation], field: dataclasses.Field) -> None:
    """The declaration of one option: its name, its help, its default."""
    label = f"{cls.name}: option {field.name!r}"
    if field.name in RESERVED:
        raise PerturbationError(f"{label} has a reserved name ({', '.join(RESERVED)}): rename it.")
    if field.default is dataclasses.MISSING:
        raise PerturbationError(f"{label} has no default: declare it with option(default, help).")
    if not field.metadata.get("help"):
        raise PerturbationError(f"{label} has no help text: declare it with option(default, help).")
    try:
        coerce(cls, field, field.default)
    except ValueError as error:
        raise PerturbationError(f"{label} refuses its own default {field.default!r}: {error}") from error


def _bad_values(field: dataclasses.Field) -> list[Any]:
    meta = field.metadata
    bad = [] if meta.get("low") is None else [meta["low"] - 1]
    bad += [] if meta.get("high") is None else [meta["high"] + 1]
    bad += [] if meta.get("above") is None else [meta["above"]]
    return bad + (["no-such-choice"] if meta.get("choices") else [])


def _check_options(operator: Perturbation) -> None:
    """Values out of range are refused in words."""
    cls = type(operator)
    present = {f.name: getattr(operator, f.name) for f in dataclasses.fields(operator)}
    for field in dataclasses.fields(operator):
        for value in _bad_values(field):
            label = f"{cls.name}: {field.name}={value!r}, which is out of range,"
            try:
                cls(**{**present, field.name: value})
            except ValueError as error:
                if repr(value) not in str(error) and f"{value:g}" not in str(error):
                    raise PerturbationError(
                        f"{label} is refused without naming the value ({error}): put it into the message."
                    ) from error
            except Exception as error:
                raise PerturbationError(
                    f"{label} raises {type(error).__name__} ({error}) instead of ValueError: call"
                    " super().__post_init__() first in __post_init__."
                ) from error
            else:
                raise PerturbationError(f"{label} is accepted: call super().__post_init__() in __post_init__.")


def _check_spec(operator: Perturbation) -> None:
    """Another process can make the same operator from the spec."""
    name, spec = operator.name, operator.spec()
    try:
        plain = json.loads(json.dumps(spec))
    except TypeError as error:
        raise PerturbationError(f"{name}: spec() is not plain data ({error}): options must be scalars.") from error
    if "<locals>" in spec["name"]:
        raise PerturbationError(
            f"{name}: its class {spec['name']!r} stands inside a function, where no other process finds it:"
            " move it to the top of a module."
        )
    try:
        again = registry.create(**plain)
    except ValueError as error:
        raise PerturbationError(f"{name}: create(**spec()) fails for {spec}: {error}") from error
    if type(again) is not type(operator) or again != operator:
        raise PerturbationError(
            f"{name}: create(**spec()) gives {again!r}, not {operator!r}: each option must survive being"
            " passed again, and two classes must not share a name."
        )
    if operator.fingerprint() != operator.fingerprint() or again.fingerprint() != operator.fingerprint():
        raise PerturbationError(
            f"{name}: fingerprint() is not stable ({operator.fingerprint()}): it must depend on the options alone."
        )


# --- proposals ---------------------------------------------------------------------------------------------


def _steps(operator: Perturbation) -> list[tuple[str, Step]]:
    """Steps over a synthetic model: ordinary logits, temperatures, masks, both extremes of confidence."""
    if not isinstance(operator.candidates, int) or operator.candidates < 1:
        raise PerturbationError(f"{operator.name}: candidates is {operator.candidates!r}: must be at least 1.")
    vocabulary = max(64, 2 * operator.candidates)
    try:
        operator.check_model(vocabulary)
    except ValueError as error:
        raise PerturbationError(
            f"{operator.name}: check_model refuses a vocabulary of {vocabulary} tokens, though only"
            f" {operator.candidates} are candidates: {error}"
        ) from error
    generator = torch.Generator().manual_seed(20)
    embedding = torch.randn(vocabulary, _DIMENSION, generator=generator)
    embedding[5] = 0.0  # never-trained tokens: a zero row and two equal ones
    embedding[7] = embedding[6]
    geometry = matrix_geometry(embedding, special_ids=(0, 1))
    seeds = torch.randint(-(2**62), 2**62, (_ROWS,), generator=generator)
    positions = torch.randint(1, 10_000, (_ROWS,), generator=generator).sort().values
    raw = 3.0 * torch.randn(_ROWS, vocabulary, generator=generator)

    def step(logits: Tensor, temperature: float = 1.0) -> Step:
        noise = streams.gumbel(streams.keys(seeds, positions, streams.Stream.TOKEN), vocabulary)
        sampled = (logits + noise).argmax(dim=-1)
        return Step(logits, sampled, torch.full((_ROWS,), temperature), seeds, positions, geometry)

    masked = raw.clone()
    masked[:, :3] = -torch.inf
    masked[1, 4:] = -torch.inf  # one possible token, as grammars do
    peaked = raw.clone()
    peaked[torch.arange(_ROWS), torch.arange(_ROWS) + 9] = 1e4
    return [
        ("ordinary logits", step(raw)),
        ("temperature 0.3", step(raw / 0.3, 0.3)),
        ("temperature 1.5", step(raw / 1.5, 1.5)),
        ("logits with -inf (masked tokens)", step(masked)),
        ("very peaked logits", step(peaked)),
        ("uniform logits", step(torch.zeros_like(raw))),
    ]


def _check_step(operator: Perturbation, label: str, step: Step) -> None:
    def fail(what: str, mend: str) -> PerturbationError:
        return PerturbationError(f"{operator.name}, {label}: {what}. {mend}")

    before = {f.name: getattr(step, f.name).clone() for f in dataclasses.fields(step) if f.name != "geometry"}
    global_state = _global_random_state()
    proposal = _propose(operator, step, fail)
    if _global_random_state() != global_state:
        raise fail(
            "propose() draws from a global random generator",
            "Draw with step.uniform, step.gumbel or step.normal.",
        )
    for name, tensor in before.items():
        if not torch.equal(tensor, getattr(step, name)):
            raise fail(f"propose() changes step.{name} in place", "Work on a copy.")
    _check_proposal(operator, step, proposal, fail)
    difference = _difference(proposal, _propose(operator, step, fail), exact=True)
    if difference:
        raise fail(
            f"the same step gives two results, {difference}",
            "Use no randomness but the step's, and keep no state between calls.",
        )
    order = torch.tensor([4, 0, 6, 2, 1, 5, 3])
    for what, rows in [
        ("in another batch order", order),
        *((f"row {i} alone", order[i : i + 1]) for i in range(7)),
    ]:
        difference = _difference(_rows(proposal, rows), _propose(operator, _step_rows(step, rows), fail))
        if difference:
            raise fail(f"{what} the result differs, {difference}", "Each row must depend on that row alone.")
    if label == "ordinary logits":
        other = dataclasses.replace(step, seeds=step.seeds + 1)
        same = _difference(proposal, _propose(operator, other, fail), exact=True) is None
        drawn = "draws no weights or tokens of its own" if same else "draws weights or tokens from the seed"
        _log.info("%s %s", operator.name, drawn)
    _check_record(step, proposal, fail)


def _propose(operator: Perturbation, step: Step, fail: Callable[[str, str], PerturbationError]) -> Proposal:
    try:
        proposal = operator.propose(step)
    except Exception as error:
        raise fail(f"propose() raises {type(error).__name__}: {error}", "It must answer for any logits.") from error
    if not isinstance(proposal, Proposal) or not isinstance(proposal.edit, InputEdit):
        raise fail(f"propose() returns {type(proposal).__name__}", "Return Proposal(InputEdit(...), tokens).")
    return proposal


def _check_proposal(
    operator: Perturbation, step: Step, proposal: Proposal, fail: Callable[[str, str], PerturbationError]
) -> None:
    """Shapes, types, ranges and values of one proposal."""
    rows, vocabulary = step.logits.shape
    edit, wide = proposal.edit, (rows, operator.candidates)
    _check_tensor("edit.ids", edit.ids, wide, torch.int64, step, fail)
    _check_tensor("edit.weights", edit.weights, wide, torch.float32, step, fail)
    _check_tensor("tokens", proposal.tokens, (rows,), torch.int64, step, fail)
    for name, ids in (("edit.ids", edit.ids), ("tokens", proposal.tokens)):
        outside = ids[(ids < 0) | (ids >= vocabulary)]
        if len(outside):
            raise fail(f"{name} holds {outside[0].item()}", f"Ids must be in [0, {vocabulary - 1}].")
    if not torch.isfinite(edit.weights).all():
        bad = edit.weights[~torch.isfinite(edit.weights)][0].item()
        raise fail(f"edit.weights holds {bad}", "Weights must be finite, whatever the logits.")
    if edit.weights.min() < 0.0:
        raise fail(f"edit.weights holds {edit.weights.min().item():g}", "Weights must not be negative.")
    sums = edit.weights.double().sum(dim=-1)
    worst = sums[(sums - 1.0).abs().argmax()].item()
    if abs(worst - 1.0) > _CLOSE:
        raise fail(f"the weights of a position sum to {worst:.6g}", "They must sum to 1: normalise them.")
    if operator.noisy != (edit.sigma is not None):
        seen = "missing" if edit.sigma is None else "there"
        raise fail(f"noisy is {operator.noisy} but edit.sigma is {seen}", "The two must agree.")
    if edit.sigma is not None:
        _check_tensor("edit.sigma", edit.sigma, (rows,), torch.float32, step, fail)
        if not (torch.isfinite(edit.sigma) & (edit.sigma >= 0.0)).all():
            raise fail(f"edit.sigma holds {edit.sigma.min().item()}", "It must be finite and not negative.")
    masked = step.logits.gather(-1, proposal.tokens.unsqueeze(-1)).isneginf().flatten()
    if masked.any():
        token = proposal.tokens[masked][0].item()
        raise fail(f"token {token} stands in the text though its logit is -inf", "Choose a possible token.")
    keys = streams.keys(step.seeds, step.positions, streams.Stream.NOISE)
    if not torch.isfinite(realise(edit, step.geometry.lookup, keys)).all():
        raise fail("the perturbed input is not finite", "Check weights and sigma.")


def _check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    step: Step,
    fail: Callable[[str, str], PerturbationError],
) -> None:
    if not isinstance(tensor, Tensor):
        raise fail(f"{name} is a {type(tensor).__name__}", "It must be a tensor.")
    if tuple(tensor.shape) != shape:
        raise fail(
            f"{name} has shape {tuple(tensor.shape)}",
            f"It must be {shape}: a row per position, and as many columns as the property candidates says.",
        )
    if tensor.dtype != dtype:
        raise fail(f"{name} is {tensor.dtype}", f"It must be {dtype}.")
    if tensor.device != step.logits.device:
        raise fail(f"{name} is on {tensor.device}", f"It must be on the logits' device, {step.logits.device}.")


def _difference(one: Proposal, two: Proposal, exact: bool = False) -> str | None:
    """Where two proposals differ, in words; None where they do not."""
    pairs = [("tokens", one.tokens, two.tokens), ("edit.ids", one.edit.ids, two.edit.ids)]
    pairs += [("edit.weights", one.edit.weights, two.edit.weights)]
    if one.edit.sigma is not None and two.edit.sigma is not None:
        pairs += [("edit.sigma", one.edit.sigma, two.edit.sigma)]
    for name, a, b in pairs:
        if a.shape != b.shape:
            return f"{name} has shape {tuple(a.shape)} and {tuple(b.shape)}"
        tolerance = _CLOSE if a.is_floating_point() and not exact else 0.0
        different = (a - b).abs() > tolerance * (1.0 + a.abs())
        if different.any():
            return f"{name} is {a[different][0].item()} and {b[different][0].item()}"
    return None


def _rows(proposal: Proposal, rows: Tensor) -> Proposal:
    edit = proposal.edit
    sigma = None if edit.sigma is None else edit.sigma[rows]
    return Proposal(InputEdit(edit.ids[rows], edit.weights[rows], sigma), proposal.tokens[rows])


def _step_rows(step: Step, rows: Tensor) -> Step:
    tensors = (step.logits, step.sampled, step.temperature, step.seeds, step.positions)
    return Step(*(t[rows] for t in tensors), step.geometry)


def _global_random_state() -> tuple[bytes, bytes, tuple[Any, ...]]:
    return (
        torch.random.get_rng_state().numpy().tobytes(),
        np.random.get_state()[1].tobytes(),
        random.getstate(),
    )


def _check_record(step: Step, proposal: Proposal, fail: Callable[[str, str], PerturbationError]) -> None:
    """The edits survive being written to a record, to bytes and back."""
    edit = proposal.edit
    parts = {
        "positions": step.positions.to(torch.int32).numpy(),
        "ids": edit.ids.to(torch.int32).numpy(),
        "weights": edit.weights.numpy(),
        "sigma": None if edit.sigma is None else edit.sigma.numpy(),
        "agreed": (proposal.tokens == step.sampled).numpy(),
    }
    record = ReplayRecord(seed=1, prompt_tokens=1, num_tokens=int(step.positions[-1]) + 1, **parts)
    again = ReplayRecord.from_bytes(record.to_bytes())
    for name, value in parts.items():
        restored = getattr(again, name)
        if (value is None) != (restored is None) or (value is not None and not np.array_equal(value, restored)):
            raise fail(f"{name} does not survive a replay record", "Report this: the record format is ours.")
