# SPDX-License-Identifier: Apache-2.0
"""The conformance suites of perturbations, gates and replay buffers, ours and a third party's: the checks, in order."""

import dataclasses
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from perturbations import Gate, Perturbation, ReplayBuffer, registry, user_files
from perturbations.errors import UsageError
from perturbations.options import Limits, Options, annotation, check_redeclared, coerce, scalar_kind
from perturbations.testing import buffer as buffer_checks
from perturbations.testing import gate as gate_checks
from perturbations.testing import proposal
from perturbations.testing.module import check_learning_rates, check_module
from perturbations.testing.report import Check, NoAnswer, NotRun, PerturbationError, expect

__all__ = [
    "Check",
    "NotRun",
    "PerturbationError",
    "check_buffer",
    "check_gate",
    "check_perturbation",
    "inspect",
    "outcomes",
]

_RESERVED = ("name", "config", "source")
_CALL_SUPER = "Call super().__post_init__() first in your __post_init__: it checks the ranges."
_Target = Options | type[Options] | str
_Checks = Iterator[Check]
_Outcomes = Iterator[tuple[str, PerturbationError | None]]


def check_perturbation(perturbation: Perturbation | type[Perturbation] | str, **options: object) -> None:
    """Checks that a perturbation keeps the contract of :class:`perturbations.Perturbation`, in seconds on a CPU.

    ``perturbation``: an object; or its class, registry name, ``./file.py:Name`` or ``package.module:Name`` with its
    ``options``. ``PerturbationError`` for the first broken promise, ``ValueError`` for an unknown name or option.
    """
    _raise_first(inspect(perturbation, "perturbation", **options))


def check_gate(gate: Gate | type[Gate] | str, **options: object) -> None:
    """Checks that a gate keeps the contract of :class:`perturbations.Gate`; as :func:`check_perturbation`."""
    _raise_first(inspect(gate, "gate", **options))


def check_buffer(buffer: ReplayBuffer | type[ReplayBuffer] | str, **options: object) -> None:
    """Checks that a buffer keeps the contract of :class:`perturbations.ReplayBuffer`; as :func:`check_perturbation`."""
    _raise_first(inspect(buffer, "replay_buffer", **options))


def inspect(target: _Target, kind: str = "perturbation", **options: object) -> _Outcomes:
    """Yields each check's title and its error, or None; nothing follows where the class itself is wrong.

    The error is a :class:`NotRun` where the check needs the result of an earlier one that is wrong.

    ``target`` and ``options`` as in :func:`check_perturbation`. ``kind``: ``perturbation``, ``gate`` or
    ``replay_buffer``.
    """
    registry_of_kind, checks = _SUITES[kind]
    return outcomes(target, registry_of_kind, checks, options)


def outcomes(
    target: _Target, registry: registry.Registry, own: Callable[[Any], _Checks], options: dict[str, Any]
) -> _Outcomes:
    """As :func:`inspect`, for any registry; ``own`` gives the checks of its kind beyond those of all options."""
    if isinstance(target, str):
        cls = registry.get(target)
    elif isinstance(target, type):
        cls = target
    else:
        cls = type(target)
    made = None if isinstance(target, (str, type)) else target
    if made is not None and options:
        raise ValueError(
            f"options {', '.join(options)} come too late: this {registry.kind} is already made. Pass its class."
        )
    error_of_class = _outcome(partial(check_class, registry, cls, registry.base_class()))
    yield "the class, and how its options are declared", error_of_class
    if error_of_class is not None:
        return
    if made is None:
        cls.check_option_names(list(options))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                made = cls(**options)
            except ValueError:  # a value that the class refuses
                raise
            except Exception as error:
                yield "an object is made of its options", _error_of_file(error)
                return
    yield "values out of range are refused, in words", _outcome(partial(check_options, made))
    yield "another process makes the same from its spec", _outcome(partial(check_spec, made))
    wrong_check = ""
    for check in own(made):
        if wrong_check:
            yield check.title, NotRun(wrong_check)
            continue
        error = _outcome(check.call)
        if check.needed and isinstance(error, NoAnswer):
            wrong_check = check.title
        yield check.title, error


def _perturbation_checks(perturbation: Perturbation) -> _Checks:
    for check in (
        Check("what it declares", partial(proposal.check_declarations, perturbation)),
        Check("a small model that it fits", partial(proposal.smallest_vocabulary, perturbation)),
    ):
        yield check
        if _outcome(check.call) is not None:
            return
    vocabulary = proposal.smallest_vocabulary(perturbation)
    if type(perturbation).module is not Perturbation.module:
        yield Check("its learned parameters", partial(check_module, perturbation), needed=True)
        yield Check("their learning rates", partial(check_learning_rates, perturbation))
    if type(perturbation).prepare is not Perturbation.prepare:
        yield Check("what it computes ahead", partial(proposal.check_prepare, perturbation, vocabulary))
    for number, (label, step) in enumerate(proposal.steps(vocabulary)):
        check = partial(proposal.check_step, perturbation, label, step)
        yield Check(f"proposals for {label}", check, needed=number == 0)
    if perturbation.has_text_probabilities or (perturbation.has_density and perturbation.zero_mean_score):
        _, ordinary = proposal.steps(vocabulary)[0]
        yield Check("its probabilities are those of its draws", partial(proposal.check_draws, perturbation, ordinary))
    _, step = proposal.steps(vocabulary)[1]
    yield Check("no wait for the device", partial(proposal.check_waits, perturbation, step))
    yield Check("positions at which it acts", partial(proposal.check_acts, perturbation, vocabulary))


def _gate_checks(gate: Gate) -> _Checks:
    yield Check("it decides something", partial(gate_checks.check_decides, gate))
    yield Check("its plan of positions", partial(gate_checks.check_plan, gate))
    yield Check("the state that it declares", partial(gate_checks.check_state, gate))
    if _outcome(partial(gate_checks.check_state, gate)) is not None:
        return
    for number, (label, step) in enumerate(proposal.steps(64)):
        check = partial(gate_checks.check_open, gate, label, step)
        yield Check(f"open rows for {label}", check, needed=number == 0)
    yield Check("positions at which it is open", partial(gate_checks.check_is_open, gate))


def _buffer_checks(buffer: ReplayBuffer) -> _Checks:
    yield Check("trajectories come out as they went in", partial(buffer_checks.check_hands_over, buffer))
    yield Check("a second trajectory of a name", partial(buffer_checks.check_replaces, buffer))
    yield Check("names that are not held", partial(buffer_checks.check_forgets, buffer))
    yield Check("a store of its own for each buffer", partial(buffer_checks.check_separate, buffer))


_SUITES = {
    "perturbation": (registry.perturbations, _perturbation_checks),
    "gate": (registry.gates, _gate_checks),
    "replay_buffer": (registry.buffers, _buffer_checks),
}


def _outcome(check: Callable[[], object]) -> PerturbationError | None:
    """The error of a check, or None where it passes; an error that arises in a user's file names its line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            check()
        except PerturbationError as error:
            return error
        except Exception as error:
            return _error_of_file(error)
    return None


def _error_of_file(error: Exception) -> PerturbationError:
    """An error that arose in a user's file, with the file's line; any other error is raised again."""
    fault = user_files.fault(error)
    if fault is None:
        raise error
    return PerturbationError(fault.removesuffix(user_files.FIX_THAT_LINE).rstrip(), "Correct that line.")


def _raise_first(results: _Outcomes) -> None:
    for _, error in results:
        if error is not None:
            raise error


def check_class(kind: registry.Registry, cls: type, base: type) -> None:
    """The class itself, and the declaration of each option."""
    expect(
        isinstance(cls, type) and issubclass(cls, base),
        f"{cls!r} is not a {kind.kind}.",
        f"Please derive it from {kind.base.replace(':', '.')}.",
    )
    name = cls.__qualname__
    decorate = "Write @dataclass(frozen=True, kw_only=True) above the class."
    is_decorated = "__dataclass_fields__" in vars(cls)
    expect(is_decorated, f"{name} is not a dataclass, so its options would not be seen.", decorate)
    expect(cls.__dataclass_params__.frozen, f"{name} can be changed after it is made.", decorate)
    decorator = {"gate": "register_gate", "replay buffer": "register_buffer"}.get(kind.kind, "register")
    expect(
        "name" in vars(cls),
        f"{name} has no name of its own.",
        f'Write @{decorator}("its-name") above @dataclass, or name its file: ./file.py:{name}.',
    )
    missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
    expect(
        not missing,
        f"{cls.name}: {missing} must be implemented.",
        f"See {base.__name__} for arguments and result.",
    )
    for field in dataclasses.fields(cls):
        _check_declaration(kind, cls, field)
    try:
        kind.check_complete(cls, cls.name)
    except ValueError as error:
        raise PerturbationError(str(error), "Correct the class.") from error


def _check_declaration(kind: registry.Registry, cls: type, field: dataclasses.Field) -> None:
    """The declaration of one option."""
    label = f"{cls.name}: option {field.name!r}"
    is_reserved = field.name in _RESERVED or field.name.startswith(registry.GATE_OPTION)
    expect(not is_reserved, f"{label} has a reserved name ({', '.join(_RESERVED)}).", "Please rename the option.")
    declare = f"Declare it as {field.name}: … = option(default, help)."
    expect(field.default is not dataclasses.MISSING, f"{label} has no default.", declare)
    expect(field.metadata.get("help"), f"{label} has no help text for `ngrpo train --help`.", declare)
    try:
        check_redeclared(cls, field, kind.kind)
    except UsageError as error:
        raise PerturbationError(f"{cls.name}: {error}", "Correct the class.") from error
    expect(
        field.metadata.get("registry") is not None or scalar_kind(cls, field.name) is not None,
        f"{label} has a type that a command line cannot give ({annotation(cls, field.name)}).",
        "Annotate it as int, float, bool or str, or one of these with `| None`.",
    )
    try:
        coerce(cls, field, field.default, kind.kind)
    except ValueError as error:
        raise PerturbationError(
            f"{label} refuses its own default {field.default!r}: {error}",
            "Change the default or the range.",
        ) from error


def check_options(made: Options) -> None:
    """Values out of range are refused, by a message with the value."""
    cls = type(made)
    options = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    for field in dataclasses.fields(made):
        for value in _values_out_of_range(field):
            label = f"{cls.name}: {field.name}={value!r}, which is out of range,"
            error = None
            try:
                cls(**{**options, field.name: value})
            except Exception as raised:
                error = raised
            expect(error, f"{label} is accepted.", _CALL_SUPER)
            expect(
                isinstance(error, ValueError),
                f"{label} raises {type(error).__name__} ({error}) instead of ValueError.",
                _CALL_SUPER,
            )
            expect(
                repr(value) in str(error) or f"{value:g}" in str(error),
                f"{label} is refused without naming the value ({error}).",
                "Put the value into the message.",
            )


def _values_out_of_range(field: dataclasses.Field) -> list[Any]:
    """A value beyond each limit of an option."""
    limits = Limits.of(field)
    values: list[Any] = []
    if limits.low is not None:
        values.append(limits.low - 1)
    if limits.high is not None:
        values.append(limits.high + 1)
    if limits.above is not None:
        values.append(limits.above)
    if limits.choices:
        values.append("no-such-choice")
    return values


def check_spec(made: Options) -> None:
    """Another process can make the same object from the spec."""
    name = made.name
    spec = made.spec()
    try:
        plain = json.loads(json.dumps(spec))
    except TypeError as error:
        raise PerturbationError(
            f"{name}: spec() is not plain data ({error}), so it cannot be sent to another process.",
            "Options must be scalars: int, float, bool, str or None.",
        ) from error
    expect(
        "<locals>" not in spec["name"],
        f"{name}: its class {spec['name']!r} is inside a function, where no other process finds it.",
        "Move it to the top of a module or a file.",
    )
    try:
        again = made.registry.create(**plain)
    except ValueError as error:
        options = {key: value for key, value in spec.items() if not key.endswith("source")}
        raise PerturbationError(
            f"{name}: create(**spec()) fails for {options}: {error}",
            "The class must take each value of spec().",
        ) from error
    expect(
        type(again) is type(made) and again == made,
        f"{name}: create(**spec()) gives {again!r}, not {made!r}.",
        "Each option must survive being passed again, and two classes must not share a name.",
    )
    expected = made.fingerprint()
    for how, fingerprint in (
        ("asked twice", made.fingerprint()),
        ("made again from the spec", again.fingerprint()),
    ):
        expect(
            fingerprint == expected,
            f"{name}: fingerprint() is not stable: {how}, it is {fingerprint} instead of {expected}.",
            "It must depend on the options alone.",
        )
    unpickled = pickle.loads(pickle.dumps(made))
    expect(unpickled == made, f"{name}: pickle changes it.", "Do not override __reduce__.")
