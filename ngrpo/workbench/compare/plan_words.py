# SPDX-License-Identifier: Apache-2.0
"""The words of a comparison's command line and YAML file, sorted by the command that they are for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ngrpo.config import parse
from ngrpo.config.arms import Arm, swept_key
from ngrpo.machine.storage import datafiles
from ngrpo.machine.upstream.openrlhf_flags import Flag, Flags
from perturbations.errors import UsageError, nearest

# The flags that the comparison sets for each run, and the alternative to each.
_PATHS = ("--run-dir", "--log-file", "--ckpt.output_dir", "--ckpt.path", "--logger.tensorboard_dir")
_SET_BY_US = {
    "--train.seed": "give --seeds 0,1,2",
    "--perturbation": "give --perturbations, --strategy or --sweep perturbation.OPTION=...",
    "--preset": "give --base",
    **dict.fromkeys(_PATHS, "give --out DIR for the whole comparison"),
}
# Flags that all runs share, although their names begin like the options of a perturbation.
_SHARED = ("--perturbation.replay_buffer", "--perturbation.gap_limit", "--perturbation.strict")
_SWITCHES = ("stock", "discard-models")
_TEXT_KEYS = ("strategies", "perturbations", "base", "baseline", "out")  # keys of a file whose values are texts
_OURS = ("perturbations", "base", "seeds", "baseline", "threshold", "out", "config", "strategy", "sweep", *_SWITCHES)
# Flags of OpenRLHF's training that have the prefix of the flags for `ngrpo eval`.
_EVAL_FLAGS_OF_TRAINING = (
    "--eval.at_start",
    "--eval.dataset",
    "--eval.split",
    "--eval.steps",
    "--eval.n_samples",
)
# The prefixes of flags for other commands, each with the training flags that share the prefix.
_COMMAND_PREFIXES: dict[str, tuple[str, ...]] = {"eval": _EVAL_FLAGS_OF_TRAINING, "diagnose": ()}


class Words(NamedTuple):
    """The words of a command line, by whom they are for.

    Attributes:
        own: the comparison's own flags, without dashes, with all their values in order.
        groups: the flags of the other commands, by the prefix that they had.
        training: the rest, for ``ngrpo train``.
    """

    own: dict[str, list[str]]
    groups: dict[str, list[str]]
    training: list[str]

    def over(self, file: Words) -> Words:
        """These words of a command line together with those of a file.

        For the same setting the command line wins. ``--strategy``, and ``--sweep`` of another key, add to the file's.
        """
        own = defaultdict[str, list[str]](list, file.own)
        swept = {swept_key(text) for text in self.own.get("sweep", [])}
        own["sweep"] = [text for text in file.own.get("sweep", []) if swept_key(text) not in swept]
        # The command line's values come last, which is where `last()` reads. Of strategies and sweeps all values count.
        for name, values in self.own.items():
            own[name] = [*own[name], *values]
        groups = defaultdict[str, list[str]](list)
        for command in _COMMAND_PREFIXES:
            merged = parse.override(Flags(file.groups[command]), Flags(self.groups[command]))
            groups[command] = list(merged.argv)
        training = parse.override(Flags(file.training), Flags(self.training))
        return Words(own, groups, list(training.argv))

    def last(self, name: str) -> str | None:
        """The value of one of our flags, the last one where it was given several times."""
        values = self.own.get(name)
        return values[-1] if values else None

    def listed(self, name: str) -> list[str]:
        """The comma-separated values of one of our flags; UsageError where one is empty."""
        text = self.last(name)
        if text is None:
            return []
        values = [value.strip() for value in text.split(",")]
        if not all(values):
            raise UsageError(f"--{name} {text!r}: a value is missing between the commas.")
        return values

    def switched_on(self, name: str) -> bool:
        """Whether a switch of ours is given."""
        value = self.last(name)
        return value is not None and value != "false"


def split_words(argv: Sequence[str]) -> Words:
    """The words of a command line, sorted; ``UsageError`` for a flag that a comparison does not take."""
    own = defaultdict[str, list[str]](list)
    groups = defaultdict[str, list[str]](list)
    training: list[str] = []
    for flag in Flags(argv):
        name = flag.name.removeprefix("--")
        command = other_command(flag.name)
        if name in _OURS:
            own[name].append(_own_value(flag))
        elif command:
            groups[command] += [f"--{name.removeprefix(f'{command}.')}", *flag.values]
        elif flag.name != parse.DRY_RUN:  # `ngrpo compare` itself reads --dry-run
            _check_training_flag(flag)
            training += flag.argv
    return Words(own, groups, training)


def file_lines(path: str) -> dict[str, Any]:
    """The keys and values of the YAML file; ``UsageError`` for an unknown key or a value of the wrong form."""
    keys = sorted({*_OURS, "strategies", "flags", *_COMMAND_PREFIXES} - {"config", "strategy"})
    lines = datafiles.read_yaml(path, flag="--config", example="'perturbations: none,neighbor'")
    for key, value in lines.items():
        if key not in keys:
            raise UsageError(f"--config {path}: unknown key {key!r}.{nearest(key, keys)} Keys: {', '.join(keys)}.")
        if key in ("sweep", "flags", *_COMMAND_PREFIXES) and not isinstance(value, dict):
            raise UsageError(f"--config {path}: {key} must hold lines of 'option: value'.")
        for item in value if isinstance(value, list) else [value]:
            if key in _TEXT_KEYS and isinstance(item, bool | dict | list):
                raise UsageError(
                    f"--config {path}: {key} has {item!r}, and takes texts such as 'neighbor rate=0.2'. YAML reads yes,"
                    " no, on and off as true or false, and a colon before a blank as a key: quote the text."
                )
    return lines


def file_argv(path: str, lines: Mapping[str, Any]) -> list[str]:
    """The keys and values of the YAML file as the command line that says the same."""
    argv: list[str] = []
    for key, value in lines.items():
        if key == "strategies":
            for line in datafiles.texts(value):
                argv += ["--strategy", line]
        elif key == "sweep":
            for name, values in value.items():
                argv += ["--sweep", f"{name}={','.join(datafiles.texts(values))}"]
        elif key == "flags" or key in _COMMAND_PREFIXES:
            prefix = "" if key == "flags" else f"{key}."
            try:
                argv += datafiles.words(value, prefix=prefix)
            except UsageError as error:
                raise UsageError(f"--config {path}: {key}: {error}") from None
        else:
            argv += [f"--{key}", ",".join(datafiles.texts(value))]
    return argv


def refuse_booleans(
    path: str, lines: Mapping[str, Any], *, command_line: Flags, shared: Flags, arms: Sequence[Arm]
) -> None:
    """Raises ``UsageError`` where YAML has read true or false for a flag or a swept option that takes a text."""
    for key in ("flags", "sweep"):
        for name, value in lines.get(key, {}).items():
            if datafiles.has_boolean(value) and not command_line.has(f"--{name}"):
                for arm in arms:
                    parse.refuse_boolean(f"--{name}", path, Flags([*shared.argv, *arm.flags]))


def other_command(flag: str) -> str | None:
    """The command, ``eval`` or ``diagnose``, that a flag with its prefix is for; None for a flag of the training."""
    command, _, option = flag.removeprefix("--").partition(".")
    if command not in _COMMAND_PREFIXES or not option:
        return None
    belongs_to_training = flag.startswith(_COMMAND_PREFIXES[command])
    return None if belongs_to_training else command


def _own_value(flag: Flag) -> str:
    """The one value of a flag of ours; empty or ``true`` for a switch that is given."""
    name = flag.name.removeprefix("--")
    value = flag.values[0] if flag.values else ""
    if len(flag.values) > 1:
        raise UsageError(f"{flag.name} takes one value; {flag.values[1]!r} is one too many. Quote blanks.")
    if name in _SWITCHES and value not in ("", "true", "false"):
        raise UsageError(f"--{name} {value}: it takes no value.")
    if name not in _SWITCHES and not value:
        raise UsageError(f"{flag.name} needs a value (see: ngrpo compare --help).")
    return value


def _check_training_flag(flag: Flag) -> None:
    """Raises ``UsageError`` for a word that is no flag, a flag that we set, and a misspelt flag of ours."""
    if not flag.name:
        raise UsageError(f"unexpected word {flag.argv[0]!r}: flags begin with '--'. See: ngrpo compare --help")
    refuse_set_by_us(flag.name)
    if flag.name == parse.PRINT:
        raise UsageError(f"{parse.PRINT} belongs to ngrpo train. Leave it out.")
    name = flag.name.removeprefix("--")
    if "." in name or name in ("task", "model", "hardware"):
        return
    # A misspelt flag of ours must not end in OpenRLHF, run by run.
    hint = nearest(flag.name, [f"--{own}" for own in _OURS])
    if hint:
        raise UsageError(f"unknown flag {flag.name!r}.{hint} See: ngrpo compare --help")


def refuse_set_by_us(name: str) -> None:
    """Raises ``UsageError`` for a flag that the comparison sets for each run."""
    if name.startswith(_SHARED):
        return
    for flag, instead in _SET_BY_US.items():
        if name == flag or name.startswith(f"{flag}."):
            raise UsageError(f"{name} is set by ngrpo compare for each run: {instead} instead.")
