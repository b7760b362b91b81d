# SPDX-License-Identifier: Apache-2.0
"""Reads a command line with its files into a :class:`ngrpo.config.run.RunConfig`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ngrpo.config.kinds import FLAGS, KINDS, Kind, run_level_kinds
from ngrpo.config.run import OF_OPENRLHF, SETTINGS, RunConfig, Sampling
from ngrpo.machine.models import conversation
from ngrpo.machine.storage import datafiles
from ngrpo.machine.upstream.openrlhf_flags import MODEL_NAMES, Flags
from perturbations.errors import UsageError, nearest
from perturbations.options import coerce, kinds

if TYPE_CHECKING:
    from perturbations.base import Perturbation

PERTURBATION = "--perturbation"
SAMPLING = "--sampling"
CONFIG = f"{PERTURBATION}.config"
REPLAY_BUFFER = f"{PERTURBATION}.replay_buffer"
CONFIG_FILE = "--config"
DRY_RUN = "--dry-run"
PRINT = "--print"
_MODEL = "--model"
_ACTOR = f"--actor.{MODEL_NAMES}"
ALIASES = {f"{PERTURBATION}.reproducible": "--reproducible"}
"""Settings of the run that are also accepted among the perturbation's options."""
# Flags that have options after a dot, and how each is written. Longer ones go first.
OPTION_GROUPS = {
    REPLAY_BUFFER: f"{REPLAY_BUFFER} NAME and {REPLAY_BUFFER}.<option> VALUE",
    **{kind.flag: f"{kind.flag} NAME and {kind.flag}.<option> VALUE" for kind in run_level_kinds()},
    PERTURBATION: f"{PERTURBATION} NAME, {PERTURBATION}.<option> VALUE and {CONFIG} FILE",
    SAMPLING: (
        f"{SAMPLING}.top_k K, {SAMPLING}.min_p P, {SAMPLING}.correct_mask, {SAMPLING}.score_centering and"
        f" {SAMPLING}.schedule NAME"
    ),
}
# Of several of these flags the last one counts, as in OpenRLHF.
_LAST_COUNTS = (_MODEL, "--preset", "--task", "--hardware", "--run-dir", "--log-file")
_RECORDS_MASKS = {f"{SAMPLING}.correct_mask", f"{SAMPLING}.score_centering"}
"""Switches with which each response comes with the tokens that sampling left."""
# What vLLM 0.26 to 0.31 gives engines that are made as OpenRLHF makes them.
_VLLM_RESPONSES = 128
_VLLM_TOKENS = 2048

OurFlags = dict[str, Any]
"""Flags of ours with their values: None for an option without a value, and any value of YAML from an options file."""


def run_config(argv: Sequence[str]) -> RunConfig:
    """The run that a command line of ``ngrpo train`` asks for, its options checked; nothing is loaded or written.

    Raises:
        UsageError: for a misspelt perturbation or option, a bad value, or a flag of ours without its value.
    """
    ours, openrlhf = _split_flags(argv)
    origin = ""
    file = ours.pop(CONFIG, None)
    if file is not None:
        ours = _options_of_file(file) | ours
        origin = f" (options from {file} and the command line)"

    perturbation, notes = _extension(KINDS["perturbation"], ours, origin)
    extensions = {"perturbation": perturbation}
    for kind in (KINDS["replay_buffer"], *run_level_kinds()):
        extensions[kind.name], further_notes = _extension(kind, ours)
        notes = (*notes, *further_notes)
    specs = {}
    for name, extension in extensions.items():
        if extension is not None and getattr(extension, "active", True):
            specs[name] = extension.spec()

    sampling = sampling_of(_options(ours, SAMPLING))
    settings = _settings(ours)
    if "replay_buffer" in specs and not {PERTURBATION, *_RECORDS_MASKS, "--replay.routing"} & ours.keys():
        raise UsageError(f"{REPLAY_BUFFER} is given, but nothing is recorded. Add {PERTURBATION} NAME.")
    notes = (*notes, *_notes_without_perturbation(perturbation, ours, reproducible=settings.get("reproducible", False)))
    if _MODEL in ours:
        if Flags(openrlhf).has(_ACTOR):
            raise UsageError(f"{_MODEL} and {_ACTOR} are the same setting; give one of them.")
        openrlhf = [_ACTOR, ours[_MODEL], *openrlhf]
    return RunConfig(specs=specs, sampling=sampling, openrlhf=tuple(openrlhf), notes=notes, **settings)


def _settings(ours: OurFlags) -> dict[str, Any]:
    """The run's settings that are given, by their names in a RunConfig; ``UsageError`` for a bad value."""
    settings: dict[str, Any] = {}
    for flag, entry in SETTINGS.items():
        if flag in ours:
            settings[entry.name] = coerce(RunConfig, entry, ours[flag], label=f"{flag} {ours[flag]}")
    conversation.template_arguments(settings.get("chat_template_kwargs"))  # raises for a text of another form
    _check_engine_limits(settings)
    return settings


def _notes_without_perturbation(
    perturbation: Perturbation | None, ours: OurFlags, *, reproducible: bool
) -> Iterator[str]:
    """Warnings about options of a perturbation where nothing is perturbed."""
    if perturbation is not None and perturbation.active:
        return
    if perturbation is not None and perturbation.name != "none":
        yield f"{PERTURBATION} {perturbation.name} with rate 0 is as {PERTURBATION} none: nothing is recorded."
    if reproducible and f"{PERTURBATION}.seed" in ours:
        yield f"{PERTURBATION}.seed has no effect where nothing is perturbed; the draws follow --train.seed."


def sampling_of(options: Mapping[str, Any]) -> Sampling:
    """The options of ``--sampling``; ``UsageError`` for an unknown one or a value out of range."""
    names = [*(field.name for field in dataclasses.fields(Sampling)), "schedule"]
    for name in options:
        if name in OF_OPENRLHF:
            raise UsageError(f"{SAMPLING}.{name}: that is OpenRLHF's own flag; give {OF_OPENRLHF[name]}.")
        if name not in names:
            available = ", ".join(f"{SAMPLING}.{option}" for option in names)
            raise UsageError(
                f"unknown flag '{SAMPLING}.{name}'.{nearest(name, names)} Available: {available}; OpenRLHF's own:"
                f" {', '.join(OF_OPENRLHF.values())}."
            )
    return Sampling(**options)


def _check_engine_limits(settings: Mapping[str, Any]) -> None:
    """Raises ``UsageError`` for an engine that draws more responses at once than a step of it has tokens."""
    responses = settings.get("max_num_seqs") or _VLLM_RESPONSES
    tokens = settings.get("max_num_batched_tokens") or _VLLM_TOKENS
    if responses > tokens:
        raise UsageError(
            f"--engine.max_num_seqs is {responses} and --engine.max_num_batched_tokens {tokens}: a step reads a token"
            " of each response, so that the latter must be at least as large."
        )


# --- files ------------------------------------------------------------------------------------------


def _options_of_file(file: str) -> OurFlags:
    """The flags of a file of ``--perturbation.config``."""
    lines = datafiles.read_yaml(file, flag=CONFIG, example="'name: neighbor' and 'rate: 0.1'")
    flags: OurFlags = {}
    for key, value in lines.items():
        flag = PERTURBATION if key == "name" else f"{PERTURBATION}.{key}"
        flags[ALIASES.get(flag, flag)] = value
    return flags


def with_files(argv: Sequence[str]) -> list[str]:
    """The words with those of each ``--config FILE`` in front: any flags of ``ngrpo train``, one per line.

    A flag of a later file overrides an earlier one's, and a flag of the command line overrides all.

    Raises:
        UsageError: for a file that cannot be read.
    """
    file_flags = Flags()
    booleans: dict[str, str] = {}  # flags for which YAML has read a boolean, each with its file
    for file in _config_files(argv):
        lines = datafiles.read_yaml(
            file, flag=CONFIG_FILE, example="'perturbation: neighbor' and 'rollout.batch_size: 64'"
        )
        try:
            words = datafiles.words(lines)
        except UsageError as error:
            raise UsageError(f"{CONFIG_FILE} {file}: {error}") from None
        if CONFIG_FILE in words:
            raise UsageError(f"{CONFIG_FILE} {file}: the key 'config' would read another file. Give both as flags.")
        file_flags = override(file_flags, Flags(words))
        for key, value in lines.items():
            booleans.pop(f"--{key}", None)  # of an earlier file
            if datafiles.has_boolean(value):
                booleans[f"--{key}"] = file
    command_line = Flags(argv).without(CONFIG_FILE)
    merged = override(file_flags, command_line)
    for flag, file in booleans.items():
        if merged.has(flag) and not command_line.has(flag):
            refuse_boolean(flag, file, merged)
    return merged.argv


def _config_files(argv: Sequence[str]) -> Iterator[str]:
    """The values of ``--config``; ``UsageError`` where one is missing."""
    for flag in Flags(argv):
        if flag.name == CONFIG_FILE:
            for file in flag.values or ("",):
                if not file:
                    raise UsageError(f"{CONFIG_FILE} needs a file (see: ngrpo train --help).")
                yield file


def refuse_boolean(flag: str, file: str, flags: Flags) -> None:
    """Refuses true or false, as YAML reads yes, no, on and off, as the value of a flag that takes a text.

    Args:
        flag: the flag whose value in ``file`` is a boolean of YAML.
        file: the file of ``--config``.
        flags: all flags of the run, which name the perturbation, advantage and so on whose option the flag is.

    Raises:
        UsageError: where the flag is a setting of ours, or an option of what the flags name, that is no switch.
    """
    key = flag.removeprefix("--")
    kind = _kind_of_group(flag)
    if kind is not None and flag == kind.flag:
        raise UsageError(
            f"{CONFIG_FILE} {file}: {key} takes a name (see: ngrpo list), and {key}: none is off. YAML reads yes, no,"
            " on and off as true or false."
        )
    accepted = _accepted_types(flag, kind, flags)
    # Without types it is a flag of OpenRLHF, or an option that is refused later.
    if accepted and bool not in accepted:
        off = f"; {key}: none is off" if type(None) in accepted else ""
        raise UsageError(
            f"{CONFIG_FILE} {file}: {key} takes a text or a number. YAML reads yes, no, on and off as true or false:"
            f' quote the text, {key}: "no"{off}.'
        )


def _accepted_types(flag: str, kind: Kind | None, flags: Flags) -> tuple[type, ...]:
    """The types that a setting, or an option of an extension, accepts; none where the run has no such option."""
    if flag in SETTINGS:
        return kinds(RunConfig, SETTINGS[flag].name)
    name = None if kind is None else flags.value(kind.flag)
    if kind is None or not name or name == "none":
        return ()
    fields = kind.option_fields(name, {})
    option = flag.removeprefix(f"{kind.flag}.")
    if option not in fields:
        return ()
    owner, entry = fields[option]
    return kinds(owner, entry.name)


def override(earlier: Flags, later: Flags) -> Flags:
    """The flags of both; the later ones replace the earlier ones that set the same.

    Where the later ones name another perturbation, gate, advantage and so on, the options of the earlier one go.
    Options without a name stay: they are of the one that the later flags name.
    """
    replaced = {flag.name for flag in later}
    for names in ((_MODEL, _ACTOR), *ALIASES.items()):  # of one setting
        if replaced & set(names):
            replaced |= set(names)
    for root in FLAGS.values():
        if root in replaced and earlier.has(root) and later.value(root) != earlier.value(root):
            options = {flag.name for flag in earlier if flag.name.startswith(f"{root}.")}
            options -= SETTINGS.keys() | ALIASES.keys()
            if root != REPLAY_BUFFER:  # a buffer is no option of the perturbation, though its flag looks like one
                options = {name for name in options if not name.startswith(REPLAY_BUFFER)}
            replaced |= options
    return Flags([*earlier.without(*replaced).argv, *later.argv])


# --- flags of ours, and OpenRLHF's ------------------------------------------------------------------


def _split_flags(argv: Sequence[str]) -> tuple[OurFlags, list[str]]:
    """Our flags with their values, and OpenRLHF's words."""
    ours: OurFlags = {}
    openrlhf: list[str] = []
    for flag in Flags(argv):
        name = ALIASES.get(flag.name, flag.name)
        if not name:
            raise UsageError(f"unexpected word {flag.argv[0]!r}: flags begin with '--'.")
        if not _is_ours(name):
            _refuse_near_miss(name)
            openrlhf += flag.argv
            continue
        if len(flag.values) > 1:
            raise UsageError(f"{flag.name} takes one value; {flag.values[1]!r} is one too many.")
        if name in (DRY_RUN, PRINT):  # they say what to do with the run, and are no part of it
            continue
        if name in ours and name not in _LAST_COUNTS:
            raise UsageError(f"{name} is given twice; keep one of them.")
        if name == SAMPLING:
            raise UsageError(f"{SAMPLING} needs an option: {OPTION_GROUPS[SAMPLING]}.")
        value = flag.values[0] if flag.values else None
        if _is_switch(name):
            ours[name] = "true" if value is None else value
        else:
            _check_value(name, value)
            ours[name] = value
    return ours, openrlhf


def _is_ours(name: str) -> bool:
    return name in SETTINGS or name in (_MODEL, DRY_RUN, PRINT) or _group_of(name) is not None


def _is_switch(name: str) -> bool:
    """Whether a flag is a setting that needs no value. Which options are switches depends on what they belong to."""
    return name in _RECORDS_MASKS or (name in SETTINGS and bool in kinds(RunConfig, SETTINGS[name].name))


def _check_value(name: str, value: str | None) -> None:
    """Raises ``UsageError`` for a flag of ours without its value; options are checked by :func:`_extension`."""
    kind = _kind_named(name)
    is_option = kind is None and name != CONFIG and _kind_of_group(name) is not None
    if value or is_option:
        return
    if kind is None:
        raise UsageError(f"{name} needs a value (see: ngrpo train --help).")
    noun = kind.registry.kind
    article = "an" if noun[0] in "aeiou" else "a"
    raise UsageError(f"{name} needs {article} {noun}'s name (see: ngrpo list).")


def _group_of(name: str) -> str | None:
    """The flag of ours that this is an option of, or is; None for a setting and for OpenRLHF's."""
    if name in SETTINGS:
        return None
    for root in OPTION_GROUPS:
        if f"{name}.".startswith(f"{root}."):
            return root
    return None


def _kind_named(flag: str) -> Kind | None:
    """The kind of extension that a flag names; None for any other flag."""
    for kind in KINDS.values():
        if kind.flag == flag:
            return kind
    return None


def _kind_of_group(name: str) -> Kind | None:
    """The kind of extension that a flag names, or is an option of; None for any other flag."""
    group = _group_of(name)
    return None if group is None else _kind_named(group)


def _options(ours: OurFlags, root: str) -> OurFlags:
    """The options of a flag, without its name and the dot in front."""
    prefix = f"{root}."
    group_flags = {name: value for name, value in ours.items() if _group_of(name) == root}
    return {name.removeprefix(prefix): value for name, value in group_flags.items() if name != root}


def _refuse_near_miss(name: str) -> None:
    """A misspelt flag of ours must not reach OpenRLHF, where it would be an unknown word among many."""
    root, dot, option = name.partition(".")
    for group, form in OPTION_GROUPS.items():
        if "." in group:
            continue
        similar = difflib.SequenceMatcher(None, root, group).ratio() >= 0.8
        if not similar and not root.startswith(group[:8]):
            continue
        if root.startswith((f"{group}_", f"{group}-")):  # as in --perturbation_rate
            option = root[len(group) + 1 :] + dot + option
            dot = "."
        raise UsageError(f"unknown flag {name!r}. Did you mean {group + dot + option!r}? The flags are {form}.")
    for word in (name, root):
        settings = difflib.get_close_matches(word, SETTINGS, n=1, cutoff=0.8)
        if settings:
            raise UsageError(f"unknown flag {name!r}. Did you mean {settings[0]!r}? (See: ngrpo train --help.)")


def _extension(kind: Kind, ours: OurFlags, origin: str = "") -> tuple[Any, tuple[str, ...]]:
    """The extension of a kind that the flags name, None where they name none; and its warnings.

    ``origin`` says in messages where the options come from.
    """
    flag = kind.flag
    name = ours.get(flag)
    options = _options(ours, flag)
    if name is None or (name == "none" and flag != PERTURBATION):
        if options:
            option = next(iter(options))
            hint = nearest(option, ["name"]) if origin else ""
            raise UsageError(
                f"{flag}.{option} is given, but no {kind.registry.kind}.{hint} Add {flag} NAME.{origin} (See: ngrpo"
                " list.)"
            )
        return None, ()
    fields = kind.option_fields(str(name), options)
    for option in [option for option, value in options.items() if value is None]:
        if option in fields:
            owner, entry = fields[option]
            if bool not in kinds(owner, entry.name):
                raise UsageError(f"{flag}.{option} needs a value (see: ngrpo train --help).")
        options[option] = True  # a switch, or an option that the extension does not have, which checked() refuses
    try:
        return kind.checked(str(name), options)
    except UsageError as error:
        raise UsageError(f"{error}{origin}") from None
