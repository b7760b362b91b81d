"""`ngrpo train`: check everything, launch OpenRLHF, sum up."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from ngrpo import flags, models, preflight, presets, progress, summary, tasks
from ngrpo.hardware import profile_for
from ngrpo.openrlhf_flags import Flags
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
    command = flags.parse(words)
    hardware = profile_for(command.hardware).name
    for note in (*command.notes, *_hardware_notes(hardware)):
        report(f"warning: {note}")
    folder = _run_folder(command)
    preflight.check_output("--run-dir", folder, folder=True)
    if command.log_file is not None:
        preflight.check_output("--log-file", command.log_file, folder=False)
    args = _prepare(command, folder, report)
    began = time.time()
    status = _launch(args, command, hardware, report)
    if status == 0:
        text = summary.finish(
            folder,
            args,
            spec=command.spec,
            hardware=hardware,
            began=began,
            advantage=command.advantage,
            sampling=_sampling(command, args),
            reproducible=command.reproducible,
        )
        print(text, flush=True)
    return status


def openrlhf_help() -> int:
    """Prints OpenRLHF's own help, also where its needs (flash-attn) have stand-ins."""
    from ngrpo.trainer.launch import launch
    from ngrpo.trainer.run_settings import RunSettings

    preflight.check_stack()
    launch(["--help"], RunSettings(), hardware="auto")
    return 0


def _prepare(command: flags.TrainCommand, folder: Path, report: Callable[[str], None]) -> list[str]:
    """Checks first, what takes longest last. Returns the words for OpenRLHF, additions in front."""
    preflight.check_stack()
    corrects = bool(command.sampling.get("correct_mask"))
    preflight.check_flags(command.openrlhf_args, command.spec, corrects_sampling=corrects)
    given = flags.replace_model_names(Flags(command.openrlhf_args), models.check_name)
    complete = presets.applied(given.with_defaults(flags.output_flags(folder)), command.preset, command.advantage)
    for note in (*_advantage_notes(command), *_sampling_notes(command)):
        report(f"warning: {note}")
    if command.task is not None:
        complete = complete.with_defaults(tasks.prepare(command.task, folder / "task"))
    preflight.check_files(complete.words)
    if complete.added:
        report(f"added to OpenRLHF's flags: {shlex.join(complete.added)}")
    complete = flags.replace_model_names(complete, lambda name: models.resolve(name, report=report))
    preflight.check_model(complete.value("--actor.model_name_or_path") or "", command.spec)
    return complete.words


def _launch(args: list[str], command: flags.TrainCommand, hardware: str, report: Callable[[str], None]) -> int:
    from ngrpo.trainer.launch import TrainingFailed, launch
    from ngrpo.trainer.run_settings import RunSettings
    from ngrpo.trainer.seams import SeamMismatch

    settings = RunSettings(
        perturbation_spec=command.spec,
        advantage_spec=command.advantage,
        sampling=command.sampling,
        reproducible=command.reproducible,
    )
    log = progress.into_file(Path(command.log_file).expanduser()) if command.log_file else nullcontext()
    try:
        with log:
            launch(args, settings, hardware=hardware)
    except SeamMismatch as error:
        raise UsageError(str(error)) from None
    except TrainingFailed as error:
        report(f"training failed: {error}")
        return 1
    return 0


def _advantage_notes(command: flags.TrainCommand) -> list[str]:
    if command.advantage is None:
        return []
    from ngrpo import advantages

    return advantages.create(**command.advantage).notes(Flags(command.openrlhf_args))


def _sampling_notes(command: flags.TrainCommand) -> list[str]:
    from ngrpo.trainer import rollout_sampling

    return rollout_sampling.create(**command.sampling).notes(Flags(command.openrlhf_args))


def _sampling(command: flags.TrainCommand, args: Sequence[str]) -> dict[str, float | int | None]:
    from ngrpo.trainer import rollout_sampling

    return rollout_sampling.described(rollout_sampling.create(**command.sampling), args)


def _run_folder(command: flags.TrainCommand) -> Path:
    if command.run_dir is not None:
        return Path(command.run_dir).expanduser()
    perturbation = "none" if command.spec is None else command.spec["name"].rpartition(":")[2]
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{perturbation}"


def _hardware_notes(hardware: str) -> list[str]:
    if hardware == "cpu":
        return []
    import torch

    if torch.cuda.is_available() or os.environ.get("RAY_ADDRESS"):
        return []
    python = f"{sys.executable} sees no CUDA device"
    return [f"--hardware cuda, but {python}: without a Ray cluster that has GPUs this waits for them forever."]
