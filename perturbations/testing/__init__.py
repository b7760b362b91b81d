# SPDX-License-Identifier: Apache-2.0
"""The conformance suites of perturbations and gates, ours and a third party's: the checks, in order."""

import dataclasses
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from perturbations import Gate, Perturbation, registry
from perturbations.options import Options, coerce
from perturbations.testing import proposal
from perturbations.testing.report import PerturbationError, require

__all__ = ["PerturbationError", "check_gate", "check_perturbation", "inspect", "outcomes"]

_RESERVED = ("name", "config", "source")
_CALL_SUPER = "Call super().__post_init__() first in your __post_init__: it checks the ranges."
_Target = Options | type[Options] | str
_Checks = Iterator[tuple[str, Callable[[], object]]]


def check_perturbation(perturbation: Perturbation | type[Perturbation] | str, **options: object) -> None:
    """Checks that a perturbation keeps the contract of :class:`perturbations.Perturbation`, in under a second on a CPU.

    ``perturbation``: an object; or its class, registry name, ``./file.py:Name`` or ``package.module:Name`` with its
    ``options``. ``PerturbationError`` for the first broken promise, ``ValueError`` for an unknown name or option.
    """
    _raise_first(inspect(perturbation, "perturbation", **options))


def check_gate(gate: Gate | type[Gate] | str, **options: object) -> None:
    """Checks that a gate keeps the contract of :class:`perturbations.Gate`; as :func:`check_perturbation`."""
    _raise_first(inspect(gate, "gate", **options))


def inspect(
    target: _Target, kind: str = "perturbation", **options: object
) -> Iterator[tuple[str, PerturbationError | None]]:
    """Yields each check and its error, or None; nothing follows where the class itself is wrong.

    ``target`` and ``options`` as of :func:`check_perturbation`; ``kind``: ``perturbation`` or ``gate``.
    """
    registry, checks = _SUITES[kind]
    return outcomes(target, registry, checks, options)


def outcomes(
    target: _Target, registry: registry.Registry, own: Callable[[Any], _Checks], options: dict[str, Any]
) -> Iterator[tuple[str, PerturbationError | None]]:
    """As :func:`inspect`, for any registry; ``own`` gives the checks of its kind beyond those of all options."""
    cls, made = registry.get(target) if isinstance(target, str) else target, None
    if not isinstance(cls, type):
        cls, made = type(cls), cls
        if options:
            late = f"options {', '.join(options)} come too late"
            raise ValueError(f"{late}: this {registry.kind} is already made. Pass its class.")
    declared = _outcome(partial(check_class, registry, cls, registry.base_class()))
    yield "the class, and how its options are declared", declared
    if declared is not None:
        return
    if made is None:
        cls.check_option_names(list(options))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            made = cls(**options)
    yield "values out of range are refused, in words", _outcome(partial(check_options, made))
    yield "another process makes the same from its spec", _outcome(partial(check_spec, made))
    for title, run in own(made):
        yield title, _outcome(run)


def _perturbation_checks(perturbation: Perturbation) -> _Checks:
    yield "a small model that it fits", partial(proposal.check_model, perturbation)
    try:
        vocabulary = proposal.check_model(perturbation)
    except PerturbationError:
        return
    if perturbation.has_parameters:
        yield "its learned parameters", partial(proposal.check_module, perturbation)
    for label, step in proposal.steps(vocabulary):
        yield f"proposals for {label}", partial(proposal.check_step, perturbation, label, step)
    yield "no wait for the device", partial(proposal.check_waits, perturbation, proposal.steps(vocabulary)[1][1])


def _gate_checks(gate: Gate) -> _Checks:
    yield "it decides something", partial(proposal.check_decides, gate)
    yield "its plan of positions", partial(proposal.check_plan, gate)
    yield "the state that it declares", partial(proposal.check_state, gate)
    if _outcome(partial(proposal.check_state, gate)) is not None:
        return
    for label, step in proposal.steps(64):
        yield f"open rows for {label}", partial(proposal.check_open, gate, label, step)


_SUITES = {"perturbation": (registry.perturbations, _perturbation_checks), "gate": (registry.gates, _gate_checks)}


def _outcome(run: Callable[[], object]) -> PerturbationError | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            run()
        except PerturbationError as error:
            return error
    return None


def _raise_first(findings: Iterator[tuple[str, PerturbationError | None]]) -> None:
    for _, error in findings:
        if error is not None:
            raise error


def check_class(kind: registry.Registry, cls: type, base: type) -> None:
    """The class itself, and the declaration of each option."""
    derived, home = isinstance(cls, type) and issubclass(cls, base), kind.base.replace(":", ".")
    require(derived, f"{cls!r} is not a {kind.kind}.", f"Please derive it from {home}.")
    name, fix = cls.__qualname__, "Write @dataclass(frozen=True, kw_only=True) above the class."
    decorated = "__dataclass_fields__" in vars(cls)
    require(decorated, f"{name} is not a dataclass, so its options would not be seen.", fix)
    require(cls.__dataclass_params__.frozen, f"{name} can be changed after it is made.", fix)
    word = "register_gate" if kind is registry.gates else "register"
    fix = f'Write @{word}("its-name") above @dataclass, or name its file: ./file.py:{name}.'
    require("name" in vars(cls), f"{name} has no name of its own.", fix)
    missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
    fix = f"See {base.__name__} for arguments and result."
    require(not missing, f"{cls.name}: {missing} must be implemented.", fix)
    for field in dataclasses.fields(cls):
        label = f"{cls.name}: option {field.name!r}"
        reserved = field.name in _RESERVED or field.name.startswith(registry.GATE_OPTION)
        require(not reserved, f"{label} has a reserved name ({', '.join(_RESERVED)}).", "Please rename the option.")
        fix = f"Declare it as {field.name}: … = option(default, help)."
        require(field.default is not dataclasses.MISSING, f"{label} has no default.", fix)
        require(field.metadata.get("help"), f"{label} has no help text for `ngrpo train --help`.", fix)
        try:
            coerce(cls, field, field.default, kind.kind)
        except ValueError as error:
            what = f"{label} refuses its own default {field.default!r}: {error}"
            raise PerturbationError(what, "Change the default or the range.") from error
        except Exception as error:
            what = f"{label} has a type that a command line cannot give ({type(error).__name__}: {error})."
            fix = "Annotate it as int, float, bool or str, or one of these with `| None`."
            raise PerturbationError(what, fix) from error


def check_options(made: Options) -> None:
    """Values out of range are refused, by a message with the value."""
    cls = type(made)
    present = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}
    for field in dataclasses.fields(made):
        low, high, above, choices = (field.metadata.get(limit) for limit in ("low", "high", "above", "choices"))
        bad = [None if low is None else low - 1, None if high is None else high + 1, above]
        for value in [value for value in bad if value is not None] + (["no-such-choice"] if choices else []):
            label, error = f"{cls.name}: {field.name}={value!r}, which is out of range,", None
            try:
                cls(**{**present, field.name: value})
            except Exception as raised:
                error = raised
            require(error, f"{label} is accepted.", _CALL_SUPER)
            seen = f"{type(error).__name__} ({error})"
            require(isinstance(error, ValueError), f"{label} raises {seen} instead of ValueError.", _CALL_SUPER)
            named = repr(value) in str(error) or f"{value:g}" in str(error)
            what = f"{label} is refused without naming the value ({error})."
            require(named, what, "Put the value into the message.")


def check_spec(made: Options) -> None:
    """Another process can make the same object from the spec."""
    name, spec = made.name, made.spec()
    try:
        plain = json.loads(json.dumps(spec))
    except TypeError as error:
        what = f"{name}: spec() is not plain data ({error}), so it cannot be sent to another process."
        raise PerturbationError(what, "Options must be scalars: int, float, bool, str or None.") from error
    what = f"{name}: its class {spec['name']!r} is inside a function, where no other process finds it."
    require("<locals>" not in spec["name"], what, "Move it to the top of a module or a file.")
    try:
        again = made.registry.create(**plain)
    except ValueError as error:
        options = {key: value for key, value in spec.items() if not key.endswith("source")}
        what = f"{name}: create(**spec()) fails for {options}: {error}"
        raise PerturbationError(what, "The class must take each value of spec().") from error
    fix = "Each option must survive being passed again, and two classes must not share a name."
    same = type(again) is type(made) and again == made
    require(same, f"{name}: create(**spec()) gives {again!r}, not {made!r}.", fix)
    for how, one in (("asked twice", made), ("made again from the spec", again)):
        seen, expected = one.fingerprint(), made.fingerprint()
        what = f"{name}: fingerprint() is not stable: {how}, it is {seen} instead of {expected}."
        require(seen == expected, what, "It must depend on the options alone.")
    unchanged = pickle.loads(pickle.dumps(made)) == made
    require(unchanged, f"{name}: pickle changes it.", "Do not override __reduce__.")
