"""Options of an operator: dataclass fields that know their range and say how to mend a bad value."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A field of an operator's frozen dataclass.

    Args:
        default: the paper's value.
        help: one line for ``ngrpo train --help``.
        low: smallest allowed value.
        high: largest allowed value.
        above: the value must be greater than this.
        choices: the only allowed values.

    Returns:
        A dataclass field.
    """
    return dataclasses.field(
        default=default,
        metadata={"help": help, "low": low, "high": high, "above": above, "choices": choices},
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for a near miss, else the empty string."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.55)
    return f" Did you mean {match[0]!r}?" if match else ""


def refuse_unknown(label: str, owner: type, names: Iterable[str]) -> None:
    """Raises ``ValueError`` for a name that is no field of the owner; ``label``: ``perturbation 'soft'``."""
    known = [field.name for field in dataclasses.fields(owner)]
    for name in names:
        if name not in known:
            its = f"Its options: {', '.join(sorted(known))}." if known else "It has no options."
            raise ValueError(f"{label} has no option {name!r}.{nearest(name, known)} {its}")


def kinds(owner: type, name: str) -> tuple[type, ...]:
    """The plain types that a field accepts, ``type(None)`` included where it is optional."""
    hint = typing.get_type_hints(owner)[name]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.get_args(hint)
    return (hint,)


def allowed(field: dataclasses.Field) -> str:
    """The allowed values of a field in words: ``in [0, 1]``, ``one of cosine, l2``."""
    meta = field.metadata
    if meta.get("choices"):
        return "one of " + ", ".join(meta["choices"])
    low, high, above = meta.get("low"), meta.get("high"), meta.get("above")
    if above is not None and high is not None:
        return f"in ({above:g}, {high:g}]"
    if above is not None:
        return f"greater than {above:g}"
    if low is not None and high is not None:
        return f"in [{low:g}, {high:g}]"
    if low is not None:
        return f"at least {low:g}"
    if high is not None:
        return f"at most {high:g}"
    return ""


def coerce(owner: type, field: dataclasses.Field, value: Any, what: str = "perturbation") -> Any:
    """Brings a value of the command line or a YAML file to its field's type and checks its range.

    Args:
        owner: the operator's class.
        field: one of its fields.
        value: a string from the command line, or a YAML scalar.
        what: what the option belongs to, for the message.

    Returns:
        The value in the field's type.

    Raises:
        ValueError: with the value, what is allowed and the mend.
    """
    accepted = kinds(owner, field.name)
    label = f"{what} option {field.name}={value!r}"
    if value is None or (isinstance(value, str) and value.lower() == "none" and type(None) in accepted):
        if type(None) in accepted:
            return None
        raise ValueError(f"{label}: a value is needed; leave the option out for its default, {field.default!r}.")
    kind = next(k for k in accepted if k is not type(None))
    converted = _convert(kind, value)
    if converted is None:
        want = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")
        raise ValueError(f"{label}: {want} is needed{_range_hint(field)}, for example {field.default!r}.")
    _check_range(label, field, converted)
    return converted


def _convert(kind: type, value: Any) -> Any:
    if kind is bool:
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(str(value).lower())
    if kind is str:
        return value if isinstance(value, str) else None
    if isinstance(value, bool):
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


def _range_hint(field: dataclasses.Field) -> str:
    words = allowed(field)
    return f" ({words})" if words else ""


def _check_range(label: str, field: dataclasses.Field, value: Any) -> None:
    meta = field.metadata
    if meta.get("choices") and value not in meta["choices"]:
        hint = nearest(str(value), meta["choices"])
        raise ValueError(f"{label}: must be {allowed(field)}.{hint}")
    low, high, above = meta.get("low"), meta.get("high"), meta.get("above")
    outside = (
        (low is not None and value < low)
        or (high is not None and value > high)
        or (above is not None and value <= above)
    )
    if outside:
        raise ValueError(f"{label}: must be {allowed(field)}; the default is {field.default!r}.")
