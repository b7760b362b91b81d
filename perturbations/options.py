# SPDX-License-Identifier: Apache-2.0
"""Options: dataclass fields that know their range, and the base of everything that has them."""

import dataclasses
import functools
import inspect
import json
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, SupportsFloat

from perturbations.errors import SCALARS, UsageError, nearest

if TYPE_CHECKING:
    from perturbations.registry import Registry


def option(
    default: object,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
    registry: "Registry | None" = None,
) -> Any:
    """A dataclass field of an :class:`Options` class.

    Args:
        default: the paper's value, where the paper names one.
        help: one line for a list of the options.
        low: the smallest allowed value.
        high: the largest.
        above: the value must be greater than this.
        choices: the only allowed values.
        registry: of a value with options of its own, given by name, as a mapping with a name, or ready made.
    """
    if registry is None and not isinstance(default, (int, float, str, type(None))):
        raise UsageError(f"option({default!r}, {help!r}): {SCALARS}")
    if choices is not None and not _are_texts(choices):
        raise UsageError(
            f"option({default!r}, {help!r}): choices={choices!r} must be a tuple or list of texts, such as ('a', 'b')."
            " Annotate the option as str; numbers have low= and high=."
        )
    metadata = {"help": help, "low": low, "high": high, "above": above, "choices": choices, "registry": registry}
    return dataclasses.field(default=default, metadata=metadata)


def _are_texts(choices: object) -> bool:
    return isinstance(choices, (tuple, list)) and all(isinstance(choice, str) for choice in choices)


@dataclass(frozen=True)
class Limits:
    """The allowed values of a field, as :func:`option` declares them; None where there is no such limit."""

    low: float | None
    high: float | None
    above: float | None
    choices: tuple[str, ...] | None

    @classmethod
    def of(cls, field: dataclasses.Field) -> "Limits":
        metadata = field.metadata
        return cls(metadata.get("low"), metadata.get("high"), metadata.get("above"), metadata.get("choices"))

    def allow(self, value: float) -> bool:
        """Whether a number is in the range; the choices aside."""
        if self.low is not None and value < self.low:
            return False
        if self.above is not None and value <= self.above:
            return False
        return self.high is None or value <= self.high


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of everything that is configured. Subclasses are frozen dataclasses with fields from :func:`option`.

    An instance converts and checks its values. One of a class with a :attr:`registry` is pickled as its :meth:`spec`.
    """

    kind: ClassVar[str] = "settings"
    """The word for such an object in messages."""
    registry: ClassVar[Any] = None
    name: ClassVar[str]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_redeclared(type(self), field, self.kind)
            value = coerce(type(self), field, getattr(self, field.name), self.kind)
            # A base class's code relies on its limits, whatever those of a redeclared option are.
            for _, base_field in redeclared(type(self), field):
                check_limits(base_field, value, f"{self.kind} option {field.name}={value!r}")
            object.__setattr__(self, field.name, value)  # the dataclass is frozen

    def spec(self) -> dict[str, Any]:
        """Name and every option, as plain values: ``registry.create(**spec)`` gives an equal object in any process.

        A user's file adds its text; an option with options of its own, such as ``gate``, its name and ``gate.…``.
        """
        spec: dict[str, Any] = {}
        if self.registry is not None:
            spec["name"] = self.registry.address(type(self))
            source = self.registry.source(type(self))
            if source is not None:
                spec["source"] = source
        nested: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Options):
                spec[field.name] = value
                continue
            inner_spec = value.spec()
            spec[field.name] = inner_spec.pop("name")
            nested |= {f"{field.name}.{key}": inner_value for key, inner_value in inner_spec.items()}
        return spec | nested

    def fingerprint(self) -> str:
        """The spec as canonical JSON, with hashes of files, for comparison between processes."""
        from perturbations import user_files

        spec = self.spec()
        for key, value in spec.items():
            if user_files.is_source(key):
                spec[key] = user_files.digest(value)
        return json.dumps(spec, sort_keys=True)

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Any:
        """The object of a :meth:`spec`, made through the registry."""
        return cls.registry.create(**spec)

    @classmethod
    def option_names(cls) -> set[str]:
        """The names of its options."""
        return {field.name for field in dataclasses.fields(cls)}

    @classmethod
    def check_option_names(cls, names: Iterable[str]) -> None:
        """Raises ``UsageError`` for a name that is not an option."""
        option_names = sorted(cls.option_names())
        for name in names:
            if name in option_names:
                continue
            owner = f"{cls.kind} {cls.name!r}" if hasattr(cls, "name") else cls.kind
            listing = f"Its options: {', '.join(option_names)}." if option_names else "It has no options."
            raise UsageError(f"{owner} has no option {name!r}.{nearest(name, option_names)} {listing}")

    def __reduce__(self) -> Any:
        """Pickles the spec instead of the object, so that a process without the class's file can make it."""
        if self.registry is None:
            return super().__reduce__()
        return self.registry.base_class().from_spec, (self.spec(),)


_hints = functools.cache(typing.get_type_hints)  # evaluates annotations that are strings, once for each class


def _hint(owner: type, name: str) -> Any:
    try:
        return _hints(owner)[name]
    except NameError as error:
        raise UsageError(
            f"{owner.__qualname__}: an option's annotation is not defined: {error}. Import it, or correct it."
        ) from error


def annotation(owner: type, name: str) -> str:
    """The annotation of a field in words: ``int``, ``str | None``."""
    return inspect.formatannotation(_hint(owner, name))


def kinds(owner: type, name: str) -> tuple[type, ...]:
    """The plain types that a field accepts, ``type(None)`` included where it is optional."""
    hint = _hint(owner, name)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.get_args(hint)
    return (hint,)


def scalar_kind(owner: type, name: str) -> type | None:
    """The one type of a field's values other than None; None where the annotation is not one that options can have."""
    plain_kinds = [kind for kind in kinds(owner, name) if kind is not type(None)]
    if len(plain_kinds) == 1 and plain_kinds[0] in _KINDS_IN_WORDS:
        return plain_kinds[0]
    return None


def redeclared(owner: type, field: dataclasses.Field) -> Iterator[tuple[type, dataclasses.Field]]:
    """The base classes in which an option of this name is declared otherwise, each with its field there."""
    for base in owner.__mro__[1:]:
        base_field = getattr(base, "__dataclass_fields__", {}).get(field.name)
        if base_field is not None and base_field is not field:
            yield base, base_field


def check_redeclared(owner: type, field: dataclasses.Field, what: str) -> None:
    """Raises ``UsageError`` where a field has another type than in a base class, whose code reads it as before.

    ``what``: the word for the owner in messages.
    """
    for base, base_field in redeclared(owner, field):
        has_same_registry = field.metadata.get("registry") is base_field.metadata.get("registry")
        if set(kinds(owner, field.name)) != set(kinds(base, field.name)) or not has_same_registry:
            declared_as = annotation(base, field.name)
            if not has_same_registry:
                declared_as += " with its registry="
            raise UsageError(
                f"{what} option {field.name!r}: {owner.__qualname__} redeclares it as {annotation(owner, field.name)}."
                f" Redeclare {field.name!r} as {declared_as}; only default, help and narrower limits may change."
                " Or give your option another name."
            )


def allowed(field: dataclasses.Field) -> str:
    """The allowed values of a field in words: ``in [0, 1]``, ``one of cosine, l2``."""
    limits = Limits.of(field)
    if limits.choices:
        return "one of " + ", ".join(limits.choices)
    low = _number(limits.low)
    high = _number(limits.high)
    above = _number(limits.above)
    if limits.above is not None:
        return f"greater than {above}" if limits.high is None else f"in ({above}, {high}]"
    if limits.low is not None:
        return f"at least {low}" if limits.high is None else f"in [{low}, {high}]"
    return "" if limits.high is None else f"at most {high}"


def _number(limit: float | None) -> str:
    """A limit in words; a whole number in full, since the largest seed could not be read from 9.22e+18."""
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def coerce(
    owner: type, field: dataclasses.Field, value: object, what: str = "perturbation", *, label: str | None = None
) -> object:
    """Brings a value of the command line or a YAML file to its field's type and checks its range, else ``UsageError``.

    ``owner``: the field's class; ``what``: the word for it in messages, unless a ``label`` begins them.
    """
    label = label or f"{what} option {field.name}={value!r}"
    registry = field.metadata.get("registry")
    if registry is not None:
        return _object_of(registry, field, value, label)
    kind = scalar_kind(owner, field.name)
    if kind is None:
        raise UsageError(
            f"{label}: its annotation is {annotation(owner, field.name)}; must be int, float, bool or str, or one of"
            " these with `| None`."
        )
    is_optional = type(None) in kinds(owner, field.name)
    if is_optional and isinstance(value, str) and value.lower() == "none":
        value = None
    if value is None:
        if is_optional:
            return None
        raise UsageError(f"{label}: a value is needed; leave the option out for its default, {field.default!r}.")
    converted = _convert(kind, value)
    if converted is None:
        kind_in_words = _KINDS_IN_WORDS[kind]
        limits_in_words = f" ({allowed(field)})" if allowed(field) else ""
        example = "" if _convert(kind, field.default) is None else f", for example {field.default!r}"
        raise UsageError(f"{label}: {kind_in_words} is needed{limits_in_words}{example}.")
    check_limits(field, converted, label)
    return converted


def check_limits(field: dataclasses.Field, value: object, label: str) -> None:
    """Raises ``UsageError``, which begins with ``label``, for a value of the field's type beyond its limits."""
    limits = Limits.of(field)
    if isinstance(value, str) and limits.choices and value not in limits.choices:
        raise UsageError(f"{label}: must be {allowed(field)}.{nearest(value, limits.choices)}")
    if isinstance(value, (int, float)) and not limits.allow(value):
        raise UsageError(f"{label}: must be {allowed(field)}; the default is {field.default!r}.")


def _object_of(registry: "Registry", field: dataclasses.Field, value: object, label: str) -> object:
    """The value of an option that has options of its own: None, an object as it is, or one made by its name."""
    if value is None or isinstance(value, registry.base_class()):
        return value
    if isinstance(value, str):
        return None if value.lower() == "none" else registry.create(value)
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return registry.create(**value)
    names = ", ".join(registry.available())
    raise UsageError(f"{label}: must be a {field.name}'s name ({names}), 'none', or a {field.name}.")


_KINDS_IN_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _convert(kind: type, value: object) -> bool | int | float | str | None:
    """A value as the kind, or None where it is of another kind."""
    if kind is bool:
        return _BOOLEANS.get(str(value).lower())
    if kind is str:
        return str(value) if type(value) in (str, int) else None  # YAML reads 13 as a number
    if isinstance(value, bool) or not isinstance(value, (str, SupportsFloat)):
        return None
    try:
        if kind is int and isinstance(value, (int, str)) and str(value).strip().lstrip("+-").isdecimal():
            return int(value)  # not by way of a float, which is exact only up to 2^53
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if not math.isfinite(number) or (kind is int and not number.is_integer()):
        return None
    return kind(number)
