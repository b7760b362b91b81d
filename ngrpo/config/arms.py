# SPDX-License-Identifier: Apache-2.0
"""The arms of a comparison: perturbations with options, as `ngrpo compare` and `ngrpo diagnose` take them.

An arm is a name and its options, ``neighbor rate=0.2 variant=released``; a colon may replace a blank.
"""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ngrpo.config.kinds import KINDS, run_level_kinds
from perturbations.errors import UsageError, nearest

_PREFIX, _KIND = "perturbation.", KINDS["perturbation"]
_OPTION = r"(?:--)?[A-Za-z_][\w.]*="
# Further options of an arm that change rollouts without a training; `--strategy` takes them without dashes.
_KEYS = {kind: rf"{re.escape(kind.flag.removeprefix('--'))}(\.\w+)?" for kind in run_level_kinds()}
_ROLLOUTS = "|".join(key for kind, key in _KEYS.items() if kind.in_rollouts)
_TRAINING = "|".join(["base", "reproducible", *_KEYS.values()])


@dataclass(frozen=True)
class Arm:
    """A perturbation with its options, and in a training its further flags.

    Attributes:
        name: the perturbation, as the user named it.
        settings: options and further flags, as the user gave them; the value of a switch is empty:
            ``{"perturbation.rate": "0.2", "perturbation.gate.start": "5", "base": "gspo", "rollout.top_p": "0.9"}``.
        id: short and unique in its list: ``none``, ``neighbor rate=0.2 base=gspo``.
        spec: ``perturbations.create(**spec)``, every option spelt out; None where nothing is ever perturbed.
        paper: where the perturbation comes from.
        notes: warnings of the perturbation about these options.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    id: str = ""
    spec: Mapping[str, Any] | None = None
    paper: str = ""
    notes: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, str]:
        """The perturbation's options alone: ``{"rate": "0.2", "gate.start": "5"}``."""
        own = self.settings.items()
        return {key.removeprefix(_PREFIX): value for key, value in own if key.startswith(_PREFIX)}

    @property
    def training(self) -> dict[str, str]:
        """The further flags: ``{"base": "gspo", "rollout.top_p": "0.9"}``."""
        return {key: value for key, value in self.settings.items() if not key.startswith(_PREFIX)}

    @property
    def rollouts(self) -> dict[str, str]:
        """The part of :attr:`training` that changes the rollouts: a sampling schedule and noise on the weights."""
        return {key: value for key, value in self.training.items() if re.fullmatch(_ROLLOUTS, key)}

    @property
    def line(self) -> str:
        """The perturbation alone, as a value of ``--strategy``."""
        return shlex.join([self.name, *_pairs(self.options)])

    @property
    def rollout_id(self) -> str:
        """The id without the flags that leave rollouts unchanged."""
        return " ".join([self.name, *_pairs(self.options), *_pairs(self.rollouts)])

    @property
    def perturbation_flags(self) -> list[str]:
        """The perturbation alone, as flags."""
        options = [word for key, value in self.options.items() for word in (f"--{_PREFIX}{key}", value)]
        return ["--perturbation", self.name, *options]

    @property
    def training_flags(self) -> list[str]:
        """:attr:`training` as flags of ``ngrpo train``."""
        flags = {f"--{'preset' if key == 'base' else key}": value for key, value in self.training.items()}
        return [word for flag, value in flags.items() for word in (flag, *(value.split(" ") if value else ()))]

    @property
    def flags(self) -> list[str]:
        """The flags of ``ngrpo train`` that belong to this arm alone."""
        return [*self.perturbation_flags, *self.training_flags]


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
        perturbations: ``--perturbations``, arms separated by commas; a name or value with a comma needs ``lines``.
        sweeps: values of ``--sweep``, which are combined. ``perturbation.option=value,value`` applies to each of
            ``perturbations`` that has the option, without a value of its own, and allows more than one value.
        lines: values of ``--strategy``, an arm each.
        bases: values of ``--base``, one arm for each, where an arm does not name its own.
        training: whether arms are trained: they may then have ``base=``, ``advantage=`` and ``--flag=value``, and
            ``sweeps`` any flag of ``ngrpo train``, which applies to all arms.
        rollouts: whether arms may have options that change rollouts alone, such as ``sampling.schedule=``.

    Returns:
        At least one arm, in the order given. An arm given twice stays twice, as ``none`` and ``none (2)``.

    Raises:
        UsageError: for an unknown perturbation or option, a bad value, a sweep that applies nowhere, or no arm.
    """
    names = [] if perturbations is None else [part.strip() for part in perturbations.split(",")]
    if not all(names):
        raise UsageError(f"--perturbations {perturbations!r}: a name is missing, for example none,neighbor,gaussian.")
    axes = _sweeps(sweeps, training)
    named = arms = [_read_arm(text, f"--perturbations {text!r}", training, rollouts) for text in names]
    # Those of the perturbations first, and a swept gate before the gate's options.
    for key in sorted((key for key in axes if key.startswith(_PREFIX)), key=lambda name: name.count(".")):
        before, arms = arms, _crossed(arms, key, axes.pop(key))
        if arms == before:
            raise UsageError(f"--sweep {key}: {_why_unswept(key.removeprefix(_PREFIX), named)}")
    arms = arms + [_read_arm(text, f"--strategy {text!r}", training, rollouts) for text in lines]
    if not arms:
        raise UsageError("no strategy is given: name some with --perturbations none,neighbor (see: ngrpo list).")
    if bases:
        axes.setdefault("base", [*bases])
    for key, values in axes.items():
        arms = _crossed(arms, key, values)
    counts: Counter[str] = Counter()
    result: list[Arm] = []
    for arm in arms:
        made, notes = _KIND.checked(arm.name, arm.options)
        name = " ".join([arm.name, *_pairs(arm.options), *_pairs(arm.training)])
        counts[name] += 1
        spec = made.spec() if made.active else None
        if same := next((other.id for other in result if (other.spec, other.training) == (spec, arm.training)), None):
            notes = (*notes, f"the same strategy as {same!r}, run and counted twice")
        label = name if counts[name] == 1 else f"{name} ({counts[name]})"
        result.append(replace(arm, id=label, spec=spec, paper=made.paper, notes=notes))
    return result


def _crossed(arms: Sequence[Arm], key: str, values: Sequence[str]) -> list[Arm]:
    """Each arm with each value, where it has none of its own, and for its perturbation an option of several values."""
    result: list[Arm] = []
    for arm in arms:
        fits = key not in arm.settings
        if fits and key.startswith(_PREFIX):
            fields, option = _KIND.option_fields(arm.name, arm.options), key.removeprefix(_PREFIX)
            limits = fields[option][1].metadata if option in fields else None
            fits = limits is not None and (limits.get("low") is None or limits["low"] != limits.get("high"))
        result += [replace(arm, settings={**arm.settings, key: value}) for value in values] if fits else [arm]
    return result


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
    settings: dict[str, str] = {}
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
        setting = key if flag else _PREFIX + key
        if setting in settings:
            raise UsageError(f"{where}: option {key!r} is given twice; keep one.")
        settings[setting] = value
    return Arm(name, settings)


def _sweeps(sweeps: Sequence[str], training: bool) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for text in sweeps:
        key, _, listed = (part.strip() for part in text.removeprefix("--").partition("="))
        values = [value.strip() for value in listed.split(",")]
        if not key.removeprefix(_PREFIX) or not all(values) or not (training or key.startswith(_PREFIX)):
            form = "KEY=VALUE,VALUE, for example rollout.temperature=0.8,1.2"
            form = form if training else f"{_PREFIX}OPTION=VALUE,VALUE, for example {_PREFIX}rate=0.1,0.2"
            raise UsageError(f"--sweep {text!r}: must be {form}.")
        if key in result:
            raise UsageError(f"--sweep {key} is given twice; put all values into one.")
        if len(set(values)) < len(values):
            raise UsageError(f"--sweep {text!r}: a value is given twice; keep one.")
        result[key] = values
    return result


def _why_unswept(option: str, arms: Sequence[Arm]) -> str:
    if not arms:
        return "sweeps apply to --perturbations, and none is given."
    options = {name for arm in arms for name in _KIND.option_fields(arm.name, arm.options)}
    if option in options:
        return "each perturbation that has it was given its own value, or allows only one."
    names = ", ".join(arm.name for arm in arms)
    hint = nearest(option, options)
    return f"none of {names} has this option.{hint} Their options: {', '.join(sorted(options))}."


def _pairs(options: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" if value else key for key, value in options.items()]
