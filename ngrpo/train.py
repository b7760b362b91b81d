# SPDX-License-Identifier: Apache-2.0
"""usage: ngrpo train [--perturbation NAME] [--perturbation.<option> VALUE ...]
                   [--advantage NAME] [--preset NAME] [flags of OpenRLHF ...]

Runs OpenRLHF's train_ppo_ray with perturbed rollouts. Our flags stand below;
every other word goes to OpenRLHF untouched. Its own help:
ngrpo train --openrlhf-help

perturbation of the rollouts
  --perturbation NAME       see below; your own: ./file.py:Name,
                            package.module:Name [none: stock OpenRLHF]
  --perturbation.<option> VALUE
                            an option of the perturbation, see below; a switch
                            may stand alone
  --perturbation.gate NAME  a further gate, named in the same ways; its options:
                            --perturbation.gate.<option>
  --perturbation.replay_buffer NAME
                            where finished trajectories wait for the trainer,
                            named in the same ways; its options:
                            --perturbation.replay_buffer.<option> [memory]
  --perturbation.config FILE
                            YAML with the same options and 'name'; a flag
                            overrides the file
  --perturbation.gap_limit X
                            warn once where log-probabilities of rollout and
                            trainer differ more than X times as much after
                            perturbed inputs as at plain positions [10];
                            docs/metrics.md
  --perturbation.strict     end the run there instead

algorithm
  --preset NAME             a set of OpenRLHF flags, printed; your flags win:
                            grpo, gspo, dapo
  --advantage NAME          an advantage of ours, see below; your own as above
                            [none: OpenRLHF's estimator]; ngrpo is NGRPO,
                            negative-enhanced GRPO; N-GRPO is --perturbation
                            neighbor
  --advantage.<option> VALUE
                            an option of the advantage
  --credit NAME             how an answer's advantage is shared among its
                            tokens, see below [all have it]
  --credit.<option> VALUE   an option of the credit
  --policy_noise NAME       noise on the weights that roll out, see below [none]
  --policy_noise.<option> VALUE
                            an option of the policy noise

sampling of the rollouts; evaluation is as it was
  --sampling.top_k K        draw from the K likeliest tokens
  --sampling.min_p P        draw from tokens with at least P times the likeliest
                            one's probability
  --sampling.correct_mask   take log-probabilities among the tokens that top-p,
                            top-k and min-p left (temperature and top-p:
                            --rollout.temperature, --rollout.top_p)
  --sampling.mask_gib N     memory that a rollout worker may take for that [8]
  --sampling.schedule NAME  a temperature that changes within an answer or over
                            the run, see below [none]
  --sampling.schedule.<option> VALUE
                            an option of the schedule
  --reproducible            the same seed gives the same rollouts from run to
                            run: whole batches in a fixed order

the run
  --eval.at_start           evaluate before the first step too, beside
                            --eval.steps
  --model NAME              = --actor.model_name_or_path; packaged models:
                            sandbox, smollm2-135m
  --task NAME               dataset and reward where you give none: arithmetic,
                            math:FILE, minimum_sum, reasoning_gym:DATASET,
                            shortcut[:FORM], star_graph, two_peaks
  --config FILE             YAML with any of these flags as keys, without dashes
                            (examples/recipes); repeatable; a later one
                            overrides an earlier one, and a flag both; 'false'
                            takes a flag of OpenRLHF out
  --report.groups N         keep all answers to N prompts of a few steps, for a
                            look into groups in report.html [0]
  --dry-run [GIB]           print configuration, placement and memory (for a GPU
                            of so many GiB), check, and start nothing
  --hardware auto|cpu|cuda  hardware profile [auto: CUDA if present]
  --run-dir DIR             model, checkpoints, TensorBoard log, summary.json
                            [runs/<time>-<perturbation>]
  --log-file FILE           what the engines print goes there, a few lines of
                            progress to the screen

examples
  ngrpo train --perturbation neighbor --perturbation.rate 0.1 \\
      --model smollm2-135m --task arithmetic --preset grpo \\
      --rollout.n_samples_per_prompt 4 --rollout.batch_size 8 \\
      --train.batch_size 32 --rollout.max_new_tokens 12
  ngrpo train --perturbation.config neighbor.yaml --perturbation.rate 0.15 ...
  ngrpo train --config examples/recipes/n_grpo_r1_distill_qwen_1.5b.yaml \\
      --config examples/recipes/placements/hybrid_8_gpus.yaml --dry-run
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from ngrpo import (
    entry_check,
    flags,
    model_support,
    models,
    openrlhf_parser,
    preflight,
    presets,
    progress,
    reward_files,
    summary,
    tasks,
    versions,
)
from ngrpo.dataset_check import is_checked
from ngrpo.hardware import attention, profile_for
from ngrpo.openrlhf_flags import Default, Flags
from ngrpo.report.page import write_training
from ngrpo.result_folder import folder_for, read_json
from ngrpo.rollout import used_runner
from ngrpo.trainer import rollout_sampling, seams
from ngrpo.trainer.launch import conditions_for
from ngrpo.trainer.run_settings import RunSettings
from perturbations.errors import UsageError


def run(words: Sequence[str], *, report: Callable[[str], None]) -> int:
    """Trains.

    Args:
        words: everything after ``ngrpo train``.
        report: called with each line for the user that is not the summary.

    Returns:
        The exit code: 0, or 1 where the training itself failed.

    Raises:
        UsageError: for bad input, before any model loads.
    """
    command = flags.parse(flags.with_files(words))
    if command.dry_run is not None:
        return dry_run(command)
    hardware = profile_for(command.hardware).name
    for note in (*command.notes, *_hardware_notes(hardware)):
        report(f"warning: {note}")
    folder = folder_for(command.run_dir, "none" if command.spec is None else command.spec["name"].rpartition(":")[2])
    preflight.check_output("--run-dir", folder, folder=True)
    if command.log_file is not None:
        preflight.check_output("--log-file", command.log_file, folder=False)
    args = _prepare(command, folder, report)
    command = replace(command, settings=_with_report(command.settings, folder))
    began = time.time()
    used_runner.watch(folder / summary.RUNNERS)
    status = _launch(args, command, hardware, report)
    if status == 0:
        text = summary.finish(folder, args, command.settings, hardware=hardware, began=began)
        write_training(read_json(folder / "summary.json"), folder / "report.html")
        print(text, flush=True)
    return status


def openrlhf_help() -> int:
    """Prints OpenRLHF's own help."""
    preflight.check_stack()
    openrlhf_parser.print_help()
    return 0


def checked_flags(command: flags.TrainCommand, folder: Path) -> Flags:
    """OpenRLHF's flags for a run, with those of a preset, an advantage and the folder, checked as far as is known.

    Args:
        command: what is asked for.
        folder: the run's; nothing is written to it.

    Raises:
        UsageError: for anything that OpenRLHF, the hardware or the run's settings would refuse once they have started.
    """
    complete = _completed(command, folder)
    _check_start(command, complete)
    _check_data(command, complete)
    return complete


def _completed(command: flags.TrainCommand, folder: Path) -> Flags:
    """OpenRLHF's flags with those of a preset, an advantage and the folder; what ours cannot go with is refused."""
    preflight.check_flags(command.openrlhf_args, command.settings)
    given = flags.replace_model_names(Flags(command.openrlhf_args), models.check_name)
    given = given.with_defaults(models.training_flags(given.value("--actor.model_name_or_path")))
    settings = command.settings
    given = given.with_defaults(flags.output_flags(folder))
    for part in (settings.policy_noise, settings.sampling_schedule):
        given = given if part is None else given.with_defaults(part.flags(given))
    complete = presets.applied(given, command.preset, settings.advantage)
    preflight.check_credit(complete, settings)
    entry_check.check_kl(complete, settings)
    preflight.check_policy_noise(complete, settings)
    preflight.check_sampling_schedule(complete, settings)
    return complete


def _of_hardware(command: flags.TrainCommand, complete: Flags) -> Flags:
    """As the launch completes the flags; a task's dataset and reward are there before it is prepared."""
    whole = complete.with_defaults(profile_for(command.hardware).default_flags)
    if command.task is not None:
        whole = whole.with_defaults(dict.fromkeys(("--data.prompt_dataset", "--reward.remote_url"), "of the task"))
    return whole


def _check_start(command: flags.TrainCommand, complete: Flags) -> None:
    whole = _of_hardware(command, complete)
    profile_for(command.hardware).check(whole)
    openrlhf_parser.check(whole.words)


def _check_data(command: flags.TrainCommand, complete: Flags) -> None:
    if command.task is not None:
        tasks.check_name(command.task)
        return
    preflight.check_files(complete.words)
    reward_files.check_rewards(complete.words)


def dry_run(command: flags.TrainCommand, *, checks_only: bool = False) -> int:
    """Prints what a run would be, and checks all that needs no GPU; nothing is loaded, kept or asked of the network.

    Args:
        command: what is asked for.
        checks_only: leave out all but the checks.

    Returns:
        0, or 1 where a check fails.

    Raises:
        UsageError: for flags that make no run.
    """
    from ngrpo.dry_run.command import run_checks, show

    preflight.check_stack()
    hardware, folder = profile_for(command.hardware), Path(command.run_dir or "runs/dry").expanduser()
    complete = _completed(command, folder)
    if command.task is not None:
        with suppress(UsageError):  # the check of the dataset tells it
            complete = complete.with_defaults(_flags_of_task(command.task, folder / "task"))
    whole = _of_hardware(command, complete)
    openrlhf_parser.check(whole.words)
    conditions = conditions_for(hardware, command.settings)
    if attention.WITHOUT_FLASH_ATTN in conditions:
        whole = whole.with_defaults(attention.DEFAULT_FLAGS)
    model = complete.value("--actor.model_name_or_path") or ""
    local = str(models.folder_of(model)) if model in models.PACKAGED else model
    checks = [
        (f"OpenRLHF {versions.OPENRLHF} and vLLM {versions.installed_vllm()} are there", preflight.check_stack),
        ("OpenRLHF's parser and its conditions accept the flags", lambda: openrlhf_parser.check(whole.words)),
        (f"hardware {hardware.name} can do it", lambda: hardware.check(whole)),
        ("attention and packing", lambda: _check_attention(whole, hardware.name, conditions)),
        ("what is replaced upstream is as it was", lambda: _check_seams(conditions)),
        ("dataset and reward", lambda: _check_data(command, complete) or _unread(command, complete)),
        ("evaluation", lambda: preflight.check_eval_at_start(complete, command.settings)),
        (model_support.told_of(local), lambda: model_support.check_perturbed(local, command.spec)),
        (f"the options fit the model {model}", lambda: _check_model(model, local, command)),
        (f"{folder} can be written", lambda: preflight.check_output("--run-dir", folder, folder=True)),
    ]
    for note in (*command.notes, *_notes_on_flags(command), *entry_check.notes(complete, command.settings)):
        print(f"warning: {note}")
    if checks_only:
        return run_checks(checks)
    return show(
        whole.words,
        command.settings,
        hardware=hardware.name,
        gpu_gib=_gib(command.dry_run or "true"),
        checks=checks,
    )


def _with_report(settings: RunSettings, folder: Path) -> RunSettings:
    """The settings with the folder in which groups are kept, where any are."""
    return replace(settings, report={**settings.report, "folder": str(folder.absolute())} if settings.report else {})


def _flags_of_task(task: str, folder: Path) -> dict[str, Default]:
    """A task's flags as they would be with its files in a folder; the files themselves are made elsewhere and go."""
    with tempfile.TemporaryDirectory() as made:
        prepared = tasks.prepare(task, Path(made))
        return {
            name: value.replace(made, str(folder)) if isinstance(value, str) else value
            for name, value in prepared.items()
        }


def _unread(command: flags.TrainCommand, complete: Flags) -> str | None:
    """Why not all rows of the dataset were looked at."""
    name = "--data.prompt_dataset"
    value = complete.value(name) or ""
    if command.task is not None or is_checked(name, value):
        return None
    return f"not checked: the rows of {name} {value}; OpenRLHF loads what is no file from a folder or the hub."


def _check_model(model: str, local: str, command: flags.TrainCommand) -> str | None:
    """The check of a local model, or why there was none."""
    if Path(local).expanduser().is_dir():
        preflight.check_model(local, command.spec)
        return None
    if model in models.PACKAGED:
        return f"not checked: the folder of {model} is made when it is first used."
    return (
        f"not checked: there is no folder {model!r}, so it is taken for a model of the hub; whether the hub has it is"
        " asked when the run starts."
    )


def _check_attention(whole: Flags, hardware: str, conditions: Sequence[str]) -> None:
    if attention.WITHOUT_FLASH_ATTN in conditions:
        attention.check(whole, hardware)


def _check_seams(conditions: Sequence[str]) -> None:
    try:
        seams.check(conditions)
    except seams.SeamMismatch as error:
        raise UsageError(str(error)) from None


def _gib(given: str) -> float | None:
    """The GiB of ``--dry-run``; None where it stood alone."""
    if given.lower() == "true":
        return None
    try:
        gib = float(given)
    except ValueError:
        gib = 0.0
    if not 0.0 < gib < float("inf"):
        raise UsageError(f"{flags.DRY_RUN} {given}: GiB of one GPU, a number greater than 0, or the flag alone.")
    return gib


def _prepare(command: flags.TrainCommand, folder: Path, report: Callable[[str], None]) -> list[str]:
    """Checks first, what takes longest last. Returns the words for OpenRLHF, additions in front."""
    preflight.check_stack()
    complete = checked_flags(command, folder)
    for note in (*_notes_on_flags(command), *entry_check.notes(complete, command.settings)):
        report(f"warning: {note}")
    if command.task is not None:
        complete = complete.with_defaults(tasks.prepare(command.task, folder / "task"))
    preflight.check_files(complete.words)
    preflight.check_eval_at_start(complete, command.settings)
    if complete.added:
        report(f"added to OpenRLHF's flags: {shlex.join(complete.added)}")

    def resolved(name: str) -> str:
        # ModelScope has models that the hub does not have.
        return name if complete.has("--use_ms") and name not in models.PACKAGED else models.resolve(name, report=report)

    complete = flags.replace_model_names(complete, resolved)
    model = complete.value("--actor.model_name_or_path") or ""
    model_support.check_perturbed(model, command.spec)
    preflight.check_model(model, command.spec)
    return complete.words


def _notes_on_flags(command: flags.TrainCommand) -> list[str]:
    """What the advantage, the sampling and the datasets' labels warn of."""
    given, settings = Flags(command.openrlhf_args), command.settings
    parts = (settings.advantage, rollout_sampling.create(**settings.sampling))
    notes = [note for part in parts if part is not None for note in part.notes(given)]
    return notes + preflight.dataset_notes(given.words)


def _launch(args: list[str], command: flags.TrainCommand, hardware: str, report: Callable[[str], None]) -> int:
    from ngrpo.trainer.launch import TrainingFailed, launch
    from ngrpo.trainer.seams import SeamMismatch

    log = progress.into_file(Path(command.log_file).expanduser()) if command.log_file else nullcontext()
    try:
        with log:
            launch(args, command.settings, hardware=hardware)
    except SeamMismatch as error:
        raise UsageError(str(error)) from None
    except TrainingFailed as error:
        report(f"training failed: {error}")
        return 1
    return 0


def _hardware_notes(hardware: str) -> list[str]:
    if hardware == "cpu":
        return []
    import torch

    if torch.cuda.is_available() or os.environ.get("RAY_ADDRESS"):
        return []
    python = f"{sys.executable} sees no CUDA device"
    return [f"--hardware cuda, but {python}: without a Ray cluster that has GPUs this waits for them forever."]
