# SPDX-License-Identifier: Apache-2.0
"""Checks of a class, its options and its spec: the same for perturbations and gates."""

from __future__ import annotations

import dataclasses
import json
import pickle

from perturbations import registry
from perturbations.options import Options, coerce
from perturbations.registry import Registry
from perturbations.testing.report import PerturbationError, require

RESERVED = ("name", "config", "source")


def check_class(kind: Registry, cls: type, base: type) -> None:
    """The class itself, and the declaration of each option."""
    derived, home = isinstance(cls, type) and issubclass(cls, base), kind.base.replace(":", ".")
    require(derived, f"{cls!r} is not a {kind.kind}.", f"Please derive it from {home}.")
    name, fix = cls.__qualname__, "Write @dataclass(frozen=True, kw_only=True) above the class."
    decorated = "__dataclass_fields__" in vars(cls)
    require(decorated, f"{name} is not a dataclass, so its options would not be seen.", fix)
    require(cls.__dataclass_params__.frozen, f"{name} can be changed after it is made.", fix)
    word = "register_gate" if kind is registry.gates else "register"
    fix = f'Write @{word}("its-name") above @dataclass, or name its file: ./file.py:{cls.__name__}.'
    require("name" in vars(cls), f"{name} has no name of its own.", fix)
    missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
    fix = f"{base.__name__} says what it is given and what it returns."
    require(not missing, f"{cls.name}: {missing} must be implemented.", fix)
    for field in dataclasses.fields(cls):
        _check_declaration(cls, field, kind)


def _check_declaration(cls: type, field: dataclasses.Field, kind: Registry) -> None:
    label = f"{cls.name}: option {field.name!r}"
    written = f"{field.name}: … = option(default, help)"
    reserved = field.name in RESERVED or field.name.startswith(registry.GATE_OPTION)
    what = f"{label} has a reserved name: the spec uses {', '.join(RESERVED)} itself."
    require(not reserved, what, "Please rename the option.")
    has_default = field.default is not dataclasses.MISSING
    require(has_default, f"{label} has no default.", f"Declare it as {written}.")
    helps = field.metadata.get("help")
    require(helps, f"{label} has no help text for `ngrpo train --help`.", f"Declare it as {written}.")
    try:
        coerce(cls, field, field.default, kind.kind)
    except ValueError as error:
        raise PerturbationError(
            f"{label} refuses its own default {field.default!r}: {error}", "Change the default or the range."
        ) from error
    except Exception as error:
        raise PerturbationError(
            f"{label} has a type that a command line cannot give ({type(error).__name__}: {error}).",
            "Annotate it as int, float, bool or str, or one of these with `| None`.",
        ) from error


def _bad_values(field: dataclasses.Field) -> list[object]:
    meta = field.metadata
    bad = [] if meta.get("low") is None else [meta["low"] - 1]
    bad += [] if meta.get("high") is None else [meta["high"] + 1]
    bad += [] if meta.get("above") is None else [meta["above"]]
    return bad + (["no-such-choice"] if meta.get("choices") else [])


def check_options(made: Options) -> None:
    """Values out of range are refused in words."""
    cls = type(made)
    present = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}
    for field in dataclasses.fields(made):
        for value in _bad_values(field):
            label = f"{cls.name}: {field.name}={value!r}, which is out of range,"
            try:
                cls(**{**present, field.name: value})
            except ValueError as error:
                named = repr(value) in str(error) or f"{value:g}" in str(error)
                what = f"{label} is refused without naming the value ({error})."
                require(named, what, "Put the value into the message.")
            except Exception as error:
                raise PerturbationError(
                    f"{label} raises {type(error).__name__} ({error}) instead of ValueError.",
                    "Call super().__post_init__() first in your __post_init__: it checks the ranges.",
                ) from error
            else:
                raise PerturbationError(
                    f"{label} is accepted.", "Call super().__post_init__() in your __post_init__: it checks the ranges."
                )


def check_spec(made: Options) -> None:
    """Another process can make the same thing from the spec."""
    name, spec = made.name, made.spec()
    try:
        plain = json.loads(json.dumps(spec))
    except TypeError as error:
        raise PerturbationError(
            f"{name}: spec() is not plain data ({error}), so it cannot be sent to another process.",
            "Options must be scalars: int, float, bool, str or None.",
        ) from error
    options = {key: value for key, value in spec.items() if not key.endswith("source")}
    what = f"{name}: its class {spec['name']!r} stands inside a function, where no other process finds it."
    require("<locals>" not in spec["name"], what, "Move it to the top of a module or a file.")
    try:
        again = made.registry.create(**plain)
    except ValueError as error:
        raise PerturbationError(
            f"{name}: create(**spec()) fails for {options}: {error}",
            "Every value that spec() gives must be a value that the class takes.",
        ) from error
    fix = "Each option must survive being passed again, and two classes must not share a name."
    same = type(again) is type(made) and again == made
    require(same, f"{name}: create(**spec()) gives {again!r}, not {made!r}.", fix)
    for how, one in (("asked twice", made), ("made again from the spec", again)):
        seen, expected = one.fingerprint(), made.fingerprint()
        what = f"{name}: fingerprint() is not stable: {how}, it is {seen} instead of {expected}."
        require(seen == expected, what, "It must depend on the options alone.")
    unchanged = pickle.loads(pickle.dumps(made)) == made
    require(unchanged, f"{name}: it comes out of pickle changed.", "Do not override __reduce__.")
