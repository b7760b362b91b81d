# SPDX-License-Identifier: Apache-2.0
"""The arms of a comparison: perturbations with options, as `ngrpo compare` and `ngrpo diagnose` take them.

An arm is one text: a perturbation's name, its options, and in a training further flags of `ngrpo train`:
``neighbor rate=0.2 base=gspo --rollout.top_p=0.9``. A colon may replace the blank before an option.
"""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ngrpo.config.kinds import KINDS, run_level_kinds
from ngrpo.machine.upstream.openrlhf_flags import takes_several_values
from perturbations.errors import UsageError, nearest

_PREFIX = "perturbation."
_KIND = KINDS["perturbation"]
# The beginning of an option or a flag with a value, where an arm's name ends.
_SETTING = r"(?:--)?[A-Za-z_][\w.]*="
# The flags of the other kinds of extension, such as policy_noise and policy_noise.scale.
_KIND_KEYS = {kind: rf"{re.escape(kind.flag.removeprefix('--'))}(\.\w+)?" for kind in run_level_kinds()}
# Of these, the flags that change rollouts without a training too, which `ngrpo diagnose` accepts in an arm.
_ROLLOUT_KEYS = "|".join(keys for kind, keys in _KIND_KEYS.items() if kind.in_rollouts)
# The flags of `ngrpo train` that an arm may have without dashes.
_TRAINING_KEYS = "|".join(["base", "reproducible", *_KIND_KEYS.values()])


@dataclass(frozen=True)
class Arm:
    """A perturbation with its options, and in a training its further flags.

    Attributes:
        name: the perturbation, as the user named it.
        options: options of the perturbation, as the user gave them: ``{"rate": "0.2", "gate.start": "5"}``.
        training: further flags without dashes; ``base`` is ``--preset``, and the value of a switch is empty:
            ``{"base": "gspo", "rollout.top_p": "0.9"}``.
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
    def settings(self) -> dict[str, str]:
        """Options and further flags: ``{"perturbation.rate": "0.2", "base": "gspo"}``."""
        return {**{f"{_PREFIX}{option}": value for option, value in self.options.items()}, **self.training}

    @property
    def rollouts(self) -> dict[str, str]:
        """The part of :attr:`training` that changes the rollouts: a sampling schedule and noise on the weights."""
        return {key: value for key, value in self.training.items() if re.fullmatch(_ROLLOUT_KEYS, key)}

    @property
    def text(self) -> str:
        """The arm as one text."""
        return " ".join([self.name, *_words(self.options), *_words(self.training)])

    @property
    def rollout_id(self) -> str:
        """The arm as one text, without the flags that leave rollouts unchanged."""
        return " ".join([self.name, *_words(self.options), *_words(self.rollouts)])

    @property
    def line(self) -> str:
        """The perturbation alone, as a value of ``--strategy``."""
        return shlex.join([self.name, *_words(self.options)])

    @property
    def perturbation_flags(self) -> list[str]:
        """The perturbation alone, as flags."""
        flags = ["--perturbation", self.name]
        for option, value in self.options.items():
            flags += [f"--{_PREFIX}{option}", value]
        return flags

    @property
    def training_flags(self) -> list[str]:
        """:attr:`training` as flags of ``ngrpo train``."""
        flags = []
        for key, value in self.training.items():
            name = "--preset" if key == "base" else f"--{key}"
            flags.append(name)
            if " " in value and takes_several_values(name):
                flags += value.split()
            elif value:
                flags.append(value)
        return flags

    @property
    def flags(self) -> list[str]:
        """The flags of ``ngrpo train`` that belong to this arm alone."""
        return [*self.perturbation_flags, *self.training_flags]


def is_of_method(key: str) -> bool:
    """Whether a key of :attr:`Arm.settings` chooses the method: the perturbation, the preset, or another kind's."""
    return key.startswith(_PREFIX) or key == "base" or any(re.fullmatch(keys, key) for keys in _KIND_KEYS.values())


def _words(settings: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" if value else key for key, value in settings.items()]


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
    reader = _Reader(training=training, rollouts=rollouts)
    names = [] if perturbations is None else [name.strip() for name in perturbations.split(",")]
    if not all(names):
        raise UsageError(f"--perturbations {perturbations!r}: a name is missing, for example none,neighbor,gaussian.")
    swept = _read_sweeps(sweeps, training)
    swept_options = {key.removeprefix(_PREFIX): values for key, values in swept.items() if key.startswith(_PREFIX)}
    swept_flags = {key: values for key, values in swept.items() if not key.startswith(_PREFIX)}

    named_arms = [reader.read(name, flag="--perturbations") for name in names]
    line_arms = [reader.read(line, flag="--strategy") for line in lines]
    _refuse_options_without_prefix(swept_flags, [*named_arms, *line_arms])
    arms = _with_swept_options(named_arms, swept_options) + line_arms
    if not arms:
        raise UsageError("no arm is given: name some with --perturbations none,neighbor (see: ngrpo list).")
    if bases and "base" in swept_flags:
        raise UsageError("--base and --sweep base set the same. Give one of them.")
    if bases:
        swept_flags["base"] = list(bases)
    for key, values in swept_flags.items():
        if all(key in arm.training for arm in arms):
            raise UsageError(
                f"the sweep over {key}: every arm has its own value. Leave the sweep out, or those values."
            )
        arms = _with_swept_flag(arms, key, values)
    return _checked(arms)


def _checked(arms: Sequence[Arm]) -> list[Arm]:
    """The arms with id, spec, paper and notes; ``UsageError`` for options that their perturbation refuses."""
    counts: Counter[str] = Counter()
    checked: list[Arm] = []
    for arm in arms:
        perturbation, notes = _KIND.checked(arm.name, arm.options)
        spec = perturbation.spec() if perturbation.active else None
        flags = _read_numbers(arm.training)
        same = [other.id for other in checked if (other.spec, _read_numbers(other.training)) == (spec, flags)]
        if same:
            notes = (*notes, f"the same arm as {same[0]!r}, run and counted twice")
        counts[arm.text] += 1
        count = counts[arm.text]
        label = arm.text if count == 1 else f"{arm.text} ({count})"
        checked.append(replace(arm, id=label, spec=spec, paper=perturbation.paper, notes=notes))
    return checked


def _read_numbers(training: Mapping[str, str]) -> dict[str, list[float | str]]:
    """The words of each flag's value, with numbers read: 0.1 and 0.10 are the same."""

    def read(word: str) -> float | str:
        with suppress(ValueError):
            return float(word)
        return word

    return {key: [read(word) for word in value.split(" ")] for key, value in training.items()}


# --- reading an arm ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reader:
    """Reads the text of an arm.

    Attributes:
        training: whether an arm may have any flag of ``ngrpo train``.
        rollouts: whether it may have those that change rollouts without a training.
    """

    training: bool
    rollouts: bool

    def read(self, text: str, *, flag: str) -> Arm:
        """The arm of a text, the value of a flag.

        The name ends where the first ``option=`` or ``--flag`` begins: ``./my ops/x.py:Name:rate=0.2``.
        """
        where = f"{flag} {text!r}"
        words = _words_in(text, where)
        settings = [number for number, word in enumerate(words) if re.match(f"--|{_SETTING}", word)]
        end_of_name = settings[0] if settings else len(words)
        name = " ".join(words[:end_of_name])
        if not name:
            raise UsageError(f"{where}: a name is needed, for example 'neighbor rate=0.2'.")
        options: dict[str, str] = {}
        training: dict[str, str] = {}
        for word in words[end_of_name:]:
            key, _, value = word.removeprefix("--").partition("=")
            is_flag = self._is_flag(word, key, name)
            if is_flag:
                self._check_flag(word, key, value, where)
            else:
                key = key.removeprefix(_PREFIX)
            if not key or not (value or is_flag):  # a flag without a value is a switch
                raise UsageError(f"{where}: {word!r} must be option=value, for example rate=0.2.")
            values = training if is_flag else options
            if key in values:
                raise UsageError(f"{where}: option {key!r} is given twice; keep one.")
            values[key] = value
        return Arm(name, options=options, training=training)

    def _is_flag(self, word: str, key: str, name: str) -> bool:
        """Whether a word is a flag of ``ngrpo train``, and not an option of the perturbation with this name."""
        if key.startswith(_PREFIX):
            return False
        # `gaussian` has an option `base` too: in a training it is written with its prefix.
        if not self.training and key in _KIND.option_fields(name, {}):
            return False
        return word.startswith("--") or re.fullmatch(_TRAINING_KEYS, key) is not None

    def _check_flag(self, word: str, key: str, value: str, where: str) -> None:
        """Raises ``UsageError`` for a flag that an arm may not have in this command, or one without its value."""
        changes_rollouts = re.fullmatch(_ROLLOUT_KEYS, key) is not None
        if not self.training and not (self.rollouts and changes_rollouts):
            raise UsageError(f"{where}: {word!r} is for a training. Leave it out.")
        if not value and not word.startswith("--"):
            raise UsageError(f"{where}: {key} needs a value, for example base=gspo.")


def _words_in(text: str, where: str) -> list[str]:
    """The words of an arm's text, split at blanks outside of quotes and at a colon before an option.

    Raises ``UsageError``, which begins with ``where``, for a quote that is not closed.
    """
    try:
        quoted_words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{where}: {error}.") from None
    words: list[str] = []
    for quoted_word in quoted_words:
        words += re.split(rf":(?={_SETTING})", quoted_word)
    return words


# --- sweeps -----------------------------------------------------------------------------------------


def swept_key(text: str) -> str:
    """The option, with its prefix, or the flag that a value of ``--sweep`` is about."""
    return text.removeprefix("--").partition("=")[0].strip()


def _read_sweeps(sweeps: Sequence[str], training: bool) -> dict[str, list[str]]:
    """The values of each swept option, with its prefix, or flag."""
    form = f"{_PREFIX}OPTION=VALUE,VALUE, for example {_PREFIX}rate=0.1,0.2"
    if training:
        form = "KEY=VALUE,VALUE, for example rollout.temperature=0.8,1.2"
    swept: dict[str, list[str]] = {}
    for text in sweeps:
        key = swept_key(text)
        listed = text.partition("=")[2]
        values = [value.strip() for value in listed.split(",")]
        allowed = training or key.startswith(_PREFIX)
        if not allowed or not key.removeprefix(_PREFIX) or not all(values):
            raise UsageError(f"--sweep {text!r}: must be {form}.")
        if key in swept:
            raise UsageError(f"--sweep {key} is given twice; put all values into one.")
        if len(set(values)) < len(values):
            raise UsageError(f"--sweep {text!r}: a value is given twice; keep one.")
        swept[key] = values
    return swept


def _refuse_options_without_prefix(swept_flags: Mapping[str, Sequence[str]], arms: Sequence[Arm]) -> None:
    """Raises ``UsageError`` for a swept flag that is an option of an arm's perturbation, and no flag."""
    options = {option for arm in arms for option in _KIND.option_fields(arm.name, arm.options)}
    for key, values in swept_flags.items():
        if key in options and not re.fullmatch(_TRAINING_KEYS, key):
            sweep = f"{key}={','.join(values)}"
            raise UsageError(f"--sweep {sweep}: an option of a perturbation is swept as --sweep {_PREFIX}{sweep}.")


def _with_swept_options(arms: list[Arm], swept: Mapping[str, Sequence[str]]) -> list[Arm]:
    """The arms with each value of each option that they have; ``UsageError`` for a sweep that applies to none."""
    unswept = arms
    # A swept gate comes before the gate's own options, which depend on it.
    for option in sorted(swept, key=lambda option: option.count(".")):
        crossed: list[Arm] = []
        for arm in arms:
            if option in arm.options or not _allows_several_values(arm, option):
                crossed.append(arm)
            else:
                crossed += [replace(arm, options={**arm.options, option: value}) for value in swept[option]]
        if crossed == arms:
            raise UsageError(f"--sweep {_PREFIX}{option}: {_why_unswept(option, unswept)}")
        arms = crossed
    return arms


def _with_swept_flag(arms: Sequence[Arm], key: str, values: Sequence[str]) -> list[Arm]:
    """The arms with each value of a flag, where they have none of their own."""
    crossed: list[Arm] = []
    for arm in arms:
        if key in arm.training:
            crossed.append(arm)
        else:
            crossed += [replace(arm, training={**arm.training, key: value}) for value in values]
    return crossed


def _allows_several_values(arm: Arm, option: str) -> bool:
    """Whether an arm's perturbation has an option, and more than one value of it is in range."""
    fields = _KIND.option_fields(arm.name, arm.options)
    if option not in fields:
        return False
    _, entry = fields[option]
    lowest = entry.metadata.get("low")
    return lowest is None or lowest != entry.metadata.get("high")


def _why_unswept(option: str, arms: Sequence[Arm]) -> str:
    """Why no arm has several values of an option, as the end of a message."""
    if not arms:
        return "sweeps apply to --perturbations, and none is given."
    options = {name for arm in arms for name in _KIND.option_fields(arm.name, arm.options)}
    if option in options:
        return "each perturbation that has it was given its own value, or allows only one."
    names = ", ".join(arm.name for arm in arms)
    return f"none of {names} has this option.{nearest(option, options)} Their options: {', '.join(sorted(options))}."
