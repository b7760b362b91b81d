# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's flags of a run, completed: those given, then those of folder, methods, preset, task and hardware."""

import shutil
import tempfile
from contextlib import suppress
from functools import lru_cache
from math import ceil
from pathlib import Path

from ngrpo.config import batch_check, compatibility, flag_values
from ngrpo.config.features import MODEL, SIZES, Combination
from ngrpo.config.kinds import run_level_kinds
from ngrpo.config.run import OVERLONG, PRESETS, RunConfig
from ngrpo.machine.hardware import gpu_plan, stand_ins
from ngrpo.machine.models import packaged
from ngrpo.machine.storage.result_folder import writing
from ngrpo.machine.upstream import placement, versions
from ngrpo.machine.upstream.openrlhf_flags import MODEL_NAMES, Default, Flags
from ngrpo.methods import tasks
from perturbations.errors import UsageError, require

_OUTPUTS = {"--ckpt.output_dir": "model", "--ckpt.path": "checkpoints", "--logger.tensorboard_dir": "tensorboard"}
# Another flag that sets the same thing: where it is given, ours would override it without a word.
_SAME_SETTING = {"--actor.eps_clip_low_high": "--actor.eps_clip"}
UNPREPARED = dict.fromkeys(("--data.prompt_dataset", "--reward.remote_url"), "of the task")
"""Stand-in flags of a task that is not, or could not be, prepared."""


def completed(run: RunConfig) -> Flags:
    """OpenRLHF's flags with those of folder, methods and preset; ``UsageError`` for flags that make no run."""
    flags = Flags(run.openrlhf).without_false()
    versions.check_stack()
    flag_values.check(flags)
    flags = flags.replaced(MODEL_NAMES, packaged.check_name)
    folder = Path(run.run_dir or "run")
    outputs = {flag: str(folder / name) for flag, name in _OUTPUTS.items()}
    flags = flags.with_defaults({**packaged.training_flags(flags.value(MODEL)), **outputs})
    for defaults in (of_methods, of_preset):
        flags = flags.with_defaults(defaults(flags, run))
    compatibility.check(compatibility.TRAINING, Combination(run=run, flags=flags))
    return flags


def on_hardware(run: RunConfig) -> Flags:
    """The completed flags with those of the hardware; ``UsageError`` for flags that make no run."""
    return with_hardware(completed(run), run)


def with_hardware(flags: Flags, run: RunConfig) -> Flags:
    """The flags with those of the hardware, PyTorch's attention where there is no flash-attn, and a placement on GPUs.

    Raises ``UsageError`` for a placement that is given by half.
    """
    without = stand_ins.WITHOUT_FLASH_ATTN in run.training_conditions
    flags = flags.with_defaults({**run.profile.default_flags, **(stand_ins.DEFAULT_FLAGS if without else {})})
    if (machine := machine_of(run)) is None:
        return flags
    whole = run.policy_noise is not None or flags.has("--train.enable_ema")
    return flags.with_defaults(gpu_plan.default_flags(with_stand_ins(flags, run), machine, whole=whole))


def with_stand_ins(flags: Flags, run: RunConfig) -> Flags:
    """The flags with :data:`UNPREPARED` for a task, without which OpenRLHF's parser takes none."""
    return flags if run.task is None else flags.with_defaults({**UNPREPARED})


def with_task(flags: Flags, run: RunConfig) -> Flags:
    """All flags of a run, with its task's files in a temporary folder."""
    if run.task is not None:
        task: dict[str, Default] = {**UNPREPARED}
        with suppress(UsageError):  # the rule of the dataset says it
            task = prepared(run.task)[1]
        flags = flags.with_defaults(task)
    return flags.with_defaults(batch_check.of_rows(flags))


def resolve_flags(run: RunConfig) -> Flags:
    """The flags of :func:`on_hardware` and :func:`with_task`."""
    return with_task(on_hardware(run), run)


def of_methods(flags: Flags, run: RunConfig) -> dict[str, Default]:
    """What the methods need. The advantage's flags replace a preset's, and are added later."""
    parts = [run.part(kind.name) for kind in run_level_kinds() if kind.name != "advantage"]
    defaults: dict[str, Default] = {}
    for part in parts:
        if hasattr(part, "flags"):
            defaults = part.flags(flags.with_defaults(defaults)) | defaults
    return defaults


def of_preset(flags: Flags, run: RunConfig) -> dict[str, Default]:
    """``--preset`` and ``--advantage``, which wins; ``UsageError`` for flags that the advantage cannot go with."""
    defaults: dict[str, Default] = {} if run.preset is None else dict(PRESETS[run.preset])
    if OVERLONG in defaults:
        # A fifth of the longest response, as in DAPO's own setting (4,096 of 20,480 tokens). Where
        # --rollout.max_new_tokens is not given, --data.max_len bounds a response.
        longest = flags.value("--rollout.max_new_tokens") or flags.or_default("--data.max_len")
        defaults[OVERLONG] = str(max(1, int(longest) // 5))
    if run.advantage is not None:
        defaults |= _clip_range(flags, run) | run.advantage.flags(flags.with_defaults(defaults))
    return {name: value for name, value in defaults.items() if not flags.has(_SAME_SETTING.get(name, name))}


def _clip_range(flags: Flags, run: RunConfig) -> dict[str, Default]:
    """A wider clip where advantages among all responses that are compared with one another may exceed OpenRLHF's 10."""
    advantage, second = require(run.advantage, "--advantage"), run.second_round
    prompts, compared, *_ = (int(flags.or_default(name)) for name in SIZES)
    if advantage.normalized_over_step:
        compared *= prompts
    if second is not None and second.group == "all":
        compared += second.prompts * second.answers
    bound = ceil(advantage.largest(compared))
    return {"--reward.clip_range": (f"-{bound}", f"{bound}")} if bound > 10 else {}


def machine_of(run: RunConfig) -> placement.Machine | None:
    """The GPUs that a run is planned for; None with a CPU, where a GPU is a share of the machine."""
    if run.profile.name == "cpu":
        return None
    nothing = placement.Machine((), 0.0, "this torch sees none, and no Ray cluster is joined")
    return run.machine or placement.here() or nothing


@lru_cache
def prepared(task: str) -> tuple[tempfile.TemporaryDirectory[str], dict[str, Default]]:
    """A task's files in a folder that goes with this process, and OpenRLHF's flags for them."""
    folder = tempfile.TemporaryDirectory()
    return folder, tasks.prepare(task, Path(folder.name))


def copy_task(task: str, folder: Path) -> None:
    """Copies a task's files into a folder of a run."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file in Path(prepared(task)[0].name).iterdir():
            shutil.copyfile(file, folder / file.name)


def in_run_folder(flags: Flags, run: RunConfig) -> Flags:
    """The flags of :func:`resolve_flags` with a task's files where a start has them."""
    if run.task is not None:
        with suppress(UsageError):  # the rule of the dataset says it
            folder, there = prepared(run.task)[0].name, f"{run.run_dir}/task"
            given, added = ([word.replace(folder, there) for word in words] for words in (flags.given, flags.added))
            flags = Flags(given, added)
    return flags
