# SPDX-License-Identifier: Apache-2.0
"""Reads a command line with its files into a :class:`ngrpo.config.run.RunConfig`."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.config.kinds import FLAGS, KINDS, Kind, run_level_kinds
from ngrpo.config.run import OF_OPENRLHF, SETTINGS, RunConfig, Sampling
from ngrpo.machine.models import conversation
from ngrpo.machine.storage import datafiles
from ngrpo.machine.upstream.openrlhf_flags import MODEL_NAMES, Flags
from perturbations.errors import UsageError, nearest
from perturbations.options import coerce, kinds

PERTURBATION = "--perturbation"
SAMPLING = "--sampling"
CONFIG = f"{PERTURBATION}.config"
REPLAY_BUFFER = f"{PERTURBATION}.replay_buffer"
CONFIG_FILE = "--config"
DRY_RUN = "--dry-run"
PRINT = "--print"
_MODEL = ("--model", f"--actor.{MODEL_NAMES}")
ALIASES = {f"{PERTURBATION}.reproducible": "--reproducible"}
"""Settings of the run that are also taken among the perturbation's options."""
# Flags that have options after a dot, and how each is written. Longer ones go first.
OPTION_GROUPS = {
    REPLAY_BUFFER: f"{REPLAY_BUFFER} NAME and {REPLAY_BUFFER}.<option> VALUE",
    **{kind.flag: f"{kind.flag} NAME and {kind.flag}.<option> VALUE" for kind in run_level_kinds()},
    PERTURBATION: f"{PERTURBATION} NAME, {PERTURBATION}.<option> VALUE and {CONFIG} FILE",
    SAMPLING: f"{SAMPLING}.top_k K, {SAMPLING}.min_p P, {SAMPLING}.correct_mask and {SAMPLING}.schedule NAME",
}
# Of several of these flags the last one counts, as of OpenRLHF's.
_LAST_COUNTS = ("--model", "--preset", "--task", "--hardware", "--run-dir", "--log-file")
_CORRECT_MASK = f"{SAMPLING}.correct_mask"
# What vLLM 0.26 to 0.31 gives engines that are made as OpenRLHF makes them.
_VLLM_LIMITS = {"max_num_seqs": 128, "max_num_batched_tokens": 2048}


def run_config(argv: Sequence[str]) -> RunConfig:
    """The run that a command line of ``ngrpo train`` asks for, its options checked; nothing is loaded or written.

    Raises:
        UsageError: for a misspelt perturbation or option, a bad value, or a flag of ours without its value.
    """
    ours, rest = _split_flags(argv)
    origin, file = "", ours.pop(CONFIG, None)
    if file:
        lines = datafiles.read_yaml(file, flag=CONFIG, example="'name: neighbor' and 'rate: 0.1'")
        flags = {PERTURBATION if key == "name" else f"{PERTURBATION}.{key}": value for key, value in lines.items()}
        ours = {ALIASES.get(flag, flag): value for flag, value in flags.items()} | ours
        origin = f" (options from {file} and the command line)"
    specs, notes = {}, []
    for kind in (KINDS["perturbation"], KINDS["replay_buffer"], *run_level_kinds()):
        made, told = _made(kind, ours, origin if kind.flag == PERTURBATION else "")
        notes += told if kind.flag == PERTURBATION else []
        if made is not None and getattr(made, "active", True):
            specs[kind.name] = made.spec()
    sampling = sampling_of(_options(ours, SAMPLING))
    settings: dict[str, Any] = {
        entry.name: coerce(RunConfig, entry, ours[flag], label=f"{flag} {ours[flag]}")
        for flag, entry in SETTINGS.items()
        if flag in ours
    }
    conversation.template_arguments(settings.get("chat_template_kwargs"))
    responses, tokens = (settings.get(name) or default for name, default in _VLLM_LIMITS.items())
    if responses > tokens:
        sizes = f"--engine.max_num_seqs is {responses} and --engine.max_num_batched_tokens {tokens}"
        why = "a step reads a token of each response, so that the latter must be at least as large"
        raise UsageError(f"{sizes}: {why}.")
    if "perturbation" not in specs and settings.get("reproducible") and f"{PERTURBATION}.seed" in ours:
        notes.append(f"{PERTURBATION}.seed has no effect where nothing is perturbed; the draws follow --train.seed.")
    if "replay_buffer" in specs and not {PERTURBATION, _CORRECT_MASK, "--replay.routing"} & ours.keys():
        raise UsageError(f"{REPLAY_BUFFER} is given, but nothing is recorded. Add {PERTURBATION} NAME.")
    model, actor = _MODEL
    if model in ours and Flags(rest).has(actor):
        raise UsageError(f"{model} and {actor} are the same setting; give one of them.")
    named = (actor, ours[model]) if model in ours else ()
    return RunConfig(specs=specs, sampling=sampling, openrlhf=(*named, *rest), notes=tuple(notes), **settings)


def sampling_of(options: Mapping[str, Any]) -> Sampling:
    """The options of ``--sampling``; ``UsageError`` for an unknown one or a value out of range."""
    known = [*(field.name for field in dataclasses.fields(Sampling)), "schedule"]
    for name in options:
        if name in OF_OPENRLHF:
            raise UsageError(f"{SAMPLING}.{name}: that is OpenRLHF's own flag; give {OF_OPENRLHF[name]}.")
        if name not in known:
            raise UsageError(
                f"unknown flag '{SAMPLING}.{name}'.{nearest(name, known)} Available:"
                f" {', '.join(f'{SAMPLING}.{each}' for each in known)}; OpenRLHF's own:"
                f" {', '.join(OF_OPENRLHF.values())}."
            )
    return Sampling(**options)


def with_files(argv: Sequence[str]) -> list[str]:
    """The words with those of each ``--config FILE`` in front: any flags of ``ngrpo train``, one per line.

    A flag of a later file overrides an earlier one's, and a flag of the command line overrides all.

    Raises:
        UsageError: for a file that cannot be read.
    """
    flags = Flags(argv)
    of_files = Flags()
    booleans: dict[str, str] = {}
    for file in (value for flag in flags if flag.name == CONFIG_FILE for value in flag.values or ("",)):
        if not file:
            raise UsageError(f"{CONFIG_FILE} needs a file (see: ngrpo train --help).")
        example = "'perturbation: neighbor' and 'rollout.batch_size: 64'"
        lines = datafiles.read_yaml(file, flag=CONFIG_FILE, example=example)
        try:
            words = datafiles.words(lines)
        except UsageError as error:
            raise UsageError(f"{CONFIG_FILE} {file}: {error}") from None
        if CONFIG_FILE in words:
            raise UsageError(f"{CONFIG_FILE} {file}: the key 'config' would read another file. Give both as flags.")
        of_files = override(of_files, Flags(words))
        for key, value in lines.items():
            booleans.pop(f"--{key}", None)  # of an earlier file
            if datafiles.has_boolean(value):
                booleans[f"--{key}"] = file
    command_line = flags.without(CONFIG_FILE)
    merged = override(of_files, command_line)
    for flag, file in booleans.items():
        if merged.has(flag) and not command_line.has(flag):
            refuse_boolean(flag, file, merged)
    return merged.argv


def refuse_boolean(flag: str, file: str, flags: Flags) -> None:
    """Refuses true or false, as YAML reads yes, no, on and off, as the value of a flag that takes a text.

    Args:
        flag: the flag whose value in ``file`` is a boolean of YAML.
        flags: all flags of the run, which name the perturbation, advantage and so on whose option the flag is.

    Raises:
        UsageError: where the flag is a setting of ours, or an option of what the flags name, that is no switch.
    """
    key = flag.removeprefix("--")
    kind = next((kind for kind in KINDS.values() if kind.flag == _group_of(flag)), None)
    owner, entry = None, None
    if flag in SETTINGS:
        owner, entry = RunConfig, SETTINGS[flag]
    elif kind is not None and flag == kind.flag:
        raise UsageError(
            f"{CONFIG_FILE} {file}: {key} takes a name (see: ngrpo list), and {key}: none is off. YAML reads yes, no,"
            " on and off as true or false."
        )
    elif kind is not None and (name := flags.value(kind.flag)) and name != "none":
        option = flag.removeprefix(f"{kind.flag}.")
        owner, entry = kind.option_fields(name, {}).get(option, (None, None))
    # Without an owner it is a flag of OpenRLHF, or an option that is refused later.
    if owner is not None and entry is not None and bool not in kinds(owner, entry.name):
        raise UsageError(
            f"{CONFIG_FILE} {file}: {key} takes a text or a number. YAML reads yes, no, on and off as true or false:"
            f' quote the text, {key}: "no".'
        )


def override(earlier: Flags, later: Flags) -> Flags:
    """Both; the later flags replace the earlier ones that set the same.

    Where the later names another perturbation, gate, advantage and so on, the options of the earlier one go. Options
    without a name stay: they are of the one that the later flags name.
    """
    names = {flag.name for flag in later}
    if names & set(_MODEL):
        names |= set(_MODEL)
    for root in FLAGS.values():
        if root in names and earlier.has(root) and later.value(root) != earlier.value(root):
            of_it = {flag.name for flag in earlier if flag.name.startswith(f"{root}.")}
            of_it -= SETTINGS.keys() | ALIASES.keys()
            names |= {name for name in of_it if root == REPLAY_BUFFER or not name.startswith(REPLAY_BUFFER)}
    return Flags([*earlier.without(*names).argv, *later.argv])


def _split_flags(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Our flags with their values, None for an option's flag without a value, and OpenRLHF's words."""
    ours: dict[str, Any] = {}
    rest: list[str] = []
    for flag in Flags(argv):
        name = ALIASES.get(flag.name, flag.name)
        if not name:
            raise UsageError(f"unexpected word {flag.argv[0]!r}: flags begin with '--'.")
        if not _is_ours(name):
            _refuse_near_miss(name)
            rest += flag.argv
            continue
        if len(flag.values) > 1:
            raise UsageError(f"{flag.name} takes one value; {flag.values[1]!r} is one too many.")
        if name in (DRY_RUN, PRINT):  # what to do with the run, and no part of it
            continue
        if name in ours and name not in _LAST_COUNTS:
            raise UsageError(f"{name} is given twice; keep one of them.")
        if name == SAMPLING:
            raise UsageError(f"{SAMPLING} needs an option: {OPTION_GROUPS[SAMPLING]}.")
        value = flag.values[0] if flag.values else None
        kind = next((kind.registry.kind for kind in KINDS.values() if kind.flag == name), None)
        option = kind is None and _group_of(name) in FLAGS.values() and name != CONFIG
        switch = name == _CORRECT_MASK or (name in SETTINGS and bool in kinds(RunConfig, SETTINGS[name].name))
        if not value and not switch and not option:
            article = "an" if kind and kind[0] in "aeiou" else "a"
            needed = f"{article} {kind}'s name (see: ngrpo list)" if kind else "a value (see: ngrpo train --help)"
            raise UsageError(f"{name} needs {needed}.")
        ours[name] = "true" if value is None and switch else value
    return ours, rest


def _is_ours(name: str) -> bool:
    return name in SETTINGS or name in ("--model", DRY_RUN, PRINT) or _group_of(name) is not None


def _group_of(name: str) -> str | None:
    """The flag of ours that this is an option of, or is; None for a setting and for OpenRLHF's."""
    found = (root for root in OPTION_GROUPS if f"{name}.".startswith(f"{root}."))
    return None if name in SETTINGS else next(found, None)


def _options(ours: Mapping[str, Any], root: str) -> dict[str, Any]:
    return {name[len(root) + 1 :]: value for name, value in ours.items() if _group_of(name) == root and name != root}


def _refuse_near_miss(name: str) -> None:
    """A misspelt flag of ours must not reach OpenRLHF, where it would be an unknown word among many."""
    root, dot, rest = name.partition(".")
    for known in (group for group in OPTION_GROUPS if "." not in group):
        if difflib.SequenceMatcher(None, root, known).ratio() >= 0.8 or root.startswith(known[:8]):
            if root.startswith((f"{known}_", f"{known}-")):
                dot, rest = ".", root[len(known) + 1 :] + dot + rest
            form = OPTION_GROUPS[known]
            raise UsageError(f"unknown flag {name!r}. Did you mean {known + dot + rest!r}? The flags are {form}.")
    for word in (name, root):
        for setting in difflib.get_close_matches(word, SETTINGS, n=1, cutoff=0.8):
            raise UsageError(f"unknown flag {name!r}. Did you mean {setting!r}? (See: ngrpo train --help.)")


def _made(kind: Kind, ours: Mapping[str, Any], origin: str) -> tuple[Any, tuple[str, ...]]:
    """The extension that is named of a kind, None for none, and its warnings."""
    flag, name, options = kind.flag, ours.get(kind.flag), _options(ours, kind.flag)
    if name is None or (name == "none" and flag != PERTURBATION):
        if options:
            first = next(iter(options))
            hint = nearest(first, ["name"]) if origin else ""
            subject = f"{flag}.{first} is given, but no {kind.registry.kind}"
            raise UsageError(f"{subject}.{hint} Add {flag} NAME.{origin} (See: ngrpo list.)")
        return None, ()
    fields = kind.option_fields(str(name), options)
    for option in [option for option, value in options.items() if value is None]:
        if option in fields and bool not in kinds(fields[option][0], fields[option][1].name):
            raise UsageError(f"{flag}.{option} needs a value (see: ngrpo train --help).")
        options[option] = True
    try:
        return kind.checked(str(name), options)
    except UsageError as error:
        raise UsageError(f"{error}{origin}") from None
