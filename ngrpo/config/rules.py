# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's flags of a run, completed, and all rules and warnings about it.

The rules are one table for a dry run, a start and every strategy of a comparison.
"""

import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from math import ceil
from pathlib import Path
from typing import Literal

from ngrpo import patches
from ngrpo.config import compatibility, flag_checks, input_checks, stretches
from ngrpo.config.features import ESTIMATOR, MODEL, Combination
from ngrpo.config.input_checks import DATASETS, check_files, is_checked
from ngrpo.config.kinds import run_level_kinds
from ngrpo.config.run import OVERLONG, PRESETS, RunConfig
from ngrpo.machine.hardware import gpu_plan, host_plan, stand_ins, surroundings
from ngrpo.machine.models import architecture, experts, packaged
from ngrpo.machine.storage.result_folder import writing
from ngrpo.machine.upstream import placement, versions
from ngrpo.machine.upstream.openrlhf_flags import MODEL_NAMES, SIZES, Default, Flags
from ngrpo.methods import tasks
from ngrpo.methods.scoring import reward_files
from perturbations.errors import UsageError, require

# --- complete flags: given, then of folder, methods, preset, task and hardware ----------------------

_OUTPUTS = {"--ckpt.output_dir": "model", "--ckpt.path": "checkpoints", "--logger.tensorboard_dir": "tensorboard"}
# Another flag that sets the same thing: where it is given, ours would override it without a word.
_SAME_SETTING = {"--actor.eps_clip_low_high": "--actor.eps_clip"}
UNPREPARED = dict.fromkeys(("--data.prompt_dataset", "--reward.remote_url"), "of the task")
"""Stand-in flags of a task that is not, or could not be, prepared."""


def completed(run: RunConfig) -> Flags:
    """OpenRLHF's flags with those of folder, methods and preset; ``UsageError`` for flags that make no run."""
    flags = Flags(run.openrlhf).without_false()
    versions.check_stack()
    flag_checks.check(flags)
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
    return flags.with_defaults(flag_checks.row_limit(flags))


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


# --- rules ------------------------------------------------------------------------------------------

Stage = Literal["start", "data", "model"]
"""When a start comes to a rule: at once; once a task is prepared; once the model is in its folder."""


@dataclass(frozen=True)
class Rule:
    """One rule.

    ``about`` is its line in a dry run. ``check`` raises ``UsageError`` where it is broken, and returns why it could not
    look, or None.
    """

    stage: Stage
    about: str | Callable[[Flags, RunConfig], str]
    check: Callable[[Flags, RunConfig], str | None]


def check_hardware(flags: Flags, run: RunConfig) -> str | None:
    """The profile's own check, and what does not go with it or without flash-attn."""
    asked = Combination(run=run, flags=flags, hardware=run.profile.name, missing=stand_ins.missing())
    compatibility.check(compatibility.HARDWARE, asked)
    return run.profile.check(flags)


def check_parsed(flags: Flags) -> None:
    """Raises ``UsageError`` for complete flags that OpenRLHF's parser would refuse or fail over."""
    # OpenRLHF takes its critic from the reward model, and fails without words where there is no reward at all.
    if flags.or_default(ESTIMATOR) == "gae" and not flags.value("--critic.model_name_or_path"):
        reward_files.check_any(flags)
    _ = flags.args


def about_gpus(flags: Flags, run: RunConfig) -> str:
    """The number of GPUs that a run needs, and the GPUs that are there."""
    machine = machine_of(run)
    if machine is None:
        return "no GPU is needed"
    return f"GPUs: {sum(group.gpus for group in placement.groups(flags.args))} needed; {machine}"


def check_patches(flags: Flags, run: RunConfig) -> None:
    """The patches of the training, and vLLM's where the run needs what OpenRLHF lacks."""
    conditions = run.training_conditions
    patches.check(patches.active((*conditions, *patches.VLLM_CONDITIONS) if run.conditions else conditions))


def check_support(flags: Flags, run: RunConfig) -> str | None:
    """Raises ``UsageError`` for a model that the run cannot use; returns why its config.json was not read."""
    path = architecture.find_config(input_checks.name_of(flags))
    if path is not None:
        experts.check(path, replayed=run.replay_routing)
    room = 0 if run.second_round is None else run.second_round.room
    longest = int(flags.or_default("--data.max_len")) + room
    return architecture.check_perturbed(input_checks.name_of(flags), run.spec, longest)


def check_data(flags: Flags, run: RunConfig) -> str | None:
    """The dataset and where rewards come from, and why not all rows were looked at."""
    if run.task is not None and flags.value("--data.prompt_dataset") == UNPREPARED["--data.prompt_dataset"]:
        prepared(run.task)  # it could not be
    check_files(flags)
    reward_files.check_rewards(flags)
    for name in DATASETS:
        value = flags.value(name)
        if value and not is_checked(name, value):
            return f"not checked: the rows of {name} {value}; OpenRLHF loads what is no file from a folder or the hub."
    addresses = [part for part in (flags.value("--reward.remote_url") or "").split(",") if part.startswith("http")]
    if run.machine is not None and addresses:  # a run that is only planned
        return f"not checked: whether a reward server runs at {', '.join(addresses)}."
    for address in addresses:
        reward_files.check_server(address)
    return None


RULES = (
    Rule(
        "start",
        lambda *_: f"OpenRLHF {versions.OPENRLHF} and vLLM {versions.installed_vllm()} are there",
        lambda *_: versions.check_stack(),
    ),
    Rule("start", lambda _, run: f"hardware {run.profile.name} can do it", check_hardware),
    Rule("start", "caches, sockets and the working directory can be used", lambda *_: surroundings.check()),
    Rule("start", "OpenRLHF's parser and its conditions accept the flags", lambda flags, _: check_parsed(flags)),
    Rule("start", "engines and models that share GPUs agree", lambda flags, _: gpu_plan.check(flags.args)),
    Rule("start", about_gpus, lambda flags, run: gpu_plan.check_machine(flags.args, machine_of(run))),
    Rule("start", "the batches divide over the ranks", lambda flags, _: flag_checks.check_batches(flags.args)),
    Rule("start", "the upstream patches match the installed packages", check_patches),
    Rule("start", lambda flags, _: flag_checks.first_step(flags), flag_checks.check_checkpoint),
    Rule("start", "a resumed run has its model and its methods", lambda flags, run: stretches.check(flags, run)),
    Rule("start", lambda _, run: f"{run.run_dir} can be written", flag_checks.check_output),
    Rule(
        "start",
        lambda flags, _: host_plan.about_checkpoints(flags.args),
        lambda flags, run: host_plan.check_disk(flags.args, machine_of(run)),
    ),
    Rule(
        "start",
        lambda flags, run: host_plan.about_memory(flags.args, machine_of(run)),
        lambda flags, run: host_plan.check_memory(flags.args, machine_of(run)),
    ),
    Rule(
        "start",
        "shared memory for several ranks",
        lambda flags, run: host_plan.check_shared_memory(flags.args, machine_of(run)),
    ),
    Rule("data", "dataset and reward", check_data),
    Rule("data", "the last step of a pass", lambda flags, _: flag_checks.check_rows(flags)),
    Rule("data", "evaluation", flag_checks.check_evaluated),
    Rule(
        "model",
        lambda flags, _: architecture.in_words(input_checks.name_of(flags)),
        check_support,
    ),
    Rule("model", "the model's files and context", input_checks.check_folder),
    Rule("model", "the prompts can be rendered", input_checks.check_template),
    Rule("model", lambda flags, _: f"the options fit the model {flags.value(MODEL) or ''}", input_checks.check_options),
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
    ]


def started(run: RunConfig) -> Flags:
    """The complete flags of a run after the rules of a start, which come before the files of its task are written."""
    flags = completed(run)
    if run.profile.name == "cuda" and not flags.has("--use_ms"):  # ModelScope's models need not be on the hub
        for flag in flags:
            if flag.name.endswith(MODEL_NAMES) and flag.values:
                architecture.ask_hub_for_size(flag.values[0])
    flags = with_hardware(flags, run)
    check("start", with_stand_ins(flags, run), run)
    return with_task(flags, run)


def checked(run: RunConfig) -> Flags:
    """The complete flags of a run that is not started, after all checks; ``UsageError`` for the first broken rule."""
    flags = started(run)
    for stage in ("data", "model"):
        check(stage, flags, run)
    return flags
