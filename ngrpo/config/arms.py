# SPDX-License-Identifier: Apache-2.0
"""The arms of a comparison: perturbations with options, as `ngrpo compare` and `ngrpo diagnose` take them.

An arm is a name and its options, ``neighbor rate=0.2 variant=released``; a colon may stand for a blank.

--strategy 'neighbor rate=0.2'          one arm
--perturbations none,gaussian:sigma=1   arms, with commas between them
--sweep perturbation.rate=0.05,0.1      one arm per value, for each of these perturbations that has the option
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ngrpo.config.kinds import KINDS, run_level_kinds
from perturbations.errors import UsageError
from perturbations.options import nearest

_PREFIX, _KIND = "perturbation.", KINDS["perturbation"]
_OPTION = r"(?:--)?[A-Za-z_][\w.]*="
_BESIDE = {kind.flag.removeprefix("--"): kind for kind in run_level_kinds()}
# What of these changes the rollouts, and can be looked at without a training.
_ROLLOUTS = "|".join(rf"{re.escape(key)}(\.\w+)?" for key, kind in _BESIDE.items() if kind.in_rollouts)
# What `--strategy` takes without dashes beside the perturbation's options, where arms are trained.
_TRAINING = "|".join(["base", "reproducible", *(rf"{re.escape(key)}(\.\w+)?" for key in _BESIDE)])


@dataclass(frozen=True)
class Arm:
    """A perturbation with its options, and in a training what else sets it apart.

    Attributes:
        name: the perturbation, as the user named it.
        options: its options, as the user gave them: ``{"rate": "0.2", "gate.start": "5"}``.
        training: what a training has beside the perturbation, ``{"base": "gspo", "rollout.temperature": "1.2"}``; the
            value of a switch is empty.
        id: short and unique in its list: ``none``, ``neighbor rate=0.2 base=gspo``.
        spec: ``perturbations.create(**spec)``, every option spelt out; None where nothing is ever perturbed.
        paper: where the perturbation comes from.
        notes: warnings of the perturbation about these options.
    """

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    training: Mapping[str, str] = field(default_factory=dict)
    id: str = ""
    spec: Mapping[str, Any] | None = None
    paper: str = ""
    notes: tuple[str, ...] = ()

    @property
    def perturbation(self) -> str:
        """The id of the perturbation alone."""
        return " ".join([self.name, *_pairs(self.options)])

    @property
    def line(self) -> str:
        """The perturbation alone, as a value of ``--strategy``."""
        return shlex.join([self.name, *_pairs(self.options)])

    @property
    def rollouts(self) -> dict[str, str]:
        """What of :attr:`training` changes the rollouts: a sampling schedule and noise on the weights."""
        return {key: value for key, value in self.training.items() if re.fullmatch(_ROLLOUTS, key)}

    @property
    def rollout_id(self) -> str:
        """The id of the perturbation and what else changes the rollouts."""
        return " ".join([self.perturbation, *_pairs(self.rollouts)])

    @property
    def settings(self) -> dict[str, str]:
        """All that the user gave but the name: ``{"perturbation.rate": "0.2", "base": "gspo"}``."""
        return {**{_PREFIX + key: value for key, value in self.options.items()}, **self.training}

    @property
    def perturbation_flags(self) -> list[str]:
        """The perturbation alone, as flags."""
        options = [word for key, value in self.options.items() for word in (f"--{_PREFIX}{key}", value)]
        return ["--perturbation", self.name, *options]

    @property
    def flags(self) -> list[str]:
        """The flags of ``ngrpo train`` that belong to this arm alone."""
        return [*self.perturbation_flags, *self.training_flags]

    @property
    def training_flags(self) -> list[str]:
        """Those of them beside the perturbation."""
        argv: list[str] = []
        for key, value in self.training.items():
            argv += [f"--{'preset' if key == 'base' else key}", *(value.split(" ") if value else ())]
        return argv


def parse_arms(
    perturbations: str | None = None,
    sweeps: Sequence[str] = (),
    lines: Sequence[str] = (),
    *,
    bases: Sequence[str] = (),
    training: bool = False,
    rollouts: bool = False,
) -> list[Arm]:
    """Reads the flags; nothing is loaded but the perturbations themselves.

    Args:
        perturbations: ``--perturbations``: arms separated by commas. A name or value with a comma in it needs
            ``lines``.
        sweeps: values of ``--sweep``; several are combined with each other. ``perturbation.option=value,value`` applies
            to each perturbation of ``perturbations`` that has the option and was not given a value for it; an option
            that allows one value only (the rate of ``none``) is not swept.
        lines: values of ``--strategy``, an arm each.
        bases: values of ``--base``, one arm for each, where an arm does not name its own.
        training: whether arms are trained: they may then have ``base=``, ``advantage=`` and ``--flag=value``, and
            ``sweeps`` any flag of ``ngrpo train``, which applies to all arms.
        rollouts: whether arms may have what changes rollouts alone, such as ``sampling.schedule=``.

    Returns:
        At least one arm, in the order given. An arm given twice stays twice, as ``none`` and ``none (2)``.

    Raises:
        UsageError: for an unknown perturbation or option, a bad value, a sweep that applies nowhere, or no arm.
    """
    axes = _sweeps(sweeps, training)
    own = {key.removeprefix(_PREFIX): values for key, values in axes.items() if key.startswith(_PREFIX)}
    named = arms = [_read_arm(text, f"--perturbations {text!r}", training, rollouts) for text in _names(perturbations)]
    for option in sorted(own, key=lambda name: "." in name):  # a swept gate comes before the gate's options
        before, arms = arms, _crossed(arms, "options", option, own[option], only=_sweepable)
        if arms == before:
            raise _sweep_error(option, named)
    arms = arms + [_read_arm(text, f"--strategy {text!r}", training, rollouts) for text in lines]
    if not arms:
        raise UsageError("no strategy is given: name some with --perturbations none,neighbor (see: ngrpo list).")
    for key in axes:
        arms = arms if key.startswith(_PREFIX) else _crossed(arms, "training", key, axes[key])
    return _distinct([_made(arm) for arm in (_crossed(arms, "training", "base", bases) if bases else arms)])


def _crossed(
    arms: Sequence[Arm],
    part: Literal["options", "training"],
    key: str,
    values: Sequence[str],
    only: Callable[[Arm, str], bool] = lambda arm, key: True,
) -> list[Arm]:
    """Each arm with each value, where it has none of its own."""
    result = []
    for arm in arms:
        spec = getattr(arm, part)
        fits = key not in spec and only(arm, key)
        differences: list[dict[str, Any]] = [{part: {**spec, key: value}} for value in values]
        result += [replace(arm, **difference) for difference in differences] if fits else [arm]
    return result


def _names(perturbations: str | None) -> list[str]:
    parts = [] if perturbations is None else [part.strip() for part in perturbations.split(",")]
    if not all(parts):
        raise UsageError(f"--perturbations {perturbations!r}: a name is missing, for example none,neighbor,gaussian.")
    return parts


def _read_arm(text: str, where: str, training: bool, rollouts: bool) -> Arm:
    """Reads ``neighbor rate=0.2``, and in a training ``base=gspo`` and ``--flag=value`` after it.

    The name ends where the first ``option=`` or ``--flag`` begins: ``./my ops/x.py:Name:rate=0.2``.
    """
    try:
        words = [part for word in shlex.split(text) for part in re.split(rf":(?={_OPTION})", word)]
    except ValueError as error:
        raise UsageError(f"{where}: {error}.") from None
    first = next((i for i, word in enumerate(words) if re.match(f"--|{_OPTION}", word)), len(words))
    name, words = " ".join(words[:first]), words[first:]
    if not name:
        raise UsageError(f"{where}: a name is needed, for example 'neighbor rate=0.2'.")
    options: dict[str, str] = {}
    more: dict[str, str] = {}
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        # `gaussian` has an option `base` too: in a training it is written with its prefix.
        own = key.startswith(_PREFIX) or (not training and key in _KIND.option_fields(name, {}))
        key = key.removeprefix(_PREFIX)
        flag = not own and (word.startswith("--") or re.fullmatch(_TRAINING, key) is not None)
        if flag and not training and not (rollouts and re.fullmatch(_ROLLOUTS, key)):
            raise UsageError(f"{where}: {word!r} is for a training. Leave it out.")
        if flag and not value and not word.startswith("--"):
            raise UsageError(f"{where}: {key} needs a value, for example base=gspo.")
        if not key or not (flag or (equals and value)):
            raise UsageError(f"{where}: {word!r} must be option=value, for example rate=0.2.")
        if key in (more if flag else options):
            raise UsageError(f"{where}: option {key!r} is given twice; keep one.")
        (more if flag else options)[key] = value
    return Arm(name, options, more)


def _sweeps(sweeps: Sequence[str], training: bool) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for text in sweeps:
        key, _, listed = (part.strip() for part in text.removeprefix("--").partition("="))
        values = [value.strip() for value in listed.split(",")]
        if not key.removeprefix(_PREFIX) or not all(values) or not (training or key.startswith(_PREFIX)):
            form, example = ("KEY", "rollout.temperature=0.8,1.2") if training else (f"{_PREFIX}OPTION", "")
            example = example or f"{_PREFIX}rate=0.1,0.2"
            raise UsageError(f"--sweep {text!r}: must be {form}=VALUE,VALUE, for example {example}.")
        if key in result:
            raise UsageError(f"--sweep {key} is given twice; put all values into one.")
        if len(set(values)) < len(values):
            raise UsageError(f"--sweep {text!r}: a value is given twice; keep one.")
        result[key] = values
    return result


def _sweepable(arm: Arm, option: str) -> bool:
    fields = _KIND.option_fields(arm.name, arm.options)
    if option not in fields:
        return False
    limits = fields[option][1].metadata
    return limits.get("low") is None or limits["low"] != limits.get("high")


def _sweep_error(option: str, arms: Sequence[Arm]) -> UsageError:
    flag = f"--sweep {_PREFIX}{option}"
    if not arms:
        return UsageError(f"{flag}: sweeps apply to --perturbations, and none is given.")
    options = {name for arm in arms for name in _KIND.option_fields(arm.name, arm.options)}
    if option in options:
        return UsageError(f"{flag}: each perturbation that has it was given its own value, or allows only one.")
    names = ", ".join(arm.name for arm in arms)
    return UsageError(
        f"{flag}: none of {names} has this option.{nearest(option, options)} Their"
        f" options: {', '.join(sorted(options))}."
    )


def _made(arm: Arm) -> Arm:
    made, notes = _KIND.checked(arm.name, arm.options)
    return replace(
        arm,
        id=" ".join([arm.perturbation, *_pairs(arm.training)]),
        spec=made.spec() if made.active else None,
        paper=made.paper,
        notes=notes,
    )


def _pairs(options: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" if value else key for key, value in options.items()]


def _distinct(arms: Sequence[Arm]) -> list[Arm]:
    counts: Counter[str] = Counter()
    result = []
    for arm in arms:
        counts[arm.id] += 1
        result.append(arm if counts[arm.id] == 1 else replace(arm, id=f"{arm.id} ({counts[arm.id]})"))
    return result
