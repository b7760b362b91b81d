"""Strategies to hold against each other: operators with options, as `ngrpo compare` and `ngrpo diagnose` take them.

--perturbations none,neighbor,gaussian:sigma=0.5   operators, each with options of its own after colons
--sweep perturbation.rate=0.05,0.1                 one strategy per value, for each operator that has the option
--strategy 'neighbor rate=0.2 variant=released'    one strategy, just as it stands
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perturbations.options import nearest

_PREFIX = "perturbation."


@dataclass(frozen=True)
class Strategy:
    """One strategy.

    Attributes:
        id: short and unique in its list: ``none``, ``neighbor rate=0.2``.
        spec: ``perturbations.create(**spec)``, every option spelt out; None where nothing is ever perturbed.
        settings: the options that the user gave, ``{"perturbation.rate": "0.2"}``.
        paper: where the operator comes from.
        notes: warnings of the operator about these options.
    """

    id: str
    spec: dict[str, Any] | None
    settings: dict[str, str] = field(default_factory=dict)
    paper: str = ""
    notes: tuple[str, ...] = ()


def parse_strategies(
    perturbations: str | None = None, sweeps: Sequence[str] = (), strategies: Sequence[str] = ()
) -> list[Strategy]:
    """Reads the three flags; nothing is loaded but the operators themselves.

    Args:
        perturbations: names separated by commas, each with ``:option=value`` parts. A value with a comma in it needs
            ``strategies``.
        sweeps: ``perturbation.option=value,value``; several are combined with each other. They apply to each operator
            of ``perturbations`` that has the option and was not given a value for it; an option that allows one value
            only (the rate of ``none``) is not swept.
        strategies: ``name option=value option=value``, quoted as in a shell.

    Returns:
        At least one strategy, in the order given. A strategy given twice keeps its place, as ``none`` and ``none (2)``.

    Raises:
        ValueError: for an unknown operator or option, a bad value, a sweep that applies nowhere, or no strategy.
    """
    swept = _sweeps(sweeps)
    used: set[str] = set()
    wanted: list[tuple[str, dict[str, str]]] = []
    for name, given in map(_with_colons, _split(perturbations)):
        axes = [option for option in swept if option not in given and _sweepable(name, option)]
        used.update(axes)
        for values in itertools.product(*(swept[option] for option in axes)):
            wanted.append((name, {**given, **dict(zip(axes, values))}))
    for option in swept:
        if option not in used:
            raise _sweep_error(option, [name for name, _ in map(_with_colons, _split(perturbations))])
    wanted.extend(map(_with_blanks, strategies))
    if not wanted:
        raise ValueError("no strategy is given: name some with --perturbations none,neighbor (see: ngrpo list).")
    made = [_make(name, options) for name, options in wanted]
    seen: dict[str, int] = {}
    result = []
    for strategy in made:
        count = seen[strategy.id] = seen.get(strategy.id, 0) + 1
        result.append(strategy if count == 1 else dataclasses.replace(strategy, id=f"{strategy.id} ({count})"))
    return result


def _split(perturbations: str | None) -> list[str]:
    if perturbations is None:
        return []
    parts = [part.strip() for part in perturbations.split(",")]
    if not all(parts):
        raise ValueError(f"--perturbations {perturbations!r}: a name is missing, for example none,neighbor,gaussian.")
    return parts


def _with_colons(text: str) -> tuple[str, dict[str, str]]:
    """``neighbor:rate=0.2``, ``package.module:Name:rate=0.2``: the name ends before the first part with '='."""
    parts = re.split(r"[:\s]+", text)
    end = next((i for i, part in enumerate(parts) if "=" in part), len(parts))
    return ":".join(parts[:end]).strip(), _options(parts[end:], f"--perturbations {text!r}")


def _with_blanks(text: str) -> tuple[str, dict[str, str]]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"--strategy {text!r}: {error}.") from None
    if not words:
        raise ValueError(f"--strategy {text!r}: a name is needed, for example 'neighbor rate=0.2'.")
    return words[0], _options(words[1:], f"--strategy {text!r}")


def _options(parts: Sequence[str], where: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in parts:
        option, equals, value = part.strip().removeprefix(_PREFIX).partition("=")
        if not (option and equals and value):
            raise ValueError(f"{where}: {part!r} must be option=value, for example rate=0.2.")
        if option in options:
            raise ValueError(f"{where}: option {option!r} is given twice; keep one.")
        options[option] = value
    return options


def _sweeps(sweeps: Sequence[str]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for text in sweeps:
        key, equals, values = text.partition("=")
        option = key.strip().removeprefix(_PREFIX)
        listed = [value.strip() for value in values.split(",")]
        if not key.strip().startswith(_PREFIX) or not option or not equals or not all(listed):
            raise ValueError(
                f"--sweep {text!r}: must be {_PREFIX}OPTION=VALUE,VALUE, for example {_PREFIX}rate=0.1,0.2."
            )
        if option in result:
            raise ValueError(f"--sweep {_PREFIX}{option} is given twice; put all values into one.")
        result[option] = listed
    return result


def _sweepable(name: str, option: str) -> bool:
    from perturbations import registry

    for known in dataclasses.fields(registry.get(name)):
        if known.name == option:
            low, high = known.metadata.get("low"), known.metadata.get("high")
            return low is None or low != high
    return False


def _sweep_error(option: str, names: Sequence[str]) -> ValueError:
    from perturbations import registry

    if not names:
        return ValueError(f"--sweep {_PREFIX}{option}: sweeps apply to --perturbations, and none is given.")
    known = {known.name for name in names for known in dataclasses.fields(registry.get(name))}
    if option in known:
        return ValueError(
            f"--sweep {_PREFIX}{option}: each operator that has it was given its own value, or allows only one."
        )
    return ValueError(
        f"--sweep {_PREFIX}{option}: none of {', '.join(names)} has this option.{nearest(option, known)}"
        f" Their options: {', '.join(sorted(known))}."
    )


def _make(name: str, options: dict[str, str]) -> Strategy:
    from perturbations import registry

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        operator = registry.create(name, **options)
    return Strategy(
        " ".join([name, *(f"{option}={value}" for option, value in options.items())]),
        operator.spec() if operator.active else None,
        {f"{_PREFIX}{option}": value for option, value in options.items()},
        operator.paper,
        tuple(str(warning.message) for warning in caught),
    )
