# SPDX-License-Identifier: Apache-2.0
"""The words of `ngrpo compare`, and the YAML file that may hold them, made into a plan."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ngrpo.config import presets
from ngrpo.config.arms import Arm, parse_arms
from ngrpo.config.parse import DRY_RUN
from ngrpo.machine.models import packaged
from ngrpo.machine.storage import datafiles
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.workbench.compare import shares
from ngrpo.workbench.compare.plan import BASELINE, Plan
from ngrpo.workbench.diagnose.policies import policy_of
from perturbations.errors import UsageError
from perturbations.options import nearest

# What the comparison itself sets for each run, and what to give instead.
_FOLDER = "give --out DIR for the whole comparison"
_SET_BY_US = {
    "--train.seed": "give --seeds 0,1,2",
    "--perturbation": "give --perturbations, --strategy or --sweep perturbation.OPTION=...",
    "--preset": "give --base",
    "--run-dir": _FOLDER,
    "--log-file": _FOLDER,
    "--ckpt.output_dir": _FOLDER,
    "--ckpt.path": _FOLDER,
    "--logger.tensorboard_dir": _FOLDER,
}
_SHARED = "--perturbation.replay_buffer"  # where records wait changes no result, so all runs have the same
_REPEATED = ("strategy", "sweep")
_SWITCHES = ("stock", "discard-models")
_OURS = ("perturbations", "base", "seeds", "baseline", "threshold", "out", "config", *_SWITCHES, *_REPEATED)
# The beginning of a flag for another command, and the flags of a training that begin so too.
_GROUPS = {
    "eval": (
        "--eval.at_start",
        "--eval.dataset",
        "--eval.split",
        "--eval.steps",
        "--eval.temperature_",
        "--eval.n_samples",
    ),
    "diagnose": (),
}
_DEFAULT_N, _DEFAULT_PROMPTS = "8", "8"


def parse(argv: Sequence[str]) -> tuple[Plan, Path]:
    """Reads the command line.

    Args:
        argv: everything after ``ngrpo compare``.

    Returns:
        The plan and the comparison's folder. Perturbations have been loaded and their options checked; nothing else.

    Raises:
        UsageError: for anything that could not be run.
    """
    options, groups, train = _sorted(argv)
    rest = Flags(train)
    model = rest.value("--model") or rest.value("--actor.model_name_or_path") or ""
    # Of the comparison, so that the diagnosis draws with them too.
    rest = rest.with_defaults(packaged.training_flags(model))
    single = {name: values[-1] for name, values in options.items() if name not in _REPEATED}
    sweeps, lines = options.get("sweep", []), options.get("strategy", [])
    if not (single.get("perturbations") or sweeps or lines):
        raise UsageError("nothing to compare: name strategies with --perturbations none,neighbor (see: ngrpo list).")
    bases = _listed(single, "base")
    arms = parse_arms(single.get("perturbations"), sweeps, lines, bases=bases, training=True)
    for arm in arms:
        for key in arm.training:
            _refuse_set_by_us(f"--{key}")
        if "base" in arm.training:
            presets.check_name(arm.training["base"])
    evaluation = _evaluation(Flags(groups["eval"]), rest)
    plan = Plan(
        arms=tuple(arms),
        seeds=_seeds(_listed(single, "seeds") or ["0"]),
        baseline=_baseline(single.get("baseline"), arms),
        shared=tuple(_evaluated_while_training(rest, Flags(evaluation or ())).argv),
        model=model,
        task=rest.value("--task") or rest.value("--data.prompt_dataset") or "",
        reproducible=single.get("stock", "false") == "false",
        keep_models=single.get("discard-models", "false") == "false",
        evaluation=evaluation,
        diagnosis=_diagnosis(Flags(groups["diagnose"]), rest, arms),
        threshold=_threshold(single.get("threshold"), evaluation),
    )
    return plan, Path(single.get("out", "runs/compare")).expanduser()


def _sorted(argv: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, list[str]], list[str]]:
    """Our own flags with all their values, the words for the other commands, and the rest for ``ngrpo train``.

    The words of the file stand before those of the command line, so that the last value of a flag is the user's.
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
        elif flag.name != DRY_RUN:  # what to do with the plan, and no part of it
            if not flag.name:
                raise UsageError(f"unexpected word {flag.argv[0]!r}: flags begin with '--'. See: ngrpo compare --help")
            _refuse_set_by_us(flag.name)
            _refuse_near_miss(flag.name)
            rest += flag.argv
    return ours, groups, rest


def _refuse_set_by_us(name: str) -> None:
    for flag, instead in _SET_BY_US.items():
        if (name == flag or name.startswith(f"{flag}.")) and not name.startswith(_SHARED):
            raise UsageError(f"{name} is set by ngrpo compare for each run: {instead} instead.")


def _refuse_near_miss(name: str) -> None:
    """A misspelt flag of ours must not end in OpenRLHF, run by run."""
    if "." in name or name in ("--task", "--model", "--hardware"):
        return
    hint = nearest(name, [f"--{flag}" for flag in _OURS])
    if hint:
        raise UsageError(f"unknown flag {name!r}.{hint} See: ngrpo compare --help")


def _file_argv(path: str) -> list[str]:
    """The file as words, so that both ways mean the same."""
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
            argv += [
                word
                for name, values in value.items()
                for word in ("--sweep", f"{name}={','.join(datafiles.texts(values))}")
            ]
        else:
            argv += datafiles.words(value, prefix="" if key == "flags" else f"{key}.")
    return argv


def _listed(single: Mapping[str, str], name: str) -> list[str]:
    text = single.get(name)
    values = [part.strip() for part in text.split(",")] if text else []
    if not all(values):
        raise UsageError(f"--{name} {text!r}: a value is missing between the commas.")
    return values


def _seeds(parts: Sequence[str]) -> tuple[int, ...]:
    flag = f"--seeds {','.join(parts)!r}"
    for part in parts:
        if not part.isdecimal():
            raise UsageError(f"{flag}: {part!r} must be a whole number of at least 0, for example 0,1,2.")
    seeds = tuple(map(int, parts))
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"{flag}: a seed is given twice; give different ones.")
    return seeds


def _baseline(name: str | None, arms: Sequence[Arm]) -> str:
    ids = [arm.id for arm in arms]
    if name is None:
        return next((arm.id for arm in arms if arm.name == BASELINE), ids[0])
    if name not in ids:
        raise UsageError(f"--baseline {name!r} is none of the strategies.{nearest(name, ids)} They are: {ids}.")
    return name


def _threshold(text: str | None, evaluation: Sequence[str] | None) -> float | None:
    if text is None:
        return None
    value = shares.threshold(text)
    if evaluation is None:
        raise UsageError(
            f"--threshold {text} counts evaluated runs, and nothing is evaluated: give --eval.data or --task."
        )
    return value


def _evaluation(options: Flags, rest: Flags) -> tuple[str, ...] | None:
    for flag in options:
        if flag.name in ("--model", "--out") or flag.name.startswith("--perturbation"):
            raise UsageError(f"--eval.{flag.name[2:]} is set by ngrpo compare for each run; leave it out.")
    if options.value("--data") == "none":
        return None
    if not options.has("--data", "--task"):
        options = options.with_defaults(_source(rest, "--eval.dataset"))
        if not options.added:
            return None
    model = rest.value("--model") or rest.value("--actor.model_name_or_path")
    return tuple(options.with_defaults({"--n": _DEFAULT_N, **packaged.evaluation_flags(model)}).argv)


def _evaluated_while_training(rest: Flags, evaluation: Flags) -> Flags:
    """OpenRLHF's own evaluations are as those of the trained models: as many samples, at the same temperature.

    OpenRLHF 0.11.2 would also save a checkpoint of the best evaluation so far, with the optimiser's states.
    """
    if not rest.has("--eval.steps", "--eval.at_start"):
        return rest
    alike = {"--eval.n_samples_per_prompt": "--n", "--eval.temperature": "--temperature"}
    return rest.with_defaults({**_values_of(evaluation, alike), "--ckpt.best_metric_key": "none"})


def _values_of(flags: Flags, alike: Mapping[str, str]) -> dict[str, str]:
    """What flags are given as, under the names that the same settings have elsewhere: ``{there: here}``."""
    return {there: value for there, here in alike.items() if (value := flags.value(here)) is not None}


def _diagnosis(options: Flags, rest: Flags, arms: Sequence[Arm]) -> tuple[str, ...] | None:
    if not options.has("--data", "--task"):
        options = options.with_defaults(_source(rest, "--data.prompt_dataset"))
    # As the rollouts of the training are drawn.
    alike = {
        "--max-tokens": "--rollout.max_new_tokens",
        "--temperature": "--rollout.temperature",
        "--top-p": "--rollout.top_p",
    }
    options = options.with_defaults({"--prompts": _DEFAULT_PROMPTS, **_values_of(rest, alike)})
    prompts = options.value("--prompts") or ""
    if not prompts.isdecimal():
        raise UsageError(f"--diagnose.prompts {prompts!r}: must be a whole number; 0 leaves the diagnosis out.")
    lines = dict.fromkeys(_drawn_line(arm) for arm in arms)
    return (*options.argv, *(word for line in lines for word in ("--strategy", line))) if int(prompts) else None


def _drawn_line(arm: Arm) -> str:
    """A value of ``--strategy`` of ``ngrpo diagnose``, with what else changes the rollouts of the first step."""
    try:
        policy = policy_of(arm)
    except UsageError:  # what needs a training, or its length
        return arm.line
    if policy.schedule is None and not policy.scale:
        return arm.line
    more = (f"{key}={value}" if value else f"--{key}" for key, value in arm.rollouts.items())
    return shlex.join([*shlex.split(arm.line), *more])


def _source(rest: Flags, dataset: str) -> dict[str, str]:
    """The problems that the training has: of its task, or of a flag that names a dataset."""
    task, data = rest.value("--task"), rest.value(dataset)
    return {"--task": task} if task else {"--data": data} if data else {}
