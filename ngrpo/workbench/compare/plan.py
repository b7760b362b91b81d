# SPDX-License-Identifier: Apache-2.0
"""The plan of a comparison, arms times seeds with all else equal, read from the command line and its YAML file."""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngrpo.config import parse
from ngrpo.config.arms import Arm, parse_arms
from ngrpo.machine.models import packaged
from ngrpo.machine.storage import datafiles
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.workbench.diagnose import policy_of
from perturbations.errors import UsageError
from perturbations.options import nearest

# The flags that the comparison sets for each run, and the alternative to each.
_PATHS = ("--run-dir", "--log-file", "--ckpt.output_dir", "--ckpt.path", "--logger.tensorboard_dir")
_SET_BY_US = {
    "--train.seed": "give --seeds 0,1,2",
    "--perturbation": "give --perturbations, --strategy or --sweep perturbation.OPTION=...",
    "--preset": "give --base",
    **dict.fromkeys(_PATHS, "give --out DIR for the whole comparison"),
}
_SHARED = "--perturbation.replay_buffer"  # where records wait changes no result, so all runs have the same
_REPEATED = ("strategy", "sweep")
_SWITCHES = ("stock", "discard-models")
_OURS = ("perturbations", "base", "seeds", "baseline", "threshold", "out", "config", *_SWITCHES, *_REPEATED)
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
    """A comparison.

    Attributes:
        arms: in the order given; each has every seed.
        seeds: OpenRLHF's ``--train.seed``: data order, draws and noise.
        baseline: the id of the arm that the others are compared with.
        shared: flags for ``ngrpo train`` that all runs have.
        model: the model before training.
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
        return [Run(f"{_file_name(arm.id)}-seed{seed}", arm, seed) for seed in self.seeds for arm in self.arms]

    def common(self) -> dict[str, Any]:
        """What all runs of one folder must share; arms and seeds may be added later."""
        return {name: getattr(self, name) for name in ("model", "task", "shared", "evaluation", "reproducible")}


def _file_name(label: str) -> str:
    """A folder's name for an arm; a hash separates labels that differ only in odd characters."""
    plain = re.sub(r"[^\w.=+-]+", "-", label).strip("-")
    if plain == label.replace(" ", "-") and len(plain) <= 80:
        return plain
    return f"{plain[:80]}-{hashlib.sha256(label.encode()).hexdigest()[:6]}"


def read_plan(argv: Sequence[str]) -> tuple[Plan, Path]:
    """Reads everything after ``ngrpo compare``; loads the perturbations and checks their options.

    Returns:
        The plan and the comparison's folder.

    Raises:
        UsageError: for anything that could not be run.
    """
    options, groups, train = _split_words(argv)
    rest = Flags(train)
    model = rest.value("--model") or rest.value("--actor.model_name_or_path") or ""
    # Part of the comparison, so that the diagnosis draws with them too.
    rest = rest.with_defaults(packaged.training_flags(model))
    single = {name: values[-1] for name, values in options.items() if name not in _REPEATED}
    sweeps, lines = options.get("sweep", []), options.get("strategy", [])
    arms = parse_arms(single.get("perturbations"), sweeps, lines, bases=_listed(single, "base"), training=True)
    for arm in arms:
        for key in arm.training:
            _refuse_set_by_us(f"--{key}")
        if "base" in arm.training:
            parse.check_preset(arm.training["base"])
    ids = [arm.id for arm in arms]
    baseline = single.get("baseline") or next((arm.id for arm in arms if arm.name == "none"), ids[0])
    if baseline not in ids:
        hint = nearest(baseline, ids)
        raise UsageError(f"--baseline {baseline!r} is none of the strategies.{hint} They are: {ids}.")
    seeds = _listed(single, "seeds") or ["0"]
    for seed in seeds:
        if not seed.isdecimal():
            raise UsageError(f"--seeds {seed!r} must be a whole number of at least 0; give several as 0,1,2.")
    if len(set(map(int, seeds))) < len(seeds):
        raise UsageError(f"--seeds {','.join(seeds)}: a seed is given twice; give different ones.")
    evaluation = _evaluation(Flags(groups["eval"]), rest, model)
    if rest.has("--eval.steps", "--eval.at_start"):
        # Evaluations while training have as many samples as those of the trained models, at the same temperature.
        alike = {"--eval.n_samples_per_prompt": "--n", "--eval.temperature": "--temperature"}
        # OpenRLHF 0.11.2 would also save a checkpoint of the best evaluation so far, with the optimiser's states.
        rest = rest.with_defaults({**_values_of(Flags(evaluation or ()), alike), "--ckpt.best_metric_key": "none"})
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
        threshold=_threshold(single.get("threshold"), evaluation),
    )
    return plan, Path(single.get("out", "runs/compare")).expanduser()


def _split_words(argv: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, list[str]], list[str]]:
    """Our own flags with all their values, the flags of the other commands, and the rest for ``ngrpo train``.

    The words of the file come before those of the command line, so that the last value of a flag is the user's.
    """
    file = Flags(argv).value("--config")
    ours: dict[str, list[str]] = {}
    groups: dict[str, list[str]] = {name: [] for name in _GROUPS}
    rest: list[str] = []
    for flag in (*Flags(_file_argv(file) if file else ()), *Flags(argv)):
        name, value = flag.name.removeprefix("--"), flag.values[0] if flag.values else ""
        group = next((g for g in _GROUPS if name.startswith(f"{g}.") and not flag.name.startswith(_GROUPS[g])), None)
        if name in _OURS:
            if len(flag.values) > 1:
                raise UsageError(f"{flag.name} takes one value; {flag.values[1]!r} is one too many. Quote blanks.")
            if name in _SWITCHES and value not in ("", "true", "false"):
                raise UsageError(f"--{name} {value}: it stands alone.")
            if name not in _SWITCHES and not value:
                raise UsageError(f"{flag.name} needs a value (see: ngrpo compare --help).")
            ours.setdefault(name, []).append(value)
        elif group is not None:
            groups[group] += [f"--{name[len(group) + 1 :]}", *flag.values]
        elif flag.name != parse.DRY_RUN:  # no part of the plan
            if not flag.name:
                raise UsageError(f"unexpected word {flag.argv[0]!r}: flags begin with '--'. See: ngrpo compare --help")
            _refuse_set_by_us(flag.name)
            # A misspelt flag of ours must not end in OpenRLHF, run by run.
            ordinary = "." in name or name in ("task", "model", "hardware")
            hint = "" if ordinary else nearest(flag.name, [f"--{own}" for own in _OURS])
            if hint:
                raise UsageError(f"unknown flag {flag.name!r}.{hint} See: ngrpo compare --help")
            rest += flag.argv
    return ours, groups, rest


def _refuse_set_by_us(name: str) -> None:
    for flag, instead in _SET_BY_US.items():
        if (name == flag or name.startswith(f"{flag}.")) and not name.startswith(_SHARED):
            raise UsageError(f"{name} is set by ngrpo compare for each run: {instead} instead.")


def _file_argv(path: str) -> list[str]:
    """The file as command-line words."""
    keys = sorted({*_OURS, "strategies", "flags", *_GROUPS} - {"config", "strategy"})
    argv: list[str] = []
    for key, value in datafiles.read_yaml(path, flag="--config", example="'perturbations: none,neighbor'").items():
        if key not in keys:
            raise UsageError(f"--config {path}: unknown key {key!r}.{nearest(key, keys)} Keys: {', '.join(keys)}.")
        if key == "strategies":
            argv += [word for line in datafiles.texts(value) for word in ("--strategy", line)]
        elif key not in ("sweep", "flags", *_GROUPS):
            argv += [f"--{key}", ",".join(datafiles.texts(value))]
        elif not isinstance(value, dict):
            raise UsageError(f"--config {path}: {key} must hold lines of 'option: value'.")
        elif key == "sweep":
            for name, values in value.items():
                argv += ["--sweep", f"{name}={','.join(datafiles.texts(values))}"]
        else:
            argv += datafiles.words(value, prefix="" if key == "flags" else f"{key}.")
    return argv


def _listed(single: Mapping[str, str], name: str) -> list[str]:
    text = single.get(name)
    values = [part.strip() for part in text.split(",")] if text else []
    if not all(values):
        raise UsageError(f"--{name} {text!r}: a value is missing between the commas.")
    return values


def _threshold(text: str | None, evaluation: Sequence[str] | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < 1.0:
        raise UsageError(f"--threshold {text}: the Mean@n that a run is to exceed, a number of at least 0 and below 1.")
    if evaluation is None:
        raise UsageError(
            f"--threshold {text} counts evaluated runs, and nothing is evaluated: give --eval.data or --task."
        )
    return value


def _evaluation(options: Flags, rest: Flags, model: str) -> tuple[str, ...] | None:
    """The flags of ``ngrpo eval`` for each trained model."""
    for flag in options:
        if flag.name in ("--model", "--out") or flag.name.startswith("--perturbation"):
            raise UsageError(f"--eval.{flag.name[2:]} is set by ngrpo compare for each run; leave it out.")
    if options.value("--data") == "none":
        return None
    options = _with_problems(options, rest, "--eval.dataset")
    if not options.has("--data", "--task"):
        return None
    return tuple(options.with_defaults({"--n": "8", **packaged.evaluation_flags(model)}).argv)


def _diagnosis(options: Flags, rest: Flags, arms: Sequence[Arm]) -> tuple[str, ...] | None:
    """The flags of ``ngrpo diagnose``, which draws as the rollouts of the training do."""
    options = _with_problems(options, rest, "--data.prompt_dataset")
    alike = {
        "--max-tokens": "--rollout.max_new_tokens",
        "--temperature": "--rollout.temperature",
        "--top-p": "--rollout.top_p",
    }
    options = options.with_defaults({"--prompts": "8", **_values_of(rest, alike)})
    prompts = options.value("--prompts") or ""
    if not prompts.isdecimal():
        raise UsageError(f"--diagnose.prompts {prompts!r}: must be a whole number; 0 leaves the diagnosis out.")
    lines = dict.fromkeys(_drawn_line(arm) for arm in arms)
    return (*options.argv, *(word for line in lines for word in ("--strategy", line))) if int(prompts) else None


def _with_problems(options: Flags, rest: Flags, dataset: str) -> Flags:
    """Options with the problems of the training, unless they name their own: its task, or the dataset of a flag."""
    task, data = rest.value("--task"), rest.value(dataset)
    if options.has("--data", "--task") or not (task or data):
        return options
    return options.with_defaults({"--task": task} if task else {"--data": data or ""})


def _values_of(flags: Flags, alike: Mapping[str, str]) -> dict[str, str]:
    """Values of flags under the names of the same settings in another command: ``{there: here}``."""
    return {there: value for there, here in alike.items() if (value := flags.value(here)) is not None}


def _drawn_line(arm: Arm) -> str:
    """A value of ``--strategy`` of ``ngrpo diagnose``, with all that changes the rollouts of the first step."""
    try:
        policy = policy_of(arm)
    except UsageError:  # needs a training, or its length
        return arm.line
    if policy.schedule is None and not policy.scale:
        return arm.line
    more = (f"{key}={value}" if value else f"--{key}" for key, value in arm.rollouts.items())
    return shlex.join([*shlex.split(arm.line), *more])
