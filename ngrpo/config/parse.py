# SPDX-License-Identifier: Apache-2.0
"""A command line, and the files that it names, made into a :class:`ngrpo.config.run.RunConfig`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ngrpo.config.arms import option_fields
from ngrpo.config.kinds import FLAGS, KINDS, Kind, beside_perturbation
from ngrpo.config.run import RunConfig
from ngrpo.config.sampling import create
from ngrpo.machine.storage import datafiles
from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from perturbations import registry
from perturbations.errors import UsageError
from perturbations.options import nearest

PERTURBATION = "--perturbation"
SAMPLING = "--sampling"
CORRECT_MASK = f"{SAMPLING}.correct_mask"
REPRODUCIBLE = "--reproducible"
EVAL_AT_START = "--eval.at_start"
REPORT_GROUPS = "--report.groups"
ENGINE = "--engine"
GAP_LIMIT = f"{PERTURBATION}.gap_limit"
STRICT = f"{PERTURBATION}.strict"
CONFIG = f"{PERTURBATION}.config"
REPLAY_BUFFER = f"{PERTURBATION}.replay_buffer"
MODEL_FLAG = "model_name_or_path"
_MODEL_NAMES = ("--model", f"--actor.{MODEL_FLAG}")
# A setting of the run, which is also taken where the options of the perturbation stand.
_OTHER_NAMES = {f"{PERTURBATION}.reproducible": REPRODUCIBLE}
# Flags that may be given once, some with options after a dot, and how each is written. Longer ones go first.
_ROOTS = {
    **{kind.flag: f"{kind.flag} NAME and {kind.flag}.<option> VALUE" for kind in beside_perturbation()},
    PERTURBATION: f"{PERTURBATION} NAME, {PERTURBATION}.<option> VALUE and {CONFIG} FILE",
    SAMPLING: f"{SAMPLING}.top_k K, {SAMPLING}.min_p P, {CORRECT_MASK} and {SAMPLING}.schedule NAME",
    REPRODUCIBLE: f"{REPRODUCIBLE} or {REPRODUCIBLE} false",
    EVAL_AT_START: f"{EVAL_AT_START} or {EVAL_AT_START} false",
    REPORT_GROUPS: f"{REPORT_GROUPS} N",
    ENGINE: f"{ENGINE}.max_num_seqs N and {ENGINE}.max_num_batched_tokens N",
}
_NEEDS = {PERTURBATION: KINDS["perturbation"].needs, **{kind.flag: kind.needs for kind in beside_perturbation()}}
DRY_RUN = "--dry-run"
PRINT = "--print"
# Settings of the run, whatever its perturbation is.
_OF_THE_RUN = (GAP_LIMIT, STRICT, REPLAY_BUFFER)
_SWITCHES = (REPRODUCIBLE, EVAL_AT_START, CORRECT_MASK, STRICT)
CONFIG_FILE = "--config"
_MOST_GROUPS = 16
VLLM_LIMITS = {"max_num_seqs": 128, "max_num_batched_tokens": 2048}
"""What vLLM 0.26 to 0.31 gives engines that are made as OpenRLHF makes them."""
# Ours besides these: the attribute of a run that each one sets.
_OURS = {f"--{name.replace('_', '-')}": name for name in ("hardware", "task", "run_dir", "log_file", "preset")}


def run_config(argv: Sequence[str]) -> RunConfig:
    """The run that a command line asks for.

    Args:
        argv: flags of ``ngrpo train``.

    Returns:
        The run, with the options of everything in it checked. Nothing has been loaded or written.

    Raises:
        UsageError: for a misspelt perturbation or option, a bad value, or a flag of ours without its value.
    """
    ours, rest = _sorted(argv)
    options: dict[str, Any] = {}
    config = ours.pop(CONFIG, None)
    if config:
        options = datafiles.read_yaml(config, flag=CONFIG, example="'name: neighbor' and 'rate: 0.1'")

    def setting(flag: str, key: str, default: object) -> str:
        """A setting of the run that also may stand in the file."""
        in_file = options.pop(key, default)
        return str(ours.pop(flag, in_file))

    reproducible = _switch(REPRODUCIBLE, setting(REPRODUCIBLE, "reproducible", False))
    strict = _switch(STRICT, setting(STRICT, "strict", False))
    gap_limit = _gap_limit(setting(GAP_LIMIT, "gap_limit", RunConfig.gap_limit))
    buffer = _replay_buffer(ours, options)
    spec, notes = _perturbation(ours, options, config)
    if spec is None and reproducible and f"{PERTURBATION}.seed" in ours:
        notes.append(f"{PERTURBATION}.seed has no effect where nothing is perturbed; the draws follow --train.seed.")
    if buffer is not None and spec is None and not {PERTURBATION, CORRECT_MASK} & ours.keys():
        raise UsageError(f"{REPLAY_BUFFER} is given, but nothing is recorded. Add {PERTURBATION} NAME.")
    model = f"--actor.{MODEL_FLAG}"
    if "--model" in ours:
        if Flags(rest).has(model):
            raise UsageError(f"--model and {model} are the same setting; give one of them.")
        rest = [model, ours["--model"], *rest]
    limits = _engine_limits(_options(ours, ENGINE))
    specs = {"perturbation": spec, "replay_buffer": buffer}
    specs |= {kind.name: _spec_of(ours, kind) for kind in beside_perturbation()}
    return RunConfig(
        specs={name: spec for name, spec in specs.items() if spec is not None},
        sampling=create(**_options(ours, SAMPLING)),
        gap_limit=gap_limit,
        strict=strict,
        reproducible=reproducible,
        eval_at_start=_switch(EVAL_AT_START, str(ours.pop(EVAL_AT_START, "false"))),
        report_groups=_groups(ours.pop(REPORT_GROUPS, "0")),
        max_num_seqs=limits.get("max_num_seqs"),
        max_num_batched_tokens=limits.get("max_num_batched_tokens"),
        openrlhf=tuple(rest),
        notes=tuple(notes),
        **{attribute: ours[flag] for flag, attribute in _OURS.items() if flag in ours},
    )


def with_files(argv: Sequence[str]) -> list[str]:
    """The words with those of each ``--config FILE`` in front: any flags of ``ngrpo train``, one per line.

    A flag of a later file stands in place of an earlier one's, and a flag of the command line in place of all. In a
    file, ``false`` takes a flag of OpenRLHF out.

    Raises:
        UsageError: for a file that cannot be read.
    """
    flags = Flags(argv)
    of_files, files = Flags(), [value for flag in flags if flag.name == CONFIG_FILE for value in flag.values or ("",)]
    if not files:
        return list(argv)
    for file in files:
        of_files = _in_place_of(of_files, _of_file(file))
    rest = flags.without(CONFIG_FILE)
    off = {flag.name for flag in of_files if flag.values == ("false",) and flag.name.partition(".")[0] not in _ROOTS}
    return [*_in_place_of(of_files, rest).without(*off - {flag.name for flag in rest}).argv]


def _of_file(file: str) -> Flags:
    if not file:
        raise UsageError(f"{CONFIG_FILE} needs a file (see: ngrpo train --help).")
    lines = datafiles.read_yaml(file, flag=CONFIG_FILE, example="'perturbation: neighbor' and 'rollout.batch_size: 64'")
    try:
        argv = datafiles.words(lines)
    except UsageError as error:
        raise UsageError(f"{CONFIG_FILE} {file}: {error}") from None
    if CONFIG_FILE in argv:
        raise UsageError(f"{CONFIG_FILE} {file}: the key 'config' would read another file. Give both as flags.")
    return Flags(argv)


def _in_place_of(earlier: Flags, later: Flags) -> Flags:
    """Both, the later in place of the earlier where they set the same.

    Where the later names another perturbation, gate, advantage and so on, the options of the earlier one go.
    """
    names = {flag.name for flag in later}
    if names & set(_MODEL_NAMES):
        names |= set(_MODEL_NAMES)
    for root in FLAGS.values():
        if root in names and later.value(root) != earlier.value(root):
            of_it = {flag.name for flag in earlier if flag.name.startswith(f"{root}.")}
            names |= {name for name in of_it if root == REPLAY_BUFFER or not name.startswith(_OF_THE_RUN)}
    return Flags([*earlier.without(*names).argv, *later.argv])


def replace_model_names(flags: Flags, replace: Callable[[str], str]) -> Flags:
    """Applies a function to each name in each ``*model_name_or_path`` flag; several may stand with commas."""
    return flags.replaced(MODEL_FLAG, lambda value: ",".join(replace(name.strip()) for name in value.split(",")))


def output_flags(run: Path) -> dict[str, Default]:
    """OpenRLHF's output flags for a run's folder."""
    return {
        "--ckpt.output_dir": str(run / "model"),
        "--ckpt.path": str(run / "checkpoints"),
        "--logger.tensorboard_dir": str(run / "tensorboard"),
    }


def _sorted(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Our flags with their values (None: the flag stood alone), and the other words."""
    ours: dict[str, Any] = {}
    rest: list[str] = []
    for flag in Flags(argv):
        name, root = _OTHER_NAMES.get(flag.name, flag.name), _root_of(flag.name)
        if root not in _ROOTS and name not in (*_OURS, "--model", DRY_RUN, PRINT):
            if not name:
                raise UsageError(f"unexpected word {flag.argv[0]!r}: flags begin with '--'.")
            _refuse_near_miss(name, root)
            rest += flag.argv
            continue
        value = flag.values[0] if flag.values else None
        if len(flag.values) > 1:
            raise UsageError(f"{flag.name} takes one value; {flag.values[1]!r} is one too many.")
        if root in _ROOTS and name in ours:
            raise UsageError(f"{name} is given twice; keep one of them.")
        if name in (DRY_RUN, PRINT):  # what to do with the run, and no part of it
            continue
        if name == SAMPLING:
            raise UsageError(f"{SAMPLING} needs an option: {_ROOTS[SAMPLING]}.")
        may_be_switch = tuple(f"{owner}." for owner in _NEEDS)
        alone = name in _SWITCHES or (name.startswith(may_be_switch) and name != CONFIG)
        if not value and not alone:
            raise UsageError(f"{name} needs {_NEEDS.get(name, 'a value (see: ngrpo train --help)')}.")
        ours[name] = "true" if value is None and name in _SWITCHES else value
    return ours, rest


def _root_of(name: str) -> str:
    """The flag that an option belongs to: the first of ours that it is or begins with, else what is before its dot."""
    return next((root for root in _ROOTS if f"{name}.".startswith(f"{root}.")), name.partition(".")[0])


def _options(ours: dict[str, Any], root: str) -> dict[str, Any]:
    return {name[len(root) + 1 :]: value for name, value in ours.items() if _root_of(name) == root and name != root}


def _refuse_near_miss(name: str, root: str) -> None:
    """A misspelt flag of ours must not reach OpenRLHF, where it would be an unknown word among many."""
    known = next((r for r in (*_ROOTS, "--preset") if _resembles(root, r)), None)
    if known is None:
        return
    rest = "" if root == known else name[len(root) :]
    if root.startswith((known + "_", known + "-")):
        rest = "." + root[len(known) + 1 :] + rest
    flags = _ROOTS.get(known, f"{known} NAME")
    raise UsageError(f"unknown flag {name!r}. Did you mean {known + rest!r}? The flags are {flags}.")


def _resembles(word: str, flag: str) -> bool:
    return difflib.SequenceMatcher(None, word, flag).ratio() >= 0.8 or word.startswith(flag[:8])


def _spec_of(ours: dict[str, Any], kind: Kind) -> dict[str, Any] | None:
    """The spec of what is named of a kind that stands beside the perturbation; None for none."""
    root, options = kind.flag, _options(ours, kind.flag)
    if ours.get(root, "none") == "none":
        if options:
            what = kind.registry.kind
            raise UsageError(f"{root}.{next(iter(options))} is given, but no {what}. Add {root} NAME.")
        return None
    switches = [option for option, value in options.items() if value is None]
    if switches:
        owner = kind.registry.get(ours[root])
        owner.check_option_names(options)
        for option in switches:
            _check_switch(f"{root}.{option}", owner, option)
        options |= dict.fromkeys(switches, True)
    return kind.checked(ours[root], options)[0].spec()


def _replay_buffer(ours: dict[str, Any], options: dict[str, Any]) -> dict[str, Any] | None:
    """The replay buffer's spec, taken out of the options; a flag overrides the same line of the file."""
    spec: dict[str, Any] = {}
    for source, prefix in ((options, REPLAY_BUFFER.removeprefix(f"{PERTURBATION}.")), (ours, REPLAY_BUFFER)):
        keys = [key for key in source if key == prefix or key.startswith(f"{prefix}.")]
        spec |= {key[len(prefix) + 1 :]: source.pop(key) for key in keys}
    if not spec:
        return None
    name = spec.pop("", None)
    if not isinstance(name, str):
        raise UsageError(f"{REPLAY_BUFFER} needs a name ({', '.join(registry.buffers.available())} or ./file.py:Name).")
    return registry.buffers.create(name, **spec).spec()


def _switch(flag: str, value: str) -> bool:
    meanings = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if value.lower() not in meanings:
        raise UsageError(f"{flag} {value}: true or false is needed, or the flag alone for true.")
    return meanings[value.lower()]


def _groups(groups: str) -> int:
    if not (groups.isdecimal() and groups.isascii() and int(groups) <= _MOST_GROUPS):
        raise UsageError(f"{REPORT_GROUPS} {groups}: a whole number of prompts is needed, at most {_MOST_GROUPS}.")
    return int(groups)


def _engine_limits(given: Mapping[str, str]) -> dict[str, int]:
    limits: dict[str, int] = {}
    for name, value in given.items():
        if name not in VLLM_LIMITS:
            raise UsageError(f"unknown flag '{ENGINE}.{name}'. The flags are {_ROOTS[ENGINE]}.")
        if not (value.isdecimal() and value.isascii() and int(value)):
            raise UsageError(f"{ENGINE}.{name} {value}: must be a whole number of at least 1.")
        limits[name] = int(value)
    answers, tokens = (limits.get(name, default) for name, default in VLLM_LIMITS.items())
    if limits and answers > tokens:
        raise UsageError(
            f"{ENGINE}.max_num_seqs is {answers} and {ENGINE}.max_num_batched_tokens {tokens}: a step reads a token of"
            " each answer, so that the latter must be at least as large."
        )
    return limits


def _gap_limit(value: str) -> float:
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not limit >= 1.0:
        raise UsageError(f"{GAP_LIMIT} {value}: a number of at least 1 is needed; the default is 10.")
    return limit


def _perturbation(
    ours: dict[str, Any], options: dict[str, Any], config: str | None
) -> tuple[dict[str, Any] | None, list[str]]:
    """The perturbation's spec, with the warnings about it; a flag overrides the same line of the file."""
    name = ours.get(PERTURBATION, options.pop("name", None))
    from_flags = _options(ours, PERTURBATION)
    options = {**options, **from_flags}
    if name is None:
        if options:
            first = next(iter(options))
            hint, line = (nearest(first, ["name"]), f" or a line name: NAME in {config}") if config else ("", "")
            raise UsageError(
                f"perturbation option {first!r} is given, but no perturbation.{hint} Add {PERTURBATION} NAME{line}"
                " (see: ngrpo list)."
            )
        return None, []
    options |= dict.fromkeys(
        _switches(str(name), options, [key for key in from_flags if from_flags[key] is None]), True
    )
    try:
        perturbation, notes = KINDS["perturbation"].checked(str(name), options)
    except UsageError as error:
        origin = f" (options from {config} and the command line)" if config else ""
        raise UsageError(f"{error}{origin}") from None
    return (perturbation.spec() if perturbation.active else None), list(notes)


def _switches(name: str, options: Mapping[str, Any], alone: Sequence[str]) -> list[str]:
    """Those of the flags that stood alone which the perturbation has; raises ``UsageError`` where one is no switch."""
    fields = option_fields(name, options)
    switches = {option: fields[option] for option in alone if option in fields}
    for option, (owner, field) in switches.items():
        _check_switch(f"{PERTURBATION}.{option}", owner, field.name)
    return list(switches)


def _check_switch(flag: str, owner: type, field: str) -> None:
    """Raises ``UsageError`` where a flag that stands alone is no switch."""
    from perturbations.options import kinds

    if bool not in kinds(owner, field):
        raise UsageError(f"{flag} needs a value (see: ngrpo train --help).")
