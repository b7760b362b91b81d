# SPDX-License-Identifier: Apache-2.0
"""Options: dataclass fields that know their range, and the base of everything that has them."""

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, SupportsFloat

from perturbations.errors import UsageError, nearest

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
        default: the paper's value.
        help: one line for a list of the options.
        low: the smallest allowed value.
        high: the largest.
        above: the value must be greater than this.
        choices: the only allowed values.
        registry: of a value with options of its own, given by name, as a mapping with a name, or ready made.
    """
    limits = {"low": low, "high": high, "above": above, "choices": choices}
    return dataclasses.field(default=default, metadata={"help": help, **limits, "registry": registry})


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
            object.__setattr__(self, field.name, coerce(type(self), field, getattr(self, field.name), self.kind))

    def spec(self) -> dict[str, Any]:
        """Name and every option, as plain values: ``registry.create(**spec)`` gives an equal object in any process.

        A user's file adds its text; an option with options of its own, such as ``gate``, its name and ``gate.…``.
        """
        spec: dict[str, Any] = {}
        if self.registry is not None:
            spec["name"] = self.registry.address(type(self))
            source = self.registry.source(type(self))
            spec |= {} if source is None else {"source": source}
        nested: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            spec[field.name] = value = getattr(self, field.name)
            if isinstance(value, Options):
                own = value.spec()
                spec[field.name] = own.pop("name")
                nested |= {f"{field.name}.{key}": part for key, part in own.items()}
        return spec | nested

    def fingerprint(self) -> str:
        """The spec as canonical JSON, with hashes of files, for comparison between processes."""
        from perturbations import user_files

        spec = self.spec()
        texts = {key: user_files.digest(spec[key]) for key in spec if key.rpartition(".")[2] == "source"}
        return json.dumps({**spec, **texts}, sort_keys=True)

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
        own_names = sorted(cls.option_names())
        for name in names:
            if name not in own_names:
                its = f"Its options: {', '.join(own_names)}." if own_names else "It has no options."
                owner = f"{cls.kind} {cls.name!r}" if hasattr(cls, "name") else cls.kind
                raise UsageError(f"{owner} has no option {name!r}.{nearest(name, own_names)} {its}")

    def __reduce__(self) -> Any:
        """Its spec, so that a process without the class's file can make it."""
        if self.registry is None:
            return super().__reduce__()
        return self.registry.base_class().from_spec, (self.spec(),)


_hints = functools.cache(typing.get_type_hints)  # they are strings: evaluated once a class, not once an object


def kinds(owner: type, name: str) -> tuple[type, ...]:
    """The plain types that a field accepts, ``type(None)`` included where it is optional."""
    hint = _hints(owner)[name]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.get_args(hint)
    return (hint,)


def allowed(field: dataclasses.Field) -> str:
    """The allowed values of a field in words: ``in [0, 1]``, ``one of cosine, l2``."""
    low, high, above, choices = (field.metadata.get(limit) for limit in ("low", "high", "above", "choices"))
    if choices:
        return "one of " + ", ".join(choices)
    # A whole number is written in full: 9.22e18 is no seed that anyone could give.
    low, high, above = (f"{limit:g}" if isinstance(limit, float) else limit for limit in (low, high, above))
    if above is not None:
        return f"greater than {above}" if high is None else f"in ({above}, {high}]"
    if low is not None:
        return f"at least {low}" if high is None else f"in [{low}, {high}]"
    return "" if high is None else f"at most {high}"


def coerce(
    owner: type, field: dataclasses.Field, value: object, what: str = "perturbation", *, label: str | None = None
) -> object:
    """Brings a value of the command line or a YAML file to its field's type and checks its range, else ``UsageError``.

    ``owner``: the field's class; ``what``: the word for it in messages, unless a ``label`` begins them.
    """
    label, registry = label or f"{what} option {field.name}={value!r}", field.metadata.get("registry")
    if registry is not None:
        if value is None or isinstance(value, registry.base_class()):
            return value
        if isinstance(value, str):
            return None if value.lower() == "none" else registry.create(value)
        if isinstance(value, Mapping) and isinstance(value.get("name"), str):
            return registry.create(**value)
        names, what = ", ".join(registry.available()), field.name
        raise UsageError(f"{label}: must be a {what}'s name ({names}), 'none', or a {what}.")
    accepted = kinds(owner, field.name)
    if value is None or (isinstance(value, str) and value.lower() == "none" and type(None) in accepted):
        if type(None) in accepted:
            return None
        raise UsageError(f"{label}: a value is needed; leave the option out for its default, {field.default!r}.")
    kind = next(k for k in accepted if k is not type(None))
    converted = _convert(kind, value)
    if converted is None:
        want = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")
        limits = f" ({allowed(field)})" if allowed(field) else ""
        raise UsageError(f"{label}: {want} is needed{limits}, for example {field.default!r}.")
    low, high, above, choices = (field.metadata.get(limit) for limit in ("low", "high", "above", "choices"))
    if choices and converted not in choices:
        raise UsageError(f"{label}: must be {allowed(field)}.{nearest(str(converted), choices)}")
    too_low = (low is not None and converted < low) or (above is not None and converted <= above)
    if too_low or (high is not None and converted > high):
        raise UsageError(f"{label}: must be {allowed(field)}; the default is {field.default!r}.")
    return converted


def _convert(kind: type, value: object) -> bool | int | float | str | None:
    if kind is bool:
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(str(value).lower())
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
