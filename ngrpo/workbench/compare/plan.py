# SPDX-License-Identifier: Apache-2.0
"""The plan of a comparison, arms times seeds with all else equal, read from the command line and its YAML file."""

import hashlib
import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngrpo.config import parse
from ngrpo.config.arms import Arm, parse_arms
from ngrpo.config.run import SETTINGS, RunConfig
from ngrpo.machine.models import conversation, packaged
from ngrpo.machine.storage import datafiles
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.workbench.diagnose import policy_of
from perturbations.errors import UsageError, nearest
from perturbations.options import coerce

# The flags that the comparison sets for each run, and the alternative to each.
_PATHS = ("--run-dir", "--log-file", "--ckpt.output_dir", "--ckpt.path", "--logger.tensorboard_dir")
_SET_BY_US = {
    "--train.seed": "give --seeds 0,1,2",
    "--perturbation": "give --perturbations, --strategy or --sweep perturbation.OPTION=...",
    "--preset": "give --base",
    **dict.fromkeys(_PATHS, "give --out DIR for the whole comparison"),
}
_SHARED = "--perturbation.replay_buffer"  # where records wait changes no result, so all runs have the same
_SWITCHES = ("stock", "discard-models")
_TEXTS = ("strategies", "perturbations", "base", "baseline", "out")  # keys of a file whose values are texts
_OURS = ("perturbations", "base", "seeds", "baseline", "threshold", "out", "config", "strategy", "sweep", *_SWITCHES)
# Flags of other commands, by their prefix, each with the training flags that share the prefix.
_TRAINING = tuple(f"--eval.{end}" for end in ("at_start", "dataset", "split", "steps", "temperature_", "n_samples"))
_GROUPS: dict[str, tuple[str, ...]] = {"eval": _TRAINING, "diagnose": ()}


@dataclass(frozen=True)
class Run:
    """One arm with one seed; ``id`` is also the name of its folder."""

    id: str
    arm: Arm
    seed: int


@dataclass(frozen=True)
class Plan:
    """A comparison; every arm has every seed.

    Attributes:
        baseline: the id of the arm that the others are compared with.
        shared: flags for ``ngrpo train`` that all runs have.
        task: task or dataset, for people.
        reproducible: whether a run with the same seed repeats its rollouts.
        keep_models: whether a run's trained model stays after its evaluation.
        evaluation: flags for ``ngrpo eval`` except model and folder; None without problems to evaluate on.
        diagnosis: flags for ``ngrpo diagnose``, or None.
        threshold: the score above which the report counts each strategy's runs, or None.
    """

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    baseline: str
    shared: tuple[str, ...]
    model: str
    task: str
    reproducible: bool = True
    keep_models: bool = True
    evaluation: tuple[str, ...] | None = None
    diagnosis: tuple[str, ...] | None = None
    threshold: float | None = None

    def runs(self) -> list[Run]:
        """Seed by seed, so that a comparison cut short has whole seeds."""
        return [Run(f"{folder_name(arm.id)}-seed{seed}", arm, seed) for seed in self.seeds for arm in self.arms]

    def common(self) -> dict[str, Any]:
        """What all runs of one folder must share; arms and seeds may be added later."""
        return {name: getattr(self, name) for name in ("model", "task", "shared", "evaluation", "reproducible")}


def folder_name(label: str) -> str:
    """A folder's name for an arm, not hidden; a hash separates labels that differ only in odd characters."""
    plain = re.sub(r"[^\w.=+-]+", "-", label).strip("-").lstrip(".-")
    if plain == label.replace(" ", "-") and len(plain) <= 80:
        return plain
    return f"{plain[:80]}-{hashlib.sha256(label.encode()).hexdigest()[:6]}"


def read_plan(argv: Sequence[str]) -> tuple[Plan, Path]:
    """Reads everything after ``ngrpo compare``: the plan, and the comparison's folder.

    Raises:
        UsageError: for anything that could not be run.
    """
    file = Flags(argv).value("--config")
    lines = _file_lines(file) if file else {}
    own, groups, train = _split_words([*_file_argv(file, lines), *argv] if file else argv)
    rest = Flags(train)
    model = rest.value("--model") or rest.value("--actor.model_name_or_path") or ""
    # Part of the comparison, so that the diagnosis draws with them too.
    rest = rest.with_defaults(packaged.training_flags(model))
    single = {name: values[-1] for name, values in own.items()}
    bases, seeds = _listed(single, "base"), _listed(single, "seeds") or ["0"]
    arms = parse_arms(single.get("perturbations"), own["sweep"], own["strategy"], bases=bases, training=True)
    if file:
        _refuse_booleans(file, lines, command_line=Flags(argv), shared=rest, arms=arms)
    for arm in arms:
        for key in arm.training:
            _refuse_set_by_us(f"--{key}")
        if "base" in arm.training:
            coerce(RunConfig, SETTINGS["--preset"], arm.training["base"], label=f"base={arm.training['base']}")
    ids = [arm.id for arm in arms]
    baseline = single.get("baseline") or next((arm.id for arm in arms if arm.name == "none"), ids[0])
    if baseline not in ids:
        raise UsageError(f"--baseline {baseline!r} is none of the strategies {ids}.{nearest(baseline, ids)}")
    if odd := [seed for seed in seeds if not seed.isdecimal()]:
        raise UsageError(f"--seeds {odd[0]!r} must be a whole number of at least 0; give several as 0,1,2.")
    if len(set(map(int, seeds))) < len(seeds):
        raise UsageError(f"--seeds {','.join(seeds)}: a seed is given twice; give different ones.")
    evaluation = _evaluation(Flags(groups["eval"]), rest, model)
    if rest.has("--eval.steps", "--eval.at_start"):
        # Evaluations while training have as many samples as those of the trained models, at the same temperature.
        alike = {"--eval.n_samples_per_prompt": "--n", "--eval.temperature": "--temperature"}
        # OpenRLHF 0.11.2 would also save a checkpoint of the best evaluation, with the optimiser's states.
        rest = rest.with_defaults({**_values_of(Flags(evaluation or ()), alike), "--ckpt.best_metric_key": "none"})
    threshold = None
    if (text := single.get("threshold")) is not None:
        if evaluation is None:
            raise UsageError(f"--threshold {text} counts evaluated runs: give --eval.data or --task.")
        with suppress(ValueError):
            threshold = float(text)
        if threshold is None or not 0.0 <= threshold < 1.0:
            raise UsageError(
                f"--threshold {text}: the Mean@n that a run is to exceed, a number of at least 0 and below 1."
            )
    plan = Plan(
        arms=tuple(arms),
        seeds=tuple(map(int, seeds)),
        baseline=baseline,
        shared=tuple(rest.argv),
        model=model,
        task=rest.value("--task") or rest.value("--data.prompt_dataset") or "",
        reproducible=single.get("stock", "false") == "false",
        keep_models=single.get("discard-models", "false") == "false",
        evaluation=evaluation,
        diagnosis=_diagnosis(Flags(groups["diagnose"]), rest, arms),
        threshold=threshold,
    )
    return plan, Path(single.get("out", "runs/compare")).expanduser()


def _split_words(argv: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, list[str]], list[str]]:
    """Our own flags with all their values, the flags of the other commands, and the rest for ``ngrpo train``.

    The words of the file must come before those of the command line, so that the last value of a flag is the user's.
    """
    ours, groups, rest = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list), []
    for flag in Flags(argv):
        name, value = flag.name.removeprefix("--"), flag.values[0] if flag.values else ""
        group, _, option = name.partition(".")
        of_command = group in _GROUPS and option and not flag.name.startswith(_GROUPS[group])
        if name in _OURS:
            if len(flag.values) > 1:
                raise UsageError(f"{flag.name} takes one value; {flag.values[1]!r} is one too many. Quote blanks.")
            if name in _SWITCHES and value not in ("", "true", "false"):
                raise UsageError(f"--{name} {value}: it takes no value.")
            if name not in _SWITCHES and not value:
                raise UsageError(f"{flag.name} needs a value (see: ngrpo compare --help).")
            ours[name].append(value)
        elif of_command:
            groups[group] += [f"--{option}", *flag.values]
        elif flag.name != parse.DRY_RUN:  # no part of the plan
            if not flag.name:
                raise UsageError(f"unexpected word {flag.argv[0]!r}: flags begin with '--'. See: ngrpo compare --help")
            _refuse_set_by_us(flag.name)
            # A misspelt flag of ours must not end in OpenRLHF, run by run.
            ordinary = "." in name or name in ("task", "model", "hardware")
            if not ordinary and (hint := nearest(flag.name, [f"--{own}" for own in _OURS])):
                raise UsageError(f"unknown flag {flag.name!r}.{hint} See: ngrpo compare --help")
            rest += flag.argv
    return ours, groups, rest


def _refuse_set_by_us(name: str) -> None:
    for flag, instead in _SET_BY_US.items():
        if (name == flag or name.startswith(f"{flag}.")) and not name.startswith(_SHARED):
            raise UsageError(f"{name} is set by ngrpo compare for each run: {instead} instead.")


def _file_lines(path: str) -> dict[str, Any]:
    """The lines of the file, with keys and values of the right form."""
    keys = sorted({*_OURS, "strategies", "flags", *_GROUPS} - {"config", "strategy"})
    lines = datafiles.read_yaml(path, flag="--config", example="'perturbations: none,neighbor'")
    for key, value in lines.items():
        if key not in keys:
            raise UsageError(f"--config {path}: unknown key {key!r}.{nearest(key, keys)} Keys: {', '.join(keys)}.")
        if key in ("sweep", "flags", *_GROUPS) and not isinstance(value, dict):
            raise UsageError(f"--config {path}: {key} must hold lines of 'option: value'.")
        for item in value if isinstance(value, list) else [value]:
            if key in _TEXTS and isinstance(item, bool | dict | list):
                raise UsageError(
                    f"--config {path}: {key} has {item!r}, and takes texts such as 'neighbor rate=0.2'. YAML reads yes,"
                    " no, on and off as true or false, and a colon before a blank as a key: quote the text."
                )
    return lines


def _refuse_booleans(
    path: str, lines: Mapping[str, Any], *, command_line: Flags, shared: Flags, arms: Sequence[Arm]
) -> None:
    """Raises ``UsageError`` where YAML has read true or false for a flag or a swept option that takes a text."""
    for key in ("flags", "sweep"):
        for name, value in lines.get(key, {}).items():
            if datafiles.has_boolean(value) and not command_line.has(f"--{name}"):
                for arm in arms:
                    parse.refuse_boolean(f"--{name}", path, Flags([*shared.argv, *arm.flags]))


def _file_argv(path: str, lines: Mapping[str, Any]) -> list[str]:
    """The lines of the file as command-line words."""
    argv: list[str] = []
    for key, value in lines.items():
        if key == "strategies":
            argv += [word for line in datafiles.texts(value) for word in ("--strategy", line)]
        elif key not in ("sweep", "flags", *_GROUPS):
            argv += [f"--{key}", ",".join(datafiles.texts(value))]
        elif key == "sweep":
            swept = (f"{name}={','.join(datafiles.texts(values))}" for name, values in value.items())
            argv += [word for text in swept for word in ("--sweep", text)]
        else:
            try:
                argv += datafiles.words(value, prefix="" if key == "flags" else f"{key}.")
            except UsageError as error:
                raise UsageError(f"--config {path}: {key}: {error}") from None
    return argv


def _listed(single: Mapping[str, str], name: str) -> list[str]:
    values = [part.strip() for part in single[name].split(",")] if name in single else []
    if not all(values):
        raise UsageError(f"--{name} {single[name]!r}: a value is missing between the commas.")
    return values


def _evaluation(options: Flags, rest: Flags, model: str) -> tuple[str, ...] | None:
    """The flags of ``ngrpo eval`` for each trained model."""
    for flag in options:
        if flag.name in ("--model", "--out") or flag.name.startswith("--perturbation"):
            raise UsageError(f"--eval.{flag.name[2:]} is set by ngrpo compare for each run; leave it out.")
    options = options.with_defaults(_problems(options, rest, "--eval.dataset"))
    if not options.has("--data", "--task") or options.value("--data") == "none":
        return None
    return tuple(options.with_defaults({"--n": "8", **packaged.evaluation_flags(model)}).argv)


def _diagnosis(options: Flags, rest: Flags, arms: Sequence[Arm]) -> tuple[str, ...] | None:
    """The flags of ``ngrpo diagnose``, which draws as the rollouts of the training do."""
    draws = {"--max-tokens": "max_new_tokens", "--temperature": "temperature", "--top-p": "top_p"}
    alike = {there: f"--rollout.{here}" for there, here in draws.items()}
    problems = _problems(options, rest, "--data.prompt_dataset")
    template = {} if options.has(*conversation.EVALUATION_FLAGS) else conversation.flags_like(rest)
    options = options.with_defaults({**problems, "--prompts": "8", **_values_of(rest, alike), **template})
    prompts = options.value("--prompts") or ""
    if not prompts.isdecimal():
        raise UsageError(f"--diagnose.prompts {prompts!r}: must be a whole number; 0 leaves the diagnosis out.")
    # A diagnosis has one chat template: an arm with its own is left out.
    lines = dict.fromkeys(_drawn_line(arm) for arm in arms if conversation.FLAG not in arm.training_flags)
    strategies = [word for line in lines for word in ("--strategy", line)]
    return (*options.argv, *strategies) if lines and int(prompts) else None


def _problems(options: Flags, rest: Flags, dataset: str) -> dict[str, str]:
    """The training's problems where options name none: its task, or a flag's dataset."""
    alike = {"--task": "--task"} if rest.value("--task") else {"--data": dataset} if rest.value(dataset) else {}
    return {} if options.has("--data", "--task") else _values_of(rest, alike)


def _values_of(flags: Flags, alike: Mapping[str, str]) -> dict[str, str]:
    """Values of flags under the names of the same settings in another command: ``{there: here}``."""
    return {there: value for there, here in alike.items() if (value := flags.value(here)) is not None}


def _drawn_line(arm: Arm) -> str:
    """A value of ``--strategy`` of ``ngrpo diagnose``, with every part that changes the rollouts of the first step."""
    with suppress(UsageError):  # needs a training, or its length
        policy = policy_of(arm)
        if policy.run.sampling_schedule is not None or policy.scale:
            more = (f"{key}={value}" if value else f"--{key}" for key, value in arm.rollouts.items())
            return shlex.join([*shlex.split(arm.line), *more])
    return arm.line
