# SPDX-License-Identifier: Apache-2.0
"""The plan of a comparison, arms times seeds with all else equal, read from the command line and its YAML file."""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ngrpo.config import parse
from ngrpo.config.arms import Arm, parse_arms, swept_key
from ngrpo.config.run import SETTINGS, RunConfig
from ngrpo.machine.models import conversation, packaged
from ngrpo.machine.storage import datafiles
from ngrpo.machine.upstream.openrlhf_flags import DATASETS, Flag, Flags
from ngrpo.methods.scoring import reward_files
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
# What all runs share although its name begins as an option of their perturbations.
_SHARED = ("--perturbation.replay_buffer", "--perturbation.gap_limit", "--perturbation.strict")
_SWITCHES = ("stock", "discard-models")
_TEXT_KEYS = ("strategies", "perturbations", "base", "baseline", "out")  # keys of a file whose values are texts
_OURS = ("perturbations", "base", "seeds", "baseline", "threshold", "out", "config", "strategy", "sweep", *_SWITCHES)
# Flags of OpenRLHF's training that begin as those of `ngrpo eval` do here.
_TRAINING = (
    "--eval.at_start",
    "--eval.dataset",
    "--eval.split",
    "--eval.steps",
    "--eval.n_samples",
)
# Flags with which a training evaluates.
_EVALUATING = ("--eval.steps", "--eval.at_start")
# The prefixes of flags for other commands, each with the training flags that share the prefix.
_GROUPS: dict[str, tuple[str, ...]] = {"eval": _TRAINING, "diagnose": ()}


class _Words(NamedTuple):
    """The words of a command line, by whom they are for.

    Attributes:
        own: the comparison's own flags, without dashes, with all their values in order.
        groups: the flags of the other commands, by the prefix that they had.
        training: the rest, for ``ngrpo train``.
    """

    own: dict[str, list[str]]
    groups: dict[str, list[str]]
    training: list[str]

    def over(self, file: _Words) -> _Words:
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
        for command in _GROUPS:
            groups[command] = list(parse.override(Flags(file.groups[command]), Flags(self.groups[command])).argv)
        return _Words(own, groups, list(parse.override(Flags(file.training), Flags(self.training)).argv))

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
        threshold: the score above which the report counts each arm's runs, or None.
        notes: warnings.
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
    notes: tuple[str, ...] = ()

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
    words = _split_words(argv)
    if file:
        words = words.over(_split_words(_file_argv(file, lines)))
    shared = Flags(words.training)
    model = shared.value("--model") or shared.value("--actor.model_name_or_path") or ""
    # Part of the comparison, so that the diagnosis draws with them too.
    shared = shared.with_defaults(packaged.training_flags(model))

    arms = parse_arms(
        words.last("perturbations"),
        words.own.get("sweep", []),
        words.own.get("strategy", []),
        bases=words.listed("base"),
        training=True,
    )
    if file:
        _refuse_booleans(file, lines, command_line=Flags(argv), shared=shared, arms=arms)
    _refuse_arm_flags(arms)

    baseline = _baseline(words, arms)
    seeds = _seeds(words)
    effective = shared.without_false()
    evaluation_options = Flags(words.groups["eval"])
    evaluation = _evaluation(evaluation_options, effective, model)
    diagnosis_options = Flags(words.groups["diagnose"])
    diagnosis = _diagnosis(diagnosis_options, effective, arms)
    notes = _scorer_notes("--eval.scorer", evaluation_options, effective, "--eval.dataset")
    if diagnosis is not None:
        notes += _scorer_notes("--diagnose.scorer", diagnosis_options, effective, "--data.prompt_dataset")
    shared = _training_flags(shared, evaluation, evaluation_options, arms)
    plan = Plan(
        arms=tuple(arms),
        seeds=seeds,
        baseline=baseline,
        shared=tuple(shared.argv),
        model=model,
        task=shared.value("--task") or shared.value("--data.prompt_dataset") or "",
        reproducible=not words.switched_on("stock"),
        keep_models=not words.switched_on("discard-models"),
        evaluation=evaluation,
        diagnosis=diagnosis,
        threshold=_threshold(words, evaluation),
        notes=tuple(notes),
    )
    return plan, Path(words.last("out") or "runs/compare").expanduser()


def _refuse_arm_flags(arms: Sequence[Arm]) -> None:
    """Raises ``UsageError`` for a flag of an arm that is set by us or for another command, and for no known preset."""
    for arm in arms:
        for key in arm.training:
            _refuse_set_by_us(f"--{key}")
            command = _other_command(f"--{key}")
            if command:
                raise UsageError(
                    f"arm {arm.id!r}: --{key} is for ngrpo {command}, which has the same settings for all arms. Give"
                    f" --{key} once, outside of --strategy and --sweep."
                )
        if "base" in arm.training:
            coerce(RunConfig, SETTINGS["--preset"], arm.training["base"], label=f"base={arm.training['base']}")


def _training_flags(shared: Flags, evaluation: Sequence[str] | None, options: Flags, arms: Sequence[Arm]) -> Flags:
    """The shared flags, fitted to the ``evaluation`` of the trained models, whose ``options`` the user gave."""
    if shared.has(*_EVALUATING):
        # Evaluations while training have as many samples as those of the trained models, at the same temperature.
        same_settings = {"--eval.n_samples_per_prompt": "--n", "--eval.temperature": "--temperature"}
        defaults = _values_of(Flags(evaluation or ()), same_settings)
        # OpenRLHF 0.11.2 would also save a checkpoint of the best evaluation, with the optimiser's states.
        defaults["--ckpt.best_metric_key"] = "none"
        return shared.with_defaults(defaults)
    arms_evaluate = any(Flags(arm.training_flags).has(*_EVALUATING) for arm in arms)
    if _takes_dataset(options, shared.without_false(), "--eval.dataset") and not arms_evaluate:
        # Only `ngrpo eval` reads these problems: `ngrpo train` would warn that the flags have no effect.
        return shared.without("--eval.dataset", "--eval.split")
    return shared


def _baseline(words: _Words, arms: Sequence[Arm]) -> str:
    """The id of the arm that the others are compared with: as asked for, else the first ``none``, else the first."""
    ids = [arm.id for arm in arms]
    baseline = words.last("baseline")
    if baseline is None:
        unperturbed = [arm.id for arm in arms if arm.name == "none"]
        return unperturbed[0] if unperturbed else ids[0]
    if baseline not in ids:
        raise UsageError(f"--baseline {baseline!r} is none of the arms {ids}.{nearest(baseline, ids)}")
    return baseline


def _seeds(words: _Words) -> tuple[int, ...]:
    texts = words.listed("seeds") or ["0"]
    for text in texts:
        if not text.isdecimal():
            raise UsageError(f"--seeds {text!r} must be a whole number of at least 0; give several as 0,1,2.")
    seeds = tuple(map(int, texts))
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds {','.join(texts)}: a seed is given twice; give different ones.")
    return seeds


def _threshold(words: _Words, evaluation: tuple[str, ...] | None) -> float | None:
    text = words.last("threshold")
    if text is None:
        return None
    if evaluation is None:
        raise UsageError(f"--threshold {text} counts evaluated runs: give --eval.data or --task.")
    threshold = math.nan
    with suppress(ValueError):
        threshold = float(text)
    if not 0.0 <= threshold < 1.0:
        raise UsageError(f"--threshold {text}: the Mean@n that a run is to exceed, a number of at least 0 and below 1.")
    return threshold


def _split_words(argv: Sequence[str]) -> _Words:
    own = defaultdict[str, list[str]](list)
    groups = defaultdict[str, list[str]](list)
    training: list[str] = []
    for flag in Flags(argv):
        name = flag.name.removeprefix("--")
        command = _other_command(flag.name)
        if name in _OURS:
            own[name].append(_own_value(flag))
        elif command:
            groups[command] += [f"--{name.removeprefix(f'{command}.')}", *flag.values]
        elif flag.name != parse.DRY_RUN:  # no part of the plan
            _check_training_flag(flag)
            training += flag.argv
    return _Words(own, groups, training)


def _other_command(flag: str) -> str | None:
    """The command, ``eval`` or ``diagnose``, that a flag with its prefix is for; None for a flag of the training."""
    command, _, option = flag.removeprefix("--").partition(".")
    return command if command in _GROUPS and option and not flag.startswith(_GROUPS[command]) else None


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
    _refuse_set_by_us(flag.name)
    if flag.name == parse.PRINT:
        raise UsageError(f"{parse.PRINT} belongs to ngrpo train. Leave it out.")
    name = flag.name.removeprefix("--")
    if "." in name or name in ("task", "model", "hardware"):
        return
    # A misspelt flag of ours must not end in OpenRLHF, run by run.
    hint = nearest(flag.name, [f"--{own}" for own in _OURS])
    if hint:
        raise UsageError(f"unknown flag {flag.name!r}.{hint} See: ngrpo compare --help")


def _refuse_set_by_us(name: str) -> None:
    if name.startswith(_SHARED):
        return
    for flag, instead in _SET_BY_US.items():
        if name == flag or name.startswith(f"{flag}."):
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
            if key in _TEXT_KEYS and isinstance(item, bool | dict | list):
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
            for line in datafiles.texts(value):
                argv += ["--strategy", line]
        elif key == "sweep":
            for name, values in value.items():
                argv += ["--sweep", f"{name}={','.join(datafiles.texts(values))}"]
        elif key == "flags" or key in _GROUPS:
            prefix = "" if key == "flags" else f"{key}."
            try:
                argv += datafiles.words(value, prefix=prefix)
            except UsageError as error:
                raise UsageError(f"--config {path}: {key}: {error}") from None
        else:
            argv += [f"--{key}", ",".join(datafiles.texts(value))]
    return argv


def _evaluation(options: Flags, shared: Flags, model: str) -> tuple[str, ...] | None:
    """The flags of ``ngrpo eval`` for each trained model."""
    for flag in options:
        if flag.name in ("--model", "--out") or flag.name.startswith("--perturbation"):
            raise UsageError(f"--eval.{flag.name[2:]} is set by ngrpo compare for each run; leave it out.")
    options = options.with_defaults(_problems(options, shared, "--eval.dataset"))
    if not options.has("--data", "--task") or options.value("--data") == "none":
        return None
    return tuple(options.with_defaults({"--n": "8", **packaged.evaluation_flags(model)}).argv)


def _diagnosis(options: Flags, shared: Flags, arms: Sequence[Arm]) -> tuple[str, ...] | None:
    """The flags of ``ngrpo diagnose``, which draws as the rollouts of the training do."""
    rollout_settings = {
        "--max-tokens": "--rollout.max_new_tokens",
        "--temperature": "--rollout.temperature",
        "--top-p": "--rollout.top_p",
    }
    options = options.with_defaults(
        {
            **_problems(options, shared, "--data.prompt_dataset"),
            "--prompts": "8",
            **_values_of(shared, rollout_settings),
            **({} if options.has(*conversation.EVALUATION_FLAGS) else conversation.flags_like(shared)),
        }
    )
    prompts = options.value("--prompts") or ""
    if not prompts.isdecimal():
        raise UsageError(f"--diagnose.prompts {prompts!r}: must be a whole number; 0 leaves the diagnosis out.")
    # A diagnosis has one chat template: an arm with its own is left out.
    lines = dict.fromkeys(_drawn_line(arm) for arm in arms if conversation.FLAG not in arm.training_flags)
    if not lines or int(prompts) == 0:
        return None
    argv = list(options.argv)
    for line in lines:
        argv += ["--strategy", line]
    return tuple(argv)


def _problems(options: Flags, shared: Flags, dataset: str) -> dict[str, str]:
    """The training's problems where options name none: its task, or a flag's dataset.

    A dataset is read with the columns, prompts and reward of the training; :func:`_scorer_notes` warns of a reward that
    cannot be a scorer.
    """
    if options.has("--data", "--task"):
        return {}
    if not _takes_dataset(options, shared, dataset):
        return _values_of(shared, {"--task": "--task"})
    if shared.value("--data.image_key"):
        raise UsageError(
            f"--data.image_key {shared.value('--data.image_key')}: evaluation and diagnosis show no pictures. Give"
            " problems of texts with --eval.data and --diagnose.data, or leave both out with --eval.data none"
            " --diagnose.prompts 0."
        )
    same_settings = {
        "--data": dataset,
        "--split": DATASETS[dataset],
        "--input-key": "--data.input_key",
        "--label-key": "--data.label_key",
    }
    problems = {**_values_of(shared, same_settings), "--instruction": ""}  # a training appends nothing to its prompts
    if Path(problems["--data"]).suffix not in datafiles.ENDINGS:
        problems.setdefault("--split", "train")  # OpenRLHF's default, where evaluation would prefer a test split
    scorer = reward_files.python_file(shared)
    if scorer is not None:
        problems["--scorer"] = scorer
    return problems


def _takes_dataset(options: Flags, shared: Flags, dataset: str) -> bool:
    """Whether the problems are those of a flag's dataset: options name none, and the training has no task."""
    if options.has("--data", "--task") or shared.value("--task"):
        return False
    return bool(shared.value(dataset))


def _scorer_notes(scorer: str, options: Flags, shared: Flags, dataset: str) -> list[str]:
    """A warning where problems of the training are not scored by its reward; ``scorer`` is the flag of another one."""
    if options.has("--scorer") or reward_files.python_file(shared) or not _takes_dataset(options, shared, dataset):
        return []
    return [
        f"without {scorer} the problems of {dataset} {shared.value(dataset)} are scored by math, or by choice where a"
        f" question lists options, and not by the training's {flag} {shared.value(flag)}: only a Python file with"
        f" reward_func can be a scorer. Give {scorer} FILE.py for another."
        for flag in reward_files.REWARDS
        if shared.value(flag)
    ]


def _values_of(flags: Flags, same_settings: Mapping[str, str]) -> dict[str, str]:
    """Values of flags under the names of the same settings in another command: ``{name there: name here}``."""
    values = {}
    for there, name in same_settings.items():
        value = flags.value(name)
        if value is not None:
            values[there] = value
    return values


def _drawn_line(arm: Arm) -> str:
    """The arm for ``ngrpo diagnose --strategy``, with every option that changes the rollouts of the first step."""
    with suppress(UsageError):  # its schedule follows a training, or its noise depends on the training's length
        policy = policy_of(arm)
        if policy.run.sampling_schedule is not None or policy.scale:
            further = [f"{key}={value}" if value else f"--{key}" for key, value in arm.rollouts.items()]
            return shlex.join([*shlex.split(arm.line), *further])
    return arm.line
