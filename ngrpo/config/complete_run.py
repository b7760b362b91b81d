# SPDX-License-Identifier: Apache-2.0
"""A run with all the flags that OpenRLHF gets: the user's, then those of each layer of defaults, in one order.

A start, a dry run, each arm of a comparison and the translation for verl make it once; ngrpo/config/rules.py checks it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from ngrpo.config import added_flags, compatibility, flag_checks
from ngrpo.config.feature_kinds import MODEL, Combination
from ngrpo.config.kinds import run_level_kinds
from ngrpo.config.run import OVERLONG, PRESETS, RunConfig
from ngrpo.machine.hardware import gpu_plan, stand_ins
from ngrpo.machine.models import packaged
from ngrpo.machine.storage.result_folder import writing
from ngrpo.machine.upstream import placement, versions
from ngrpo.machine.upstream.openrlhf_flags import MODEL_NAMES, SIZES, Default, Flags
from ngrpo.methods import tasks
from perturbations.errors import UsageError, require


@dataclass(frozen=True)
class TaskFiles:
    """The files of a task, written to a temporary folder, and OpenRLHF's flags that name them."""

    temporary: tempfile.TemporaryDirectory[str]
    flags: dict[str, Default]

    @property
    def folder(self) -> str:
        """The temporary folder, which is deleted when this process ends."""
        return self.temporary.name


@dataclass(frozen=True, kw_only=True)
class CompleteRun:
    """A run with the flags of its layers. Checks and warnings are functions of it.

    Attributes:
        run: the run as the user asked for it.
        flags: OpenRLHF's flags; ``flags.added`` are those of the layers.
        machine: the GPUs that the run is planned for; None with a CPU, where a GPU is a share of the machine.
        task_files: the files of ``--task``; None without a task, and for one that is not, or could not be, prepared.
        reasons: why each flag of the layers was added, by the flag's name.
    """

    run: RunConfig
    flags: Flags
    machine: placement.Machine | None = None
    task_files: TaskFiles | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def args(self) -> dict[str, Any]:
        """OpenRLHF's arguments; raises ``UsageError`` for flags that its parser refuses, which a rule reports."""
        return self.flags.args

    def with_layers(self, *layers: Layer) -> CompleteRun:
        """The run with the flags of these layers where no flag sets them yet; each layer sees those before it."""
        complete = self
        for layer in layers:
            flags = complete.flags.with_defaults(layer.defaults(complete))
            added_before = len(complete.flags.added)
            added_by_layer = Flags(flags.added[added_before:])
            reasons = dict(complete.reasons)
            for flag in added_by_layer:
                reasons[flag.name] = layer.reason(flag.name, complete)
            complete = replace(complete, flags=flags, reasons=reasons)
        return complete

    def on_machine(self) -> CompleteRun:
        """The run with its machine, and the layers that depend on it.

        Raises:
            UsageError: for a placement of which the user gave only some flags.
        """
        return replace(self, machine=machine_of(self.run)).with_layers(*MACHINE)

    def with_models(self, resolve: Callable[[str], str]) -> CompleteRun:
        """The run with a function applied to the name of each model, which gives the model's folder or address."""
        return replace(self, flags=self.flags.replaced(MODEL_NAMES, resolve))

    def with_task_in_run_folder(self) -> CompleteRun:
        """The run with its task's files in the folder ``task`` of the run's folder, to which a start copies them."""
        if self.task_files is None:
            return self
        temporary = self.task_files.folder
        permanent = f"{self.run.run_dir}/task"
        given = [word.replace(temporary, permanent) for word in self.flags.given]
        added = [word.replace(temporary, permanent) for word in self.flags.added]
        return replace(self, flags=Flags(given, added))

    def to_run(self) -> RunConfig:
        """The run with its complete flags, as every Ray worker has it."""
        return replace(self.run, openrlhf=tuple(self.flags.argv), hardware=self.run.profile.name)


class Layer(NamedTuple):
    """One layer of flags.

    Attributes:
        defaults: gives the layer's flags for a run that has the layers before it.
        reason: says why the layer adds a flag, by the flag's name and the run before the layer.
    """

    defaults: Callable[[CompleteRun], dict[str, Default]]
    reason: Callable[[str, CompleteRun], str]


# --- layers, in their order -------------------------------------------------------------------------

_OUTPUTS = {"--ckpt.output_dir": "model", "--ckpt.path": "checkpoints", "--logger.tensorboard_dir": "tensorboard"}
# Another flag that sets the same thing: where the user gives it, the default of ours would override it silently.
_SAME_SETTING = {"--actor.eps_clip_low_high": "--actor.eps_clip"}
# A flag of the task is not added where the user gives one of those on the right: OpenRLHF would read the task's instead
# of it, and it has no evaluation by a reward model.
_IN_PLACE_OF_TASKS = {
    "--reward.remote_url": ("--reward.model_name_or_path", "--train.agent_func_path"),
    "--eval.dataset": ("--reward.model_name_or_path",),
}
UNPREPARED: dict[str, Default] = {
    "--data.prompt_dataset": "of the task",
    "--data.apply_chat_template": None,
    "--reward.remote_url": "of the task",
}
"""Stand-in flags for a task without files: OpenRLHF's parser demands a dataset and a reward, and a patch of the chat
template is checked where it is applied."""


def of_folder(complete: CompleteRun) -> dict[str, Default]:
    """What a packaged model is trained with, and the places of the run's outputs in its folder."""
    folder = Path(complete.run.run_dir or "run")
    outputs = {flag: str(folder / name) for flag, name in _OUTPUTS.items()}
    return {**packaged.training_flags(complete.flags.value(MODEL)), **outputs}


def of_methods(complete: CompleteRun) -> dict[str, Default]:
    """What the methods need, but for the advantage: its flags win over a preset's, so they are in :func:`of_preset`."""
    defaults: dict[str, Default] = {}
    for kind in run_level_kinds():
        if kind.name == "advantage":
            continue
        method = complete.run.part(kind.name)
        if hasattr(method, "flags"):
            defaults = method.flags(complete.flags.with_defaults(defaults)) | defaults
    return defaults


def of_preset(complete: CompleteRun) -> dict[str, Default]:
    """``--preset``, and ``--advantage``, which wins.

    Raises:
        UsageError: for flags that the advantage cannot be used with.
    """
    run, flags = complete.run, complete.flags
    defaults: dict[str, Default] = {} if run.preset is None else dict(PRESETS[run.preset])
    if OVERLONG in defaults:
        # A fifth of the longest response, as in DAPO's own setting (4,096 of 20,480 tokens). Where
        # --rollout.max_new_tokens is not given, --data.max_len bounds a response.
        longest = flags.value("--rollout.max_new_tokens") or flags.or_default("--data.max_len")
        defaults[OVERLONG] = str(max(1, int(longest) // 5))
    if run.advantage is not None:
        defaults |= _clip_range(complete)
        defaults |= run.advantage.flags(flags.with_defaults(defaults))
    return {name: value for name, value in defaults.items() if not flags.has(_SAME_SETTING.get(name, name))}


def _clip_range(complete: CompleteRun) -> dict[str, Default]:
    """A wider clip of advantages than OpenRLHF's 10, where responses compared with one another may exceed it."""
    advantage = require(complete.run.advantage, "--advantage")
    second_round = complete.run.second_round
    prompts = int(complete.flags.or_default(SIZES[0]))
    compared = int(complete.flags.or_default(SIZES[1]))  # responses to one prompt
    if advantage.normalized_over_step:
        compared *= prompts
    if second_round is not None and second_round.group == "all":
        compared += second_round.prompts * second_round.answers
    bound = ceil(advantage.largest(compared))
    if bound <= 10:
        return {}
    return {"--reward.clip_range": (f"-{bound}", f"{bound}")}


def of_hardware(complete: CompleteRun) -> dict[str, Default]:
    """The defaults of the hardware profile, and PyTorch's attention where there is no flash-attn."""
    without_flash_attn = stand_ins.WITHOUT_FLASH_ATTN in complete.run.training_conditions
    attention = stand_ins.DEFAULT_FLAGS if without_flash_attn else {}
    return {**complete.run.profile.default_flags, **attention}


def of_placement(complete: CompleteRun) -> dict[str, Default]:
    """The placement of models and engines on GPUs.

    Raises:
        UsageError: for a placement of which the user gave only some flags.
    """
    if complete.machine is None:
        return {}
    flags = complete.flags
    uses_muon = "muon" in (flags.value("--actor.optim"), flags.value("--critic.optim"))
    # Noise on the weights, their moving average, 4-bit weights and Muon need each parameter whole on every GPU.
    whole_parameters = (
        complete.run.policy_noise is not None or flags.has("--train.enable_ema", "--ds.load_in_4bit") or uses_muon
    )
    # OpenRLHF's parser demands a dataset and a reward, which a task gives in a later layer.
    parseable = flags.with_defaults(of_task(complete))
    return gpu_plan.default_flags(parseable, complete.machine, whole=whole_parameters, may_offload=not uses_muon)


def of_task(complete: CompleteRun) -> dict[str, Default]:
    """The dataset and the reward of ``--task``, but for those in whose place the user gives others.

    They are stand-ins as long as the task's files are not prepared.
    """
    if complete.run.task is None:
        return {}
    defaults = UNPREPARED if complete.task_files is None else complete.task_files.flags
    flags = complete.flags
    return {name: value for name, value in defaults.items() if not flags.has(*_IN_PLACE_OF_TASKS.get(name, ()))}


PRESET = Layer(of_preset, added_flags.of_preset)
TASK = Layer(of_task, added_flags.of_task)
ALGORITHM = (Layer(of_folder, added_flags.of_folder), Layer(of_methods, added_flags.of_methods), PRESET)
MACHINE = (Layer(of_hardware, added_flags.of_hardware), Layer(of_placement, added_flags.of_placement))
DATA = (TASK,)
"""The layers in their order: of several layers with one flag, the first one sets it."""


# --- making it --------------------------------------------------------------------------------------


def make_algorithm(run: RunConfig) -> CompleteRun:
    """The run with the layers that no machine and no data change, for verl and for the summary of an old run.

    Raises:
        UsageError: for releases that ngrpo does not support, and flags and methods that do not go together.
    """
    flags = Flags(run.openrlhf).without_false()
    versions.check_stack()
    flag_checks.check(flags)
    complete = CompleteRun(run=run, flags=flags).with_models(packaged.check_name).with_layers(*ALGORITHM)
    _check_pairs(complete)
    return complete


def _check_pairs(complete: CompleteRun) -> None:
    """Raises ``UsageError`` for features of the run that cannot be used together, on whatever machine."""
    compatibility.check(compatibility.TRAINING, Combination(run=complete.run, flags=complete.flags))


Check = Callable[[CompleteRun], object]
"""Looks at a run with the layers that it has so far; raises ``UsageError`` to refuse it."""


def make(run: RunConfig, *, before_machine: Check | None = None, before_task: Check | None = None) -> CompleteRun:
    """The run with all layers.

    Args:
        run: the run as the user asked for it.
        before_machine: called before the placement is planned.
        before_task: called before the task's files are written, with stand-ins for the task's flags.

    Raises:
        UsageError: as :func:`make_algorithm`, and for a placement of which the user gave only some flags.
    """
    complete = make_algorithm(run)
    if before_machine is not None:
        before_machine(complete)
    complete = complete.on_machine()
    if before_task is not None:
        before_task(complete.with_layers(TASK))
    if run.task is not None:
        with suppress(UsageError):  # check_data of ngrpo/config/rules.py reports it
            complete = replace(complete, task_files=prepare_task(run.task))
    complete = complete.with_layers(*DATA)
    _check_pairs(complete)  # again, with the flags of all layers
    return complete


def machine_of(run: RunConfig) -> placement.Machine | None:
    """The GPUs that a run is planned for; None with a CPU, where a GPU is a share of the machine."""
    if run.profile.name == "cpu":
        return None
    no_gpu = placement.Machine((), 0.0, "this torch sees none, and no Ray cluster is joined")
    return run.machine or placement.here() or no_gpu


@lru_cache
def prepare_task(task: str) -> TaskFiles:
    """Writes a task's files to a temporary folder, once in this process.

    Raises:
        UsageError: for a task that is unknown, or cannot be prepared.
    """
    temporary = tempfile.TemporaryDirectory()
    return TaskFiles(temporary=temporary, flags=tasks.prepare(task, Path(temporary.name)))


def copy_task(task: str, folder: Path) -> None:
    """Copies a task's files into a folder of a run."""
    prepared = prepare_task(task)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file in Path(prepared.folder).iterdir():
            shutil.copyfile(file, folder / file.name)
