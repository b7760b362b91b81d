# SPDX-License-Identifier: Apache-2.0
"""Kinds of features: what a row of `ngrpo.config.compatibility` looks at in a run, in vLLM's engine, verl and TRL."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from ngrpo.config.kinds import KINDS
from ngrpo.config.run import RunConfig
from ngrpo.machine.upstream.openrlhf_flags import Flag, Flags

ASYNC = "--train.async_enable"
CORRECTION = "--algo.advantage.is_correction_level"
BOUNDS = "--algo.advantage.is_correction_threshold"
ESTIMATOR = "--algo.advantage.estimator"
KL = "--algo.kl.init_coef"
LOSS = "--actor.policy_loss_type"
MODEL = "--actor.model_name_or_path"
LONGEST = "--data.max_len"
GENERATED = "--rollout.max_new_tokens"


@dataclass(frozen=True, kw_only=True)
class Combination:
    """What is combined. A field with its default is not used, or not known where the table is looked at.

    Attributes:
        run: a run of ``ngrpo train``.
        flags: OpenRLHF's flags, those of presets and methods among them.
        hardware: ``cpu`` or ``cuda``.
        missing: packages that are not installed, of ``flash-attn`` and ``kernels``.
        parts: extensions by their kind, where there is no run: of an engine, verl or TRL.
        settings: the configuration of vLLM, verl or TRL.
        arguments: further arguments of TRL's trainer, or settings of verl.
    """

    run: RunConfig = field(default_factory=RunConfig)
    flags: Flags = field(default_factory=Flags)
    hardware: str = ""
    missing: Sequence[str] = ()
    parts: Mapping[str, Any] = field(default_factory=dict)
    settings: Any = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def part(self, kind: str) -> Any:
        """The extension of a kind; None where there is none."""
        return self.parts[kind] if kind in self.parts else self.run.part(kind)

    def called(self, kind: str) -> str:
        """The extension of a kind as its user names it."""
        name = self.part(kind).name
        return f"{kind} {name!r}" if self.parts else f"{KINDS[kind].flag} {name}"

    def value(self, flag: str) -> str:
        """A flag's value, or OpenRLHF's default of it."""
        return self.flags.or_default(flag)

    def last(self, is_named: Callable[[Flag], bool]) -> Flag | None:
        """The last flag for which ``is_named`` holds, since argparse takes the last one; None where there is none."""
        named = [flag for flag in self.flags if is_named(flag)]
        return named[-1] if named else None


@dataclass(frozen=True)
class Feature:
    """One side of a row of the table.

    Attributes:
        name: as the table's page calls it: ``--ds.zero_stage 3``.
        shown: the feature as a message shows it to the user who combines it, ``--perturbation neighbor``; empty for a
            combination without the feature.
    """

    name: str
    shown: Callable[[Combination], str]


def when(name: str, holds: Callable[[Combination], Any]) -> Feature:
    """A feature that messages show by its name in the table."""
    return Feature(name, lambda combination: name if holds(combination) else "")


def flag(name: str, *, off: str = "", only: str = "") -> Feature:
    """A flag of OpenRLHF's.

    Args:
        name: the flag, or without dashes a part of its name.
        off: the values that do not count, with blanks between them.
        only: the only value that counts; empty for all.
    """

    def is_named(candidate: Flag) -> bool:
        return name == candidate.name or name in candidate.name.lstrip("-")

    def shown(combination: Combination) -> str:
        last_flag = combination.last(is_named)
        if last_flag is None:
            return ""
        value = last_flag.values[0] if last_flag.values else ""
        compared = value.lower()
        with suppress(ValueError):
            compared = f"{float(value):g}"
        counts = compared == only if only else compared not in off.split()
        return f"{last_flag.name} {value}".rstrip() if counts else ""

    label = name if name.startswith("--") else f"--…{name}…"
    if only:
        return Feature(f"{label} {only}", shown)
    if off:
        return Feature(f"{label} other than {off.split()[0]}", shown)
    return Feature(label, shown)


def other_than(name: str, needed: str) -> Feature:
    """A flag with another value, or another default in OpenRLHF."""

    def shown(combination: Combination) -> str:
        value = combination.value(name)
        return "" if value == needed else f"{name} {value}"

    return Feature(f"{name} other than {needed}", shown)


def part(kind: str, about: str = "", counts: Callable[[Any], bool] = lambda extension: True) -> Feature:
    """An extension of a kind: any, or the ones that count, which ``about`` describes."""

    def shown(combination: Combination) -> str:
        extension = combination.part(kind)
        if extension is None or not counts(extension):
            return ""
        return combination.called(kind)

    return Feature(f"{KINDS[kind].flag} NAME {about}".rstrip(), shown)


def density(about: str = "", counts: Callable[[Any], bool] = lambda perturbation: True) -> Feature:
    """The density of a perturbation: any, or the ones that count."""
    owner = part("perturbation", counts=lambda perturbation: perturbation.has_density and counts(perturbation))

    def shown(combination: Combination) -> str:
        name = owner.shown(combination)
        return f"the density of {name}" if name else ""

    return Feature(f"a density {about}".rstrip(), shown)


def sampling(name: str) -> Feature:
    """An option of ``--sampling``."""

    def shown(combination: Combination) -> str:
        value = combination.run.sampling.given().get(name)
        if value is None:
            return ""
        return f"--sampling.{name}" if value is True else f"--sampling.{name} {value:g}"

    return Feature(f"--sampling.{name}", shown)


def without(package: str) -> Feature:
    """An environment without a package."""
    return when(f"an environment without {package}", lambda combination: find_spec(package.replace("-", "_")) is None)


def hardware(name: str) -> Feature:
    """A hardware profile."""
    return when(f"--hardware {name}", lambda combination: combination.hardware == name)


def engine(path: str, counts: Callable[[Any], Any] = bool, *, name: str = "") -> Feature:
    """A setting of vLLM's configuration, by its path with dots.

    ``counts`` gets None for a setting that this release of vLLM does not have.
    """
    setting = path.rpartition(".")[2]

    def shown(combination: Combination) -> str:
        value = combination.settings
        for attribute in path.split("."):
            value = getattr(value, attribute, None)
        return (name or f"{setting}={value!r}") if counts(value) else ""

    return Feature(name or setting, shown)


def verl(key: str, counts: Callable[[Any], bool] = bool) -> Feature:
    """A setting of verl's configuration."""

    def shown(combination: Combination) -> str:
        from omegaconf import OmegaConf

        value = OmegaConf.select(combination.settings, key)
        return f"{key}={value}" if counts(value) else ""

    return Feature(key, shown)


def both(one: Feature, other: Feature) -> Feature:
    """Two features together."""

    def shown(combination: Combination) -> str:
        first = one.shown(combination)
        second = other.shown(combination)
        return f"{first} with {second}" if first and second else ""

    return Feature(f"{one.name} with {other.name}", shown)


def above_one(value: object) -> bool:
    """Whether a setting splits the work; one that is not there does not."""
    return isinstance(value, int) and value > 1


def none_of(*values: object) -> Callable[[object], bool]:
    """Whether a setting is none of these."""
    return lambda value: value not in values


def bounds(name: str, holds: Callable[[float, float], bool]) -> Feature:
    """Bounds of the importance weights for which a condition holds; words that the parser refuses have none."""

    def shown(combination: Combination) -> str:
        last_flag = combination.last(lambda candidate: candidate.name == BOUNDS)
        words = ("0.5", "5.0") if last_flag is None else last_flag.values  # OpenRLHF's default
        with suppress(ValueError, IndexError):
            numbers = [float(word) for word in words]
            high = numbers[-1]
            low = numbers[-2] if len(numbers) > 1 else 0.0  # OpenRLHF reads one number as the upper bound
            if holds(low, high):
                return f"{BOUNDS} {low:g} {high:g}"
        return ""

    return Feature(f"{BOUNDS} {name}", shown)
